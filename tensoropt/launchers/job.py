"""Training jobs in a launcher's terms: degrees, ZeRO stage, micro-batches, recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tensoropt.errors import TensorOptError

NOTHING, FULL = "none", "full"
"""The names of recomputing nothing, and of recomputing whole blocks (:mod:`tensoropt.sharding.recipes`)."""
GATHERED_ONCE = (
    "parameters stay gathered from forward to backward of each micro-batch: predicted as ZeRO-2, "
    "which gathers them once per step"
)
KEPT_IN_HALF = (
    "parameters are stored in 16 bits beside the optimizer's 32: predicted as 32 bits, cast when used"
)
AS_BFLOAT16 = "fp16: predicted as bfloat16, which has the same size"
"""The notes that several launchers share."""


class JobError(TensorOptError):
    """The error if a launcher's config cannot be read, or belongs to another launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedJob:
    """A training job in its launcher's terms. Degrees that are not given are 1.

    Attributes:
        launcher: one of :data:`~tensoropt.launchers.registry.LAUNCHERS`.
        data: data-parallel degree over all nodes; None if it is devices / product of other degrees.
        replicas: number of groups of data-parallel ranks that each hold a full set of shards (HSDP).
        tensor, context, places: degrees of tensor, context and pipeline parallelism.
        ring: whether context-parallel ranks pass keys and values around.
        experts: number of ranks over which experts are split.
        stage: ZeRO stage, 0 (no sharding) to 3.
        root_once: whether stage 3 gathers parameters outside the blocks once per step, as in PyTorch's FSDP.
        sequence_parallel: whether tensor parallelism splits activations between matrix products by sequence.
        gathered_inputs: whether inputs of these products are gathered again in backward instead of saved.
        recompute: the part of a block that is recomputed (a name of :mod:`tensoropt.sharding.recipes`).
        every, first: recompute every ``every``-th block, or only the ``first`` blocks of each pipeline stage.
        stages_per_place, schedule: number of pipeline stages per pipeline rank, and their schedule.
        batch, micro_batch: samples per step, and per micro-batch of a data-parallel rank; None if not given.
        micro_batches, sequence: micro-batches per step, and tokens per sample; None if not given.
        dtype, optimizer: compute dtype, and a name of ``--optimizer``; "" if not given.
        nodes, block_classes: number of nodes, and class names of the repeated blocks, for written configs.
        notes: sentences on settings that predictions leave out or replace.
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
        """Return the job on a number of devices, with its data-parallel degree filled in.

        Raises:
            JobError: the degrees do not multiply to this number.
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
                f"the {self.launcher} job runs on {listed}, which is not {devices} devices; name a "
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
        """The number of data-parallel ranks that share one set of shards; None for all."""
        return None if self.replicas == 1 or self.data is None else self.data // self.replicas

    def batch_on(self, devices: int) -> int | None:
        """Return the samples per step on this many devices; None if not given."""
        if self.batch is not None or self.micro_batch is None:
            return self.batch
        return self.micro_batch * (self.micro_batches or 1) * (self.on(devices).data or 1)

    def micro_batches_of(self, batch: int) -> int:
        """Return the micro-batches per step of ``batch`` samples, given the config's micro-batch size.

        Raises:
            JobError: the batch is not a multiple of the micro-batch size.
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


@dataclass(frozen=True)
class Launcher:
    """A launcher of training jobs, such as torchtitan, with functions that read and write its configs.

    Attributes:
        about: an example of the text that follows its name and a colon on the command line.
        read: returns the job of a config.
        write: returns the config of a job which the launcher can express.
        refusal: returns the part of a job that the launcher cannot express; "" if it can express all.
        variants: returns jobs like the given job, on the same number of devices, the most similar first;
            ``refusal`` may refuse some of them.
        names_blocks: whether its config lists the model's block classes.
    """

    name: str
    about: str
    read: Callable[[str], LaunchedJob]
    write: Callable[[LaunchedJob], str]
    refusal: Callable[[LaunchedJob], str]
    variants: Callable[[LaunchedJob], list[LaunchedJob]]
    names_blocks: bool = False


def as_data_parallel(job: LaunchedJob, launcher: str) -> LaunchedJob:
    """Return the job as data parallelism without shards or recomputation. Its micro-batches have at least one
    sample per rank if the batch has."""
    data = (job.data or 1) * job.tensor * job.context * job.places
    steps = job.micro_batches
    if steps and job.batch:
        steps = math.gcd(steps, job.batch // data) or steps
    return LaunchedJob(
        launcher=launcher, data=data, batch=job.batch, micro_batches=steps, sequence=job.sequence,
        dtype=job.dtype, optimizer=job.optimizer,
    )  # fmt: skip


def beyond(degrees: Mapping[str, int]) -> str:
    """Return the name of the first degree above 1; "" if there is none."""
    return next((words for words, degree in degrees.items() if degree > 1), "")


def recipes_near(job: LaunchedJob, known: Sequence[str]) -> list[str]:
    """Return the job's recomputed part of blocks as a list, or all of ``known`` if that part is not in it."""
    return [job.recompute] if job.recompute in known else list(known)


class Keys:
    """The settings of a config by dotted name; it records which were read, and notes on predictions.

    Args:
        values: the config as nested mappings.
        title: the launcher's name in errors.
    """

    def __init__(self, values: Mapping[str, Any], title: str):
        self.title = title
        self.notes: list[str] = []
        self._values = _flat(values)
        self._asked: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a setting, or its default."""
        self._asked.add(name)
        return self._values.get(name, default)

    def given(self, name: str) -> bool:
        """Return whether the config gives a setting a value other than ``auto``."""
        return self._values.get(name) not in (None, "auto")

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number; ``default`` if the setting is not given, or ``auto``.

        Raises:
            JobError: the value is not a whole number.
        """
        value = self.take(name)
        if value in (None, "auto"):
            return default
        try:
            if float(value) == int(float(value)) and not isinstance(value, bool):
                return int(float(value))
        except (TypeError, ValueError):
            pass
        raise JobError(f"{self.title}: {name} is {value!r}; give a whole number")

    def degree(self, name: str) -> int:
        """Return a degree of parallelism, 1 if it is not given.

        Raises:
            JobError: the degree is below 1.
        """
        if (number := self.number(name, 1) or 0) < 1:
            raise JobError(f"{self.title}: {name} is {number}; a degree is at least 1")
        return number

    def true(self, name: str) -> bool:
        """Return whether a switch is on, in any of the spellings that configs use."""
        value = self.take(name, False)
        return value.strip().lower() in ("true", "yes", "1") if isinstance(value, str) else bool(value)

    def word(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """Return ``known[text]`` for a setting's text. An unknown text is noted, and read as ``default``."""
        value = str(self.take(name, default))
        by_name = {key.lower(): meaning for key, meaning in known.items()}
        if value.lower() in by_name:
            return by_name[value.lower()]
        self.note(f"{name} = {value} is unknown; taken as {default}")
        return by_name[default.lower()]

    def note(self, words: str) -> None:
        """Record a remark on what the prediction leaves out."""
        self.notes.append(words)

    def unlike(self, name: str, words: str, usual: Sequence[Any] = (None, False, "", 0, "none")) -> None:
        """Add the note ``words`` on a setting that predictions leave out, if its value is not a usual one."""
        value = self.take(name)
        if value not in usual and value != []:
            self.note(f"{name} = {value}: {words}")

    def left(self, harmless: Sequence[str]) -> tuple[str, ...]:
        """Return all notes. The last lists the settings that are on but were never read, except those with a
        name like one of the patterns ``harmless``, which cost neither time nor memory."""
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
