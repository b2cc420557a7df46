"""Recordings of a simulated step: rows of operators, a timeline, a memory curve.

All of it is plain data, in bytes of one rank and seconds of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "kept", "transient")
COMPUTE = "compute"


@dataclass(frozen=True)
class OperatorRow:
    """A group of operators; bytes of one rank, seconds of one step (all micro-batches).

    ``transient_bytes`` is the larger of forward's and backward's own peak. ``copies_s`` is the time of copies
    and additions that bring tensors, gradients and parameters to where the group uses them;
    ``communication_s`` that of the collectives that do so, and of its kernels' collectives. None of them
    includes recomputation. ``source`` is that of its compute seconds. ``recomputed``: its forward runs twice,
    and what it keeps is alive only while its region's backward runs.
    """

    group: str
    members: tuple[str, ...]
    module: str
    configuration: Mapping[str, str]
    options: tuple[str, ...]
    parameters_bytes: int
    gradients_bytes: int
    state_bytes: int
    kept_bytes: int
    transient_bytes: int
    forward_s: float
    backward_s: float
    communication_s: float
    source: str
    recomputed: bool = False
    copies_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """The device's time for the group's operators, without copies."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class TimelineEvent:
    """Something that takes time. ``lane``: ``compute``, or ``link`` and the mesh axes of a collective; in a
    placed plan, ``device`` and its number, or ``link`` and the links that a message occupies. In a pipeline
    ``stage`` and its number has its actions, with their waits; ``device`` and the number of a place has the
    work within them, ``link`` and that number its messages, or with axes behind it its collectives, or with
    ``gathered parameters`` or ``gradients`` what goes to and from their shards beside the actions, and
    ``link`` and the axis of stages what is sent when all are done.
    ``copies``: it brings something to where it is used, and is not an operator of the model."""

    name: str
    lane: str
    start_s: float
    duration_s: float
    phase: str
    group: str
    copies: bool = False

    @property
    def is_computing(self) -> bool:
        """Whether it is computation on a device, rather than use of a link."""
        return self.lane == COMPUTE or self.lane.startswith(("device ", "devices "))


@dataclass(frozen=True)
class MemoryAt:
    """Bytes alive from ``time_s`` on, by kind."""

    time_s: float
    parameters: float
    gradients: float
    optimizer: float
    kept: float
    transient: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class OwnerRow:
    """Bytes that are alive at one moment of a step, and their owner.

    Attributes:
        operator: the group of operators (in a pipeline, the stage) that they belong to; "" if they belong to
            none.
        tensor: the tensor, parameter or group.
        what: ``parameter``, ``activation``, ``gradient``, ``workspace``, ...
        kind: one of :data:`MEMORY_KINDS`.
        since_s, until_s: the seconds of the step at which they become alive and cease to be; None for memory
            that stays.
        since, until: what happens at these times, in words.
    """

    operator: str
    tensor: str
    what: str
    kind: str
    bytes: float
    since_s: float
    until_s: float | None
    since: str
    until: str


Owned = tuple[str, str, str, str, float, int, int, str, str]
"""(operator, tensor, what, kind, bytes, the first point of the curve with them, the first later point without
them, since, until): what an :class:`OwnerRow` says at one of these points."""


class TwoQueues(Protocol):
    """An interface to the seconds of a step on a device, and on its host."""

    @property
    def compute_s(self) -> float: ...

    @property
    def exposed_s(self) -> float | None: ...

    @property
    def idle_s(self) -> float: ...

    @property
    def host_s(self) -> float: ...


def is_host_bound(step: TwoQueues) -> bool:
    """Return whether issuing a step takes the host longer than the device takes to execute it."""
    # A place of a pipeline is also idle while it waits for others.
    return bool(step.host_s and step.idle_s) and step.host_s > _busy_s(step)


def _busy_s(step: TwoQueues) -> float:
    return step.compute_s + (step.exposed_s or 0.0)


def host_wait_s(step: TwoQueues) -> float:
    """Return the seconds in which the device waits for the host that issues its work; 0 unless it is
    host-bound."""
    return min(step.idle_s, step.host_s - _busy_s(step)) if is_host_bound(step) else 0.0
