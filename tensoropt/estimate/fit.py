"""Will it fit? The memory of usual strategies on some devices, before anything is searched.

Arithmetic alone, so an answer takes milliseconds: figures, sentence and assumptions are the same in Python,
on the command line and on the page.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster, list_clusters, list_devices, load_cluster
from tensoropt.costs.device_fit import LEAST, MOST, TIGHT, DeviceFit, device_fit
from tensoropt.costs.process_memory import memory_of_process
from tensoropt.errors import TensorOptError, suggest
from tensoropt.estimate.known import Known, figures, known_model
from tensoropt.estimate.strategies import (
    CORE,
    DTYPES,
    RECOMPUTE,
    AskedStep,
    Lasting,
    LayeredModel,
    NotEstimatedError,
    PeakMoment,
    UsualStrategy,
    peak,
)
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.units import counted, format_bytes, format_number, read_size, share_words

KINDS = ("parameters", "gradients", "optimizer", "activations", "working memory", "process")
"""The parts of a device's memory, in the order in which they are shown."""
_PER_NODE = 8
"""Devices of a node where only their number is given; an assumption."""
_UNNAMED = "GPU"
"""The name of a device of which only the memory is known."""
_MOST = 1 << 24
"""Where the search for the largest batch or sequence ends."""
_BYTES_OF_A_TOKEN = 16
"""A step's inputs: a number and a label for each token, of 8 bytes each."""


@dataclass(frozen=True)
class FitRow:
    """One strategy with what it needs of a device.

    Attributes:
        lasting, moment, process: bytes; None with a refusal.
        budget_bytes: the memory of a device.
        refusal: why there is no figure; "" if there is one.
        largest_batch, largest_sequence: the largest that fit, everything else as given; None if none does,
            or if the model has no such size.
    """

    strategy: UsualStrategy
    budget_bytes: float
    lasting: Lasting | None = None
    moment: PeakMoment | None = None
    process: float = 0.0
    refusal: str = ""
    largest_batch: int | None = None
    largest_sequence: int | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each of :data:`KINDS` at the peak; empty with a refusal."""
        if self.lasting is None or self.moment is None:
            return {}
        sizes = (*self.lasting, self.moment.kept, self.moment.working, self.process)
        return dict(zip(KINDS, sizes, strict=True))

    @property
    def memory_bytes(self) -> float:
        """The bytes of a device at the peak; infinite with a refusal."""
        return sum(self.parts.values()) if self.parts else float("inf")

    @property
    def fits(self) -> bool:
        """Whether what it needs is within the memory of a device."""
        return not self.refusal and self.device_fit.needed_bytes <= self.budget_bytes

    @property
    def device_fit(self) -> DeviceFit:
        """Tensors and process beside the memory of a device, with the verdict that all plans get."""
        terms = {"process": self.process}
        tensors, room = self.memory_bytes - self.process, self.budget_bytes
        return device_fit(tensors, terms, room, room, estimated=True)

    @property
    def tight(self) -> bool:
        """Whether the error of such predictions decides if it fits."""
        return self.device_fit.verdict == TIGHT

    @property
    def verdict(self) -> str:
        """The answer in words: ``fits, 12 GiB free``, ``does not fit, 3.4 GiB too much``."""
        if self.refusal:
            return self.refusal
        spare = self.budget_bytes - self.device_fit.needed_bytes
        return f"{self.device_fit.verdict}, {format_bytes(abs(spare))} {'too much' if spare < 0 else 'free'}"


@dataclass(frozen=True)
class Fit:
    """What the usual strategies need on some devices.

    Attributes:
        rows: each strategy with each recipe of recomputation, the fewest changes to a program first.
    """

    model: Known
    cluster: Cluster
    step: AskedStep
    rows: tuple[FitRow, ...]

    @property
    def best(self) -> FitRow | None:
        """The strategy that fits with the fewest changes to a program: one that is not tight, if there is
        one, and rather one that shards than one that computes again."""
        fitting = [row for row in self.rows if row.fits]
        return next((row for row in fitting if not row.tight), fitting[0] if fitting else None)

    @property
    def shown(self) -> FitRow:
        """The strategy that the answer is about: the best, or the leanest if none fits."""
        return self.best or min(self.rows, key=lambda row: row.memory_bytes)

    @property
    def question(self) -> str:
        """What is asked, in words."""
        devices, step = self.cluster.device_count, self.step
        samples = counted(step.batch, "sample")
        of = f" of {counted(step.sequence, 'token')}" if step.sequence else ""
        micro = f" in {step.micro_batches} micro-batches" if step.micro_batches > 1 else ""
        return (
            f"{self.model.name} ({self.size}), {samples}{of}{micro} a step, {step.dtype}, {step.optimizer}, "
            f"on {devices} × {self.cluster.device.name} of {format_bytes(self.cluster.memory_bytes)}"
        )

    @property
    def size(self) -> str:
        """The number of parameters, in words."""
        billions = self.model.parameters / 1e9
        number, unit = (billions, "billion") if billions >= 1 else (1000 * billions, "million")
        return f"{format_number(number)} {unit} parameters"

    def sentence(self) -> str:
        """Return the answer: which strategy fits, and what of simpler ones does not."""
        best = self.best
        counted_rows = [row for row in self.rows if not row.refusal]
        if not counted_rows:
            return f"No estimate: {self.rows[0].refusal}."
        if best is None:
            leanest = self.shown
            over = leanest.device_fit.needed_bytes - leanest.budget_bytes
            return (
                f"None of these strategies fits. The leanest, {leanest.strategy.words}, needs "
                f"{format_bytes(leanest.memory_bytes)} of each device, {format_bytes(over)} too much. "
                f"{self._smaller(leanest)}"
            )
        one = self.cluster.device_count == 1
        how = f"on {best.strategy.words}" if one else f"with {best.strategy.words}"
        of = (
            f"of its {format_bytes(best.budget_bytes)}"
            if one
            else f"of {format_bytes(best.budget_bytes)} a device"
        )
        said = [f"Fits {how}: {format_bytes(best.memory_bytes)} {of}."]
        first = counted_rows[0]
        if first is not best:
            name = "Without recomputation it" if one else first.strategy.title
            least = f"{name} needs {format_bytes(first.memory_bytes)}"
            again = next(r for r in reversed(counted_rows) if r.strategy.title == first.strategy.title)
            saves = again.memory_bytes < 0.99 * first.memory_bytes
            if not one and saves and not again.fits:
                least += f", with layers recomputed {format_bytes(again.memory_bytes)}"
            said.append(f"{least}.")
        if best.tight:
            said.append("It is tight: jobs took more than predicted by as much as is left.")
        return " ".join(said)

    def _smaller(self, row: FitRow) -> str:
        smaller = []
        if row.largest_batch:
            smaller.append(f"a batch of {row.largest_batch:,}")
        if row.largest_sequence:
            smaller.append(f"a sequence of {row.largest_sequence:,}")
        if smaller:
            return f"With it {' or '.join(smaller)} would fit."
        return "No batch fits; use more or larger devices."

    @property
    def accuracy(self) -> str:
        """How far such estimates are off, in words."""
        kept = figures().get("accuracy")
        checked = (
            f"; for {kept['count']:,} strategies of the zoo's models, such estimates are "
            f"{share_words(kept['median'])} off the simulator's figure in the median, at most "
            f"{share_words(kept['worst'])}"
            if kept
            else ""
        )
        return f"An estimate by arithmetic{checked}. No GPU was compared with it."

    def assumptions(self) -> tuple[str, ...]:
        """Return what is assumed, one sentence each."""
        process = memory_of_process(self.cluster, 0.0)
        state = OPTIMIZERS[self.step.optimizer]
        said = [
            self.accuracy,
            "1 GiB is 2^30 bytes. A card sold as 80 GB has about 80 GiB, which is what counts here.",
            "Parameters, gradients and optimizer state are float32"
            + (
                "; operators compute in bfloat16 copies (mixed precision)." if self.step.element == 2 else "."
            ),
            f"{self.step.optimizer} keeps {state.state} numbers for each parameter"
            + (f", and makes {state.transient} more while it updates." if state.transient else "."),
            "Activations are what PyTorch's eager kernels keep. Attention keeps no scores where a fused "
            "kernel computes it. Dropout is off.",
            "FSDP gathers each layer ahead of its use: two layers are whole at a time, and in backward the "
            "gradients of another. The embedding and the head are gathered as they are used; where they stay "
            "gathered in the root module, they come on top.",
        ]
        if isinstance(self.model.model, LayeredModel):
            said.insert(
                5, "Logits are float32: the loss keeps one copy of them, and its backward makes two more."
            )
            if self.model.model.sizes.experts:
                said.append("Tokens go to all experts evenly; each device has its part of every expert.")
        else:
            said.append("Activations grow with the batch on a line through two simulated batches.")
        if process.of_process:
            said.append(
                f"A process takes {format_bytes(sum(process.constant()))} beside tensors (CUDA's context, "
                "cuBLAS's workspaces, the allocator's last segments), and NCCL's buffers; an estimate. The "
                "search counts that too."
            )
        else:
            said.append("CPU ranks: a process is counted without its own memory.")
        said.append(
            "Gaps between tensors (fragmentation) and what the driver keeps are not in these figures, but in "
            "the verdict. The error of predictions makes a strategy tight: of published jobs four in five "
            f"take {LEAST:g} to {MOST:g} times what was predicted."
        )
        return (*said, *self.model.notes)

    def table(self) -> list[list[str]]:
        """Return the rows as text, with a head; sizes in one unit."""
        most = max((row.memory_bytes for row in self.rows if row.parts), default=0.0)
        unit, factor = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        lengths = ["longest sequence"] if self.step.sequence else []
        found = [["strategy", "recomputed", f"{unit} in all", *KINDS, "", "largest batch", *lengths]]
        for row in self.rows:
            sizes = [row.memory_bytes, *row.parts.values()] if row.parts else []
            largest = [row.largest_batch, *([row.largest_sequence] if lengths else [])]
            found.append([
                row.strategy.title, row.strategy.recompute,
                *([format_number(size / factor) for size in sizes] or ["-"] * (1 + len(KINDS))), row.verdict,
                *("-" if size is None else f"{size:,}" for size in largest),
            ])  # fmt: skip
        return found

    @property
    def preset(self) -> str:
        """The name under which the devices can be explored; "" if that takes a file that describes them."""
        plain = re.sub(r"(x\d+)?(\[\d+\])?$", "", self.cluster.name)
        return self.cluster.name if plain in list_clusters() or plain.startswith(("local", "cpu")) else ""

    @property
    def search_source(self) -> str:
        """The model, with its sequence, that a search for the same step opens; "" if that takes a Python
        function which builds it, or a file that describes the devices."""
        if not self.model.source or not self.preset:
            return ""
        length = f"sequence={self.step.sequence}" if self.step.sequence else ""
        return _with_options(self.model.source, length)

    def explore_command(self) -> str:
        """Return the command line of that search; "" if there is none."""
        if not self.search_source:
            return ""
        step = self.step
        words = ["tensoropt", "explore", shlex.quote(self.search_source), "--cluster", self.cluster.name]
        words += ["--batch", str(step.batch)]
        words += ["--optimizer", step.optimizer] * (step.optimizer != "adam")
        words += ["--dtype", step.dtype]
        return " ".join(words)

    def fit_command(self, model: str = "") -> str:
        """Return the command line of this answer.

        Args:
            model: what stands for the model; by default its name.
        """
        step, cluster = self.step, self.cluster
        zoo = _with_options(self.model.source.removeprefix("zoo:"))
        model = model or (zoo if zoo.partition("?")[0] == self.model.name else self.model.name)
        kind = cluster.device.name
        each = f"{cluster.memory_bytes / 2**30:g}GiB" if kind == _UNNAMED else kind
        where = self.preset or f"{cluster.device_count}x{each}"
        words = ["tensoropt", "fit", shlex.quote(model), "--cluster", where]
        words += ["--batch", str(step.batch)]
        words += ["--sequence", str(step.sequence)] * bool(step.sequence)
        words += ["--micro-batches", str(step.micro_batches)] * (step.micro_batches > 1)
        words += ["--optimizer", step.optimizer] * (step.optimizer != "adam")
        return " ".join([*words, "--dtype", step.dtype])

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain data; bytes of one device."""
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "devices": self.cluster.device_count,
            "device": self.cluster.device.name,
            "device_memory_bytes": self.cluster.memory_bytes,
            "batch": self.step.batch,
            "sequence": self.step.sequence or None,
            "micro_batches": self.step.micro_batches,
            "dtype": self.step.dtype,
            "optimizer": self.step.optimizer,
            "answer": self.sentence(),
            "strategies": [
                {
                    "strategy": row.strategy.title,
                    "recompute": row.strategy.recompute,
                    "memory_bytes": None if row.refusal else round(row.memory_bytes),
                    "parts": {kind: round(size) for kind, size in row.parts.items()},
                    "peak": None if row.moment is None else row.moment.words,
                    "fits": row.fits,
                    "largest_batch": row.largest_batch,
                    "largest_sequence": row.largest_sequence,
                    "refusal": row.refusal,
                }
                for row in self.rows
            ],
            "assumptions": list(self.assumptions()),
        }


def fit(
    model: str | Path | Mapping[str, Any] | Known,
    cluster: str | Cluster = "dgx-h100",
    *,
    batch: int | None = None,
    sequence: int | None = None,
    micro_batches: int = 1,
    optimizer: str = "adam",
    dtype: str | None = None,
) -> Fit:
    """Return what the usual strategies need of each device for a training step; nothing is captured or
    searched.

    Args:
        model: a model of the zoo, of the Hugging Face Hub, or the path or content of a ``config.json``
            (:func:`~tensoropt.estimate.known.known_model`).
        cluster: as for :func:`tensoropt.explore`, or devices by their number and kind (``8xH100-80GB``) or
            memory (``8x24GiB``).
        batch: samples of all devices; by default the model's own, or one for each device if that is more.
        sequence: tokens of a sample; by default the model's own.
        dtype: ``bfloat16`` or ``float32``; by default bfloat16 for language models on GPUs that have it.

    Raises:
        ConfigError, ClusterError, TensorOptError: a value cannot be used; the message has the rule, the value
            and the remedy.
    """
    where = devices(cluster) if isinstance(cluster, str) else cluster
    known = model if isinstance(model, Known) else known_model(model)
    if sequence is not None:
        known = known.at(_at_least_one("sequence", sequence))
    if dtype is None:
        narrow = known.sequence and all(k.has_bfloat16 for k in where.kinds_of_type)
        dtype = "bfloat16" if narrow and where.device_type == "cuda" else "float32"
    for value, valid, what in ((dtype, DTYPES, "dtype"), (optimizer, OPTIMIZERS, "optimizer")):
        if value not in valid:
            raise TensorOptError(f"unknown {what} '{value}'; {suggest(value, valid)}")
    step = AskedStep(
        batch=max(known.batch, where.device_count) if batch is None else _at_least_one("batch", batch),
        sequence=known.sequence, micro_batches=_at_least_one("micro_batches", micro_batches),
        optimizer=optimizer, dtype=dtype,
    )  # fmt: skip
    rows = tuple(_row(known, where, step, strategy) for strategy in strategies(known, where))
    return Fit(known, where, step, rows)


def _with_options(source: str, more: str = "") -> str:
    name, _, options = source.partition("?")
    kept = [part for part in options.split("&") if part and not part.startswith("sequence=")]
    kept += [more] * bool(more)
    return f"{name}?{'&'.join(kept)}" if kept else name


def _at_least_one(name: str, value: int) -> int:
    if not 1 <= value <= _MOST:
        raise TensorOptError(f"{name} {value:,} is not between 1 and {_MOST:,}; give one that is")
    return value


def strategies(known: Known, cluster: Cluster) -> Iterator[UsualStrategy]:
    """Yield the usual strategies on a cluster, the fewest changes to a program first; all of them without
    recomputation, then all with each recipe."""
    count = cluster.device_count
    inner = cluster.levels[-1].size if cluster.levels else 1
    tensor = _tensor_degree(known, inner)
    usual = [{"data": count, "stage": stage} for stage in ((0, 1, 2, 3) if count > 1 else (0,))]
    if tensor > 1:
        usual.append({"data": count // tensor, "tensor": tensor})
        if count > tensor:
            usual.append({"data": count // tensor, "tensor": tensor, "stage": 3})
    for recompute in RECOMPUTE:
        if recompute == CORE and not isinstance(known.model, LayeredModel):
            continue
        for chosen in usual:
            yield UsualStrategy(**chosen, recompute=recompute)


def _tensor_degree(known: Known, most: int) -> int:
    if not isinstance(known.model, LayeredModel):
        return 1
    sizes = known.model.sizes
    evenly = (sizes.heads, sizes.key_heads, sizes.inner, most)
    return max(t for t in range(1, most + 1) if not any(size % t for size in evenly))


def _row(known: Known, cluster: Cluster, step: AskedStep, strategy: UsualStrategy) -> FitRow:
    budget, each = float(cluster.memory_bytes), strategy.data * step.micro_batches
    process = _process(cluster, strategy)

    def needs(asked: AskedStep) -> tuple[Lasting, PeakMoment, float]:
        tokens = ceil(asked.batch / strategy.data) * asked.sequence
        # A longer sequence may take a longer table of positions.
        model = known.model if asked.sequence == step.sequence else known.at(asked.sequence).model
        return *peak(model, asked, strategy), process + _BYTES_OF_A_TOKEN * tokens * (process > 0)

    def fits(asked: AskedStep) -> bool:
        return FitRow(strategy, budget, *needs(asked)).fits

    try:
        needed = needs(step)
    except NotEstimatedError as refusal:
        return FitRow(strategy, budget, refusal=str(refusal))
    batch = _largest(lambda count: fits(replace(step, batch=count * each)), _MOST // each)
    length = None
    if step.sequence:
        length = _largest(lambda tokens: fits(replace(step, sequence=tokens)), known.longest or _MOST)
    return FitRow(strategy, budget, *needed, largest_batch=batch and batch * each, largest_sequence=length)


def _largest(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the largest number that fits, where all smaller ones do; None if not even 1 does."""
    if not fits(1):
        return None
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _process(cluster: Cluster, strategy: UsualStrategy) -> float:
    of = memory_of_process(cluster, 0.0)
    if not of.of_process:
        return 0.0
    levels = [level.name for level in cluster.levels]
    buffers = 0.0
    if strategy.data > 1:
        kinds = {"all_reduce"} if strategy.stage == 0 else {"all_gather", "reduce_scatter"}
        buffers += of.communicator_bytes(levels, kinds, strategy.data)
    if strategy.tensor > 1:
        buffers += of.communicator_bytes(levels[-1:], {"all_reduce"}, strategy.tensor)
    return sum(of.constant(buffers))


def devices(text: str) -> Cluster:
    """Return a cluster by a name or a file, or by a number of devices of one kind (``8xH100-80GB``) or of
    some memory (``8x24GiB``, ``24GiB``).

    Raises:
        ClusterError, TensorOptError: it is none of these.
    """
    match = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x×*]\s*)?(.+?)\s*", text)
    count, kind = (1, text) if match is None else (int(match.group(1) or 1), match.group(2))
    if count < 1:
        raise TensorOptError("0 devices train nothing; give at least 1")
    if kind in list_devices():
        return _preset_with(kind, count) or _of_kind(kind, count)
    if re.fullmatch(r"[\d.,]+\s*[KMGT]i?B?", kind, re.IGNORECASE):
        memory = read_size(kind)
        described = {
            "name": _UNNAMED, "type": "cuda", "memory": memory,
            # Of these two nothing here depends.
            "memory_bandwidth": "1TB/s", "flops": {"float32": "100TFLOPS", "bfloat16": "100TFLOPS"},
        }  # fmt: skip
        return _of_kind(described, count)
    return load_cluster(text)


def _preset_with(kind: str, count: int) -> Cluster | None:
    """Return the first preset of such devices, a part of it or several nodes of it; None if there is none."""
    for name in list_clusters():
        if name.endswith("xN"):
            continue
        cluster = load_cluster(name)
        if {one.name for one in cluster.device_kinds} != {kind}:
            continue
        nodes, rest = divmod(count, cluster.device_count)
        if nodes == 0:
            return load_cluster(f"{name}[{count}]")
        if not rest and (nodes == 1 or f"{name}xN" in list_clusters()):
            return load_cluster(name if nodes == 1 else f"{name}x{nodes}")
    return None


def _of_kind(kind: Any, count: int) -> Cluster:
    """Return devices of a kind on links that nothing here depends on, but for the size of NCCL's buffers."""
    nodes = count // _PER_NODE if count % _PER_NODE == 0 else 1
    links = {"intra_node": "PCIe4", **({"inter_node": "IB-200G"} if nodes > 1 else {})}
    entry = {"devices": [{"kind": kind, "count": count // nodes}], "nodes": nodes, "links": links}
    return load_cluster(entry)
