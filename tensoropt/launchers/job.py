"""What a launcher is told of a job: degrees, ZeRO's stage, micro-batches, recomputation; and what of it is
not understood."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tensoropt.errors import TensorOptError

NOTHING, FULL = "none", "full"
"""The recipes (:mod:`tensoropt.sharding.recipes`) by which nothing and all of a block is recomputed."""
GATHERED_ONCE = (
    "parameters stay gathered from forward to backward, in every micro-batch anew: predicted as ZeRO-2, "
    "which gathers them once per step"
)
KEPT_IN_HALF = (
    "parameters are kept in 16 bits beside the optimizer's 32: predicted as 32 bits, cast where they are used"
)
AS_BFLOAT16 = "fp16: predicted as bfloat16, whose numbers are as large"
"""Notes that several launchers have in common."""


class JobError(TensorOptError):
    """A launcher's config cannot be read, or is no config of that launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """A job as its launcher is told of it. Degrees that are not mentioned are 1.

    Attributes:
        launcher: one of :data:`~tensoropt.launchers.registry.LAUNCHERS`.
        data: data-parallel degree, over all nodes; None for what the other degrees leave of the devices.
        replicas: how many groups of data-parallel ranks each have all shards of ZeRO's stage.
        tensor, context, places: degrees of tensor, context and pipeline parallelism. ring: keys and values go
            around the context-parallel ranks. experts: ranks over which experts are split.
        stage: ZeRO's stage: 0 (nothing is sharded) to 3. root_once: stage 3 gathers parameters outside the
            blocks once per step, as PyTorch's FSDP.
        sequence_parallel: activations between tensor-parallel products are split along the sequence.
            gathered_inputs: their inputs are gathered again in backward instead of kept.
        recompute: the recipe by which blocks are recomputed, of every ``every``-th block, or of the ``first``
            so many of each pipeline stage.
        stages_per_place, schedule: the pipeline's stages on the same devices, and its schedule.
        batch: samples of a step, over all ranks. micro_batch: of a data-parallel rank at once.
            micro_batches: how many of these a step has. None each for what the config does not say.
        sequence: tokens of a sample. dtype: what products compute in; "" if the config does not say.
            optimizer: a name of ``--optimizer``; "" if the config does not say.
        nodes: of the devices. block_classes: of the repeated blocks, by name. What a config that is written
            says beside the degrees.
        notes: what of the config is not part of the prediction, in words.
    """

    launcher: str
    data: int | None = 1
    replicas: int = 1
    tensor: int = 1
    context: int = 1
    ring: bool = False
    experts: int = 1
    stage: int = 0
    root_once: bool = False
    sequence_parallel: bool = False
    gathered_inputs: bool = False
    recompute: str = NOTHING
    every: int = 1
    first: int | None = None
    places: int = 1
    stages_per_place: int = 1
    schedule: str = "1f1b"
    batch: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    sequence: int | None = None
    dtype: str = ""
    optimizer: str = ""
    nodes: int = 1
    block_classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def on(self, devices: int) -> LaunchedJob:
        """Return the job on a number of devices, with the data-parallel degree that this leaves.

        Raises:
            JobError: the degrees do not make so many devices.
        """
        inside = self.tensor * self.context * self.places
        data = self.data or devices // inside
        if data * inside != devices:
            degrees = {
                "data": data if self.data else "any",
                "tensor": self.tensor,
                "context": self.context,
                "pipeline": self.places,
            }
            listed = " x ".join(f"{name} {n}" for name, n in degrees.items() if n != 1) or "data 1"
            raise JobError(
                f"the {self.launcher} job runs on {listed}, which does not make {devices} devices; name a "
                f"cluster of {'' if self.data else 'a multiple of '}{inside * (self.data or 1)} devices"
            )
        if data % self.replicas:
            raise JobError(
                f"{self.replicas} replicas do not divide {data} data-parallel ranks of {devices} devices; "
                "name a cluster with as many devices as the job has"
            )
        return replace(self, data=data)

    @property
    def shard_group(self) -> int | None:
        """The data-parallel ranks that share shards; None for all of them."""
        return None if self.replicas == 1 or self.data is None else self.data // self.replicas

    def batch_on(self, devices: int) -> int | None:
        """Return the samples of a step on so many devices; None if the config does not say."""
        if self.batch is not None or self.micro_batch is None:
            return self.batch
        return self.micro_batch * (self.micro_batches or 1) * (self.on(devices).data or 1)

    def micro_batches_of(self, batch: int) -> int:
        """Return the micro-batches of a step with ``batch`` samples, of the size that the config says.

        Raises:
            JobError: the batch has no whole number of them.
        """
        if self.micro_batch is None:
            return self.micro_batches or 1
        size = self.micro_batch * (self.data or 1)
        if batch % size:
            raise JobError(
                f"the {self.launcher} job reads {size} samples at once ({self.micro_batch} on each of "
                f"{self.data or 1} data-parallel ranks), which do not divide a batch of {batch}; give "
                "a --batch that is a multiple"
            )
        return batch // size


def as_data_parallel(job: LaunchedJob, launcher: str) -> LaunchedJob:
    """Return a job on as many devices that are all data-parallel ranks, with micro-batches in which each has
    samples; without shards and recomputation."""
    data = (job.data or 1) * job.tensor * job.context * job.places
    steps = job.micro_batches
    if steps and job.batch:
        steps = math.gcd(steps, job.batch // data) or steps
    return LaunchedJob(
        launcher=launcher, data=data, batch=job.batch, micro_batches=steps, sequence=job.sequence,
        dtype=job.dtype, optimizer=job.optimizer,
    )  # fmt: skip


def beyond(degrees: Mapping[str, int]) -> str:
    """Return the words of the first degree above 1; "" if there is none."""
    return next((words for words, degree in degrees.items() if degree > 1), "")


def recipes_near(job: LaunchedJob, known: Sequence[str]) -> list[str]:
    """Return the recipe of a job if a launcher knows it, otherwise all that it knows."""
    return [job.recompute] if job.recompute in known else list(known)


class Keys:
    """The settings of a config by dotted name, which remembers those that were asked for.

    Args:
        values: nested tables.
        title: the launcher's name in errors.
    """

    def __init__(self, values: Mapping[str, Any], title: str):
        self.title = title
        self.notes: list[str] = []
        self._values = _flat(values)
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting, or what it is when it is not given."""
        self._asked.add(name)
        return self._values.get(name, default)

    def given(self, name: str) -> bool:
        """Return whether a setting is in the config, and says something."""
        return self._values.get(name) not in (None, "auto")

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number; ``default`` if it is not given, or left to the launcher (``auto``).

        Raises:
            JobError: it is no whole number.
        """
        value = self.take(name)
        if value in (None, "auto"):
            return default
        try:
            if float(value) == int(float(value)) and not isinstance(value, bool):
                return int(float(value))
        except (TypeError, ValueError):
            pass
        raise JobError(f"{self.title}: {name} is {value!r}, which is no whole number; write it as one")

    def degree(self, name: str) -> int:
        """Return a degree of parallelism, 1 if it is not given.

        Raises:
            JobError: it is below 1.
        """
        if (number := self.number(name, 1) or 0) < 1:
            raise JobError(f"{self.title}: {name} is {number}; a degree is at least 1")
        return number

    def true(self, name: str, default: bool = False) -> bool:
        """Return a switch, which files write in several ways."""
        value = self.take(name, default)
        return value.strip().lower() in ("true", "yes", "1") if isinstance(value, str) else bool(value)

    def word(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """Return what a word stands for; of an unknown one, with a note, what the default stands for."""
        value = str(self.take(name, default))
        by_name = {key.lower(): meaning for key, meaning in known.items()}
        if value.lower() in by_name:
            return by_name[value.lower()]
        self.note(f"{name} = {value} is not known; taken as {default}")
        return by_name[default.lower()]

    def note(self, words: str) -> None:
        """Remember something that is not part of the prediction."""
        self.notes.append(words)

    def unlike(self, name: str, words: str, usual: Sequence[Any] = (None, False, "", 0, "none")) -> None:
        """Note that a setting is not part of the prediction, if it has another value than usual."""
        value = self.take(name)
        if value not in usual and value != []:
            self.note(f"{name} = {value}: {words}")

    def left(self, harmless: Sequence[str]) -> tuple[str, ...]:
        """Return all notes, at last one on the settings that nobody asked for, except what is switched off,
        and what costs neither time nor memory (patterns of names)."""
        unknown = [
            f"{name} = {value}"
            for name, value in self._values.items()
            if name not in self._asked
            and value not in (None, False, "", [])
            and not any(fnmatchcase(name, pattern) for pattern in harmless)
        ]
        listed = [f"not understood, so not part of the prediction: {', '.join(unknown)}"] if unknown else []
        return (*self.notes, *listed)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{before}{name}"
        found |= _flat(value, f"{dotted}.") if isinstance(value, Mapping) else {dotted: value}
    return found
