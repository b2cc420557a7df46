"""Records of a simulated step as plain data: rows of operators, timeline, memory curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "kept", "transient")
COMPUTE = "compute"


@dataclass(frozen=True)
class OperatorRow:
    """The figures of an operator group: bytes of one rank, seconds of one step, without recomputation.

    ``transient_bytes`` is the larger peak of forward and backward. ``copies_s`` and ``communication_s`` are
    those of resharding inputs, gradients and parameters, and of kernels' collectives. ``source`` says where
    compute seconds are from. If ``recomputed``, it runs twice and its saved tensors live in its block's
    backward.
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
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class TimelineEvent:
    """An event of a timeline. ``copies``: whether it moves data and is no operator of the model.

    ``lane`` is the line on which it is drawn. Sharded plans have ``compute``, and ``link`` with the mesh axes
    of collectives. Placed plans have ``device`` with its number, and ``link`` with the two devices of a
    message. Pipelines have ``stage`` with its number for forward, backward and optimizer, ``device`` with the
    number of a device group for operators, and ``link`` with this number for messages. After this number
    follow mesh axes for collectives, and ``gathered parameters`` or ``gradients`` for asynchronous ones.
    ``link`` with the stage axis is for messages after the step.
    """

    name: str
    lane: str
    start_s: float
    duration_s: float
    phase: str
    group: str
    copies: bool = False

    @property
    def is_computing(self) -> bool:
        """Whether the event is computation, not communication."""
        return self.lane == COMPUTE or self.lane.startswith(("device ", "devices "))


@dataclass(frozen=True)
class MemoryAt:
    """A rank's memory in use from ``time_s`` on, in bytes by kind."""

    time_s: float
    parameters: float
    gradients: float
    optimizer: float
    kept: float
    transient: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class OwnerRow:
    """Memory in use at one moment of a step, and the tensor that occupies it.

    Attributes:
        operator: its operator group, or stage of a pipeline; "" for none.
        tensor: the tensor, parameter or group.
        what: ``parameter``, ``activation``, ``gradient``, ``workspace``,...
        kind: one of :data:`MEMORY_KINDS`.
        since_s, until_s: the times when it is allocated and freed; None for permanent memory.
        since, until: these moments in words.
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
"""An :class:`OwnerRow` as (operator, tensor, what, kind, bytes, first point, end point, since, until)."""


class TwoQueues(Protocol):
    """The interface to a step's durations on the device and on its host, in seconds."""

    @property
    def compute_s(self) -> float: ...

    @property
    def exposed_s(self) -> float | None: ...

    @property
    def idle_s(self) -> float: ...

    @property
    def host_s(self) -> float: ...


def is_host_bound(step: TwoQueues) -> bool:
    """Return whether a step is launch-bound: its host takes longer to launch it than the device to run it."""
    # A device group of a pipeline is also idle while it waits for others.
    return bool(step.host_s and step.idle_s) and step.host_s > _busy_s(step)


def _busy_s(step: TwoQueues) -> float:
    return step.compute_s + (step.exposed_s or 0.0)


def host_wait_s(step: TwoQueues) -> float:
    """Return the seconds in which the device waits for launches; 0 unless launch-bound."""
    return min(step.idle_s, step.host_s - _busy_s(step)) if is_host_bound(step) else 0.0
