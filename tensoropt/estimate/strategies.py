"""The memory of usual strategies: what a device needs at each moment of a step that can be the peak.

A *strategy* here is one that people set by hand: data parallelism, ZeRO's stages, tensor parallelism, with a
recipe of recomputation. The layouts are those of the executor: master weights, gradients and optimizer state
in float32; ZeRO-1 and -2 gather a copy in the compute dtype once per step; ZeRO-3 gathers each layer ahead of
its use, so that two layers are there at a time, and in backward the gradients of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

from tensoropt.errors import TensorOptError
from tensoropt.estimate.sizes import FLOAT32, TransformerSizes
from tensoropt.profiling.optimizers import OPTIMIZERS

DTYPES = {"bfloat16": 2, "float32": FLOAT32}
"""Bytes of a number in which operators compute."""
NOTHING, CORE, FULL = "none", "attention core", "full"
RECOMPUTE = (NOTHING, CORE, FULL)
"""Recipes of recomputation, by the names of :mod:`tensoropt.sharding.recipes`."""
_TITLES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP (ZeRO-3)"}


class NotEstimatedError(TensorOptError, ValueError):
    """A strategy that a model cannot be trained with so, or for which there is no arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedStep:
    """A training step.

    Attributes:
        batch: samples of all devices.
        sequence: tokens of a sample; 0 for models that do not read tokens.
    """

    batch: int
    sequence: int
    micro_batches: int = 1
    optimizer: str = "adam"
    dtype: str = "bfloat16"

    @property
    def element(self) -> int:
        """Bytes of a number in which operators compute."""
        return DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualStrategy:
    """One usual strategy.

    Attributes:
        data, tensor: the degrees of data and of tensor parallelism.
        stage: ZeRO's; 0 for none.
        recompute: one of :data:`RECOMPUTE`.
    """

    data: int = 1
    tensor: int = 1
    stage: int = 0
    recompute: str = NOTHING

    @property
    def title(self) -> str:
        """The name that people use."""
        if self.data * self.tensor == 1:
            return "one device"
        if self.tensor == 1:
            return _TITLES[self.stage]
        beside = "" if self.data == 1 else f" · {_TITLES[self.stage].partition(' (')[0]} {self.data}"
        return f"TP {self.tensor}{beside}"

    @property
    def words(self) -> str:
        """The name with what is recomputed."""
        recomputed = {NOTHING: "", CORE: ", attention recomputed", FULL: ", layers recomputed"}
        return self.title + recomputed[self.recompute]


class PeakMoment(NamedTuple):
    """One moment of a step.

    Attributes:
        kept: bytes of activations that backward still needs.
        working: bytes that are there besides: gradients on their way, gathered parameters, results of the
            operator that runs.
    """

    words: str
    kept: float
    working: float


class Lasting(NamedTuple):
    """Bytes of a device that stay for the whole step."""

    parameters: float
    gradients: float
    optimizer: float


class SizedModel(Protocol):
    """What the memory of a strategy follows from."""

    def parameters_on(self, tensor: int) -> float:
        """Return the parameters that one of ``tensor`` tensor-parallel ranks has."""

    def moments(self, step: AskedStep, strategy: UsualStrategy) -> Iterator[PeakMoment]:
        """Yield the moments of forward and backward that may be the peak.

        Raises:
            NotEstimatedError: there is no arithmetic for the strategy.
        """


def lasting(parameters: float, step: AskedStep, strategy: UsualStrategy) -> Lasting:
    """Return what stays for the whole step.

    Args:
        parameters: those of a rank before data parallelism shards them.
    """
    own = FLOAT32 * parameters / (1 if strategy.stage == 0 else strategy.data)
    copy = step.element * parameters if strategy.stage in (1, 2) else 0.0
    # Gradients wait for the last micro-batch beside the copy.
    waiting = FLOAT32 * parameters if strategy.stage == 1 and step.micro_batches > 1 else 0.0
    return Lasting(own + copy, own + waiting, own * OPTIMIZERS[step.optimizer].state)


def peak(model: SizedModel, step: AskedStep, strategy: UsualStrategy) -> tuple[Lasting, PeakMoment]:
    """Return what stays for the whole step, and the moment at which the most comes on top.

    Raises:
        NotEstimatedError: the batch is too small for the strategy, or there is no arithmetic for it.
    """
    least = strategy.data * step.micro_batches
    if step.batch < least:
        raise NotEstimatedError(
            f"needs a batch of {least:,} or more: a sample for each of {strategy.data} devices"
            + (f" in each of {step.micro_batches} micro-batches" if step.micro_batches > 1 else "")
        )
    stays = lasting(model.parameters_on(strategy.tensor), step, strategy)
    own = FLOAT32 * model.parameters_on(strategy.tensor) / (1 if strategy.stage == 0 else strategy.data)
    update = PeakMoment("the optimizer's update", 0.0, own * OPTIMIZERS[step.optimizer].transient)
    return stays, max((*model.moments(step, strategy), update), key=lambda m: m.kept + m.working)


def samples_of(step: AskedStep, strategy: UsualStrategy) -> int:
    """Return the samples of a micro-batch on the device that has the most."""
    return ceil(step.batch / (strategy.data * step.micro_batches))


@dataclass(frozen=True)
class LayeredModel:
    """A transformer, by the arithmetic of its layers."""

    sizes: TransformerSizes

    def parameters_on(self, tensor: int) -> float:
        return self.sizes.parameters.on(tensor)

    def moments(self, step: AskedStep, strategy: UsualStrategy) -> Iterator[PeakMoment]:
        m, element, tensor, stage = self.sizes, step.element, strategy.tensor, strategy.stage
        tokens = samples_of(step, strategy) * step.sequence
        table, layer = m.table / tensor, m.block.on(tensor)
        full, narrow = strategy.recompute == FULL, element < FLOAT32
        whole = m.kept_by_layer(element, step.sequence).on(tensor) * tokens
        core = strategy.recompute == NOTHING
        each = m.kept_by_layer(element, step.sequence, core=core).on(tensor) * tokens
        if full:
            each = m.boundary(element) * tokens
        # A layer that runs again keeps what it did not.
        again = whole - each
        end = m.kept_by_end(element) * tokens
        # With a bias behind them, logits are gathered for the loss.
        logits = FLOAT32 * m.vocabulary * tokens / (1 if m.head_product else tensor)
        # A tied table's gradient of the head waits for that of the embedding.
        tied = m.tied * FLOAT32 * table / (1 if stage == 0 else strategy.data)
        gathered = element * table if stage == 3 else 0.0
        arriving = 1 + narrow / strategy.data
        yield PeakMoment(
            "the loss's backward",
            m.layers * each + end + logits,
            2 * logits + gathered * (arriving if m.tied else 1),
        )
        yield PeakMoment(
            "the gradient of the head",
            m.layers * each + element * m.hidden * tokens,
            (element + narrow * FLOAT32) * table,
        )
        work = m.work_in_layer(element, tensor, tokens, matrix=stage == 3)
        gradients = element * (1 + 1 / strategy.data) if stage else 0.0
        for last in (m.layers, m.layers - 1):
            beside = tied + gathered * m.tied
            if last < m.layers:
                beside += gradients * layer
            if full and stage == 0 and narrow:
                # What the second forward casts stays for backward.
                beside += element * layer
            if stage == 3:
                beside += element * layer * (min(last, 2) - 1 + arriving)
            begun = work + full * (element + m.wide(element)) * m.hidden * tokens
            words = "the last layer's backward" if last == m.layers else "the last layers' backward"
            yield PeakMoment(words, last * each + again, beside + begun)
            if stage in (1, 2):
                yield PeakMoment(words, (last - 1) * each, beside + element * layer + work)
        if scores := m.scores(element, step.sequence):
            kept = m.layers * each if core else m.layers * each + (
                m.kept_by_norm(element) + m.kept_by_attention(element, step.sequence)
            ).on(tensor) * tokens  # fmt: skip
            beside = 2 * scores * tokens / tensor + (2 * element * layer if stage == 3 else 0.0)
            yield PeakMoment("attention's backward", kept, beside)


@dataclass(frozen=True, kw_only=True)
class SimulatedLines:
    """A model of which the activations were simulated at two batches, without an optimizer; they grow by a
    line.

    Attributes:
        parameters: their number.
        lines: by dtype, by ZeRO stage (and `` full`` if layers are recomputed): bytes of a device, and bytes
            for each of its samples.
    """

    parameters: int
    lines: Mapping[str, Mapping[str, tuple[float, float]]]

    def parameters_on(self, tensor: int) -> float:
        return self.parameters

    def moments(self, step: AskedStep, strategy: UsualStrategy) -> Iterator[PeakMoment]:
        """Yield the peak of forward and backward, without a distinction between kept and working."""
        if strategy.tensor > 1:
            raise NotEstimatedError("tensor parallelism is estimated for transformers with a config only")
        if strategy.recompute == CORE:
            raise NotEstimatedError("recomputed attention is estimated for transformers with a config only")
        key = f"{2 if strategy.stage == 1 else strategy.stage}{' full' * (strategy.recompute == FULL)}"
        if key not in self.lines.get(step.dtype, {}):
            raise NotEstimatedError("it has no repeated layers to recompute")
        fixed, each = self.lines[step.dtype][key]
        samples = samples_of(step, strategy)
        yield PeakMoment("backward", max(each * samples + min(fixed, 0.0), 0.0), max(fixed, 0.0))
