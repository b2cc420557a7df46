"""Recordings of a simulated step: rows of operators and reshardings, a timeline, a memory curve.

All of it is plain data, in bytes of one rank and seconds of one step.

The recording of one strategy's simulated step: its events in time, and the memory that is alive.

The simulator reports everything that happens to a recorder, in the order of the step's moments. Timeline,
memory curve and peak are derived from it; nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np

from tensoropt.simulate.step_schedule import Moment

REDUCTION = "reduction of gradients"
AHEAD = {"all_gather": "gathering parameters ahead", "reduce_scatter": "scattering gradients"}
"""The names of collectives that overlap with the computation of a block."""


@dataclass(frozen=True, slots=True)
class _StepEvent:
    """Something that takes time: work on the device, or a collective over mesh ``axes``; ``kind`` is that of
    its moment."""

    name: str
    phase: str
    group: str
    axes: tuple[int, ...] | None
    start_s: float
    duration_s: float
    kind: str

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step to the end of the event."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, slots=True)
class _MomentMemory:
    """Bytes alive at a moment, besides those that last through the step: kept for backward, and transient,
    including the moment's own workspace."""

    moment: Moment
    kept: float
    transient: float
    workspace: float

    @property
    def total(self) -> float:
        """Bytes of both kinds."""
        return self.kept + self.transient


class StepRecorder:
    """A recorder of everything that happens in one strategy's step.

    Attributes:
        events: in the order in which they were issued.
        curve: (time, kept, transient) after every change of memory, in time order.
        states: for each point of the curve, the numbers of the moments whose kept, transient and workspace
            bytes it contains, counted through all micro-batches; -1 if there are none.
        end_s: the time at which the step is over.
        moments: the memory at every moment of the last micro-batch and of the step's end.
        waits: numbers of events before which everything that was sent ahead is waited for.
        together: numbers of collectives that overlap with work which begins with them, mapped to the number
            of that work.
    """

    def __init__(self) -> None:
        self.events: list[_StepEvent] = []
        self.curve: list[tuple[float, float, float]] = []
        self.states: list[tuple[int, int, int]] = []
        self.end_s = 0.0
        self.moments: list[_MomentMemory] = []
        self.waits: list[int] = []
        self.together: dict[int, int] = {}
        self._product = 0
        # The time at which each moment begins, and the host's time to issue it.
        self._begun: list[tuple[float, float]] = []
        # The time at which the micro-batch began, and the number of events, ... at that time.
        self._micro_batch: tuple[float, int, int, int, int] = (0.0, 0, 0, 0, 0)
        self._moment = Moment("forward", "compute", "")
        self._kept, self._transient, self._workspace = 0.0, 0.0, 0.0
        # The moments whose kept, transient and workspace bytes these are.
        self._of = (-1, -1, -1)
        # The time of frees that are not in the curve yet: all frees at one time form one point of it, which
        # is written when the time moves on or something is allocated.
        self._freed_s: float | None = None

    def begin(self, moment: Moment, now_s: float, host_s: float = 0.0) -> None:
        """Record that a moment begins on the device; the workspace of the previous one is freed.

        Args:
            host_s: the seconds in which the host issues it.
        """
        self._begun.append((now_s, host_s))
        self._over(moment, now_s)

    def _over(self, moment: Moment, now_s: float) -> None:
        self._moment = moment
        if self._workspace:
            self._freeing(now_s)
            self._workspace = 0.0
            self._of = (*self._of[:2], -1)

    def memory(
        self, now_s: float, changed: Sequence[float], workspace: float, alive: Sequence[float]
    ) -> None:
        """Record the bytes (kept, transient) that begin or end at the moment, its workspace, and the bytes
        that are then alive."""
        kept, transient = (float(x) for x in changed)
        if kept < 0 or transient < 0:
            self._freeing(now_s)
            self._kept, self._transient = self._kept + min(kept, 0.0), self._transient + min(transient, 0.0)
        now = len(self._begun) - 1
        # If nothing is added, the bytes are the current ones, even if others have replaced them.
        self._of = (now if kept <= 0 else self._of[0], now if transient <= 0 else self._of[1], self._of[2])
        if kept > 0 or transient > 0 or workspace:
            self._mark_freed()
            self._kept, self._transient, self._workspace = float(alive[0]), float(alive[1]), workspace
            self._of = (now, now, now)
            self._mark(now_s)
        # Also for moments without a change: the memory curve has a point for every computation.
        self.moments.append(
            _MomentMemory(self._moment, float(alive[0]), float(alive[1]) + workspace, workspace)
        )

    def _freeing(self, now_s: float) -> None:
        """Prepare for something to end: everything that ends at one time is one change, however many moments
        it comes from."""
        if self._freed_s is not None and self._freed_s != now_s:
            self._mark_freed()
        self._freed_s = now_s

    def _mark_freed(self) -> None:
        if self._freed_s is not None:
            self._mark(self._freed_s)
            self._freed_s = None

    def _mark(self, now_s: float) -> None:
        self.curve.append((now_s, self._kept, self._transient + self._workspace))
        self.states.append(self._of)

    @property
    def moment_times(self) -> list[float]:
        """The time at which each moment begins, through all micro-batches and to the step's end."""
        return [begun_s for begun_s, _ in self._begun]

    def work(self, start_s: float, end_s: float) -> None:
        """Record the device's work for the moment."""
        if end_s > start_s:
            self._add(
                self._moment.words, self._moment.phase, self._moment.group, None, start_s, end_s - start_s
            )

    def begin_product(self) -> None:
        """Record that the work reported next begins together with a collective."""
        self._product = len(self.events)

    def send(self, axes: tuple[int, ...], start_s: float, duration_s: float, *, beside: bool = False) -> None:
        """Record that the device waits for a collective.

        Args:
            beside: it began together with the last product.
        """
        if duration_s:
            if beside:
                self.together[len(self.events)] = self._product
            self._add(self._moment.words, self._moment.phase, self._moment.group, axes, start_s, duration_s)

    def reduction(self, axes: tuple[int, ...], start_s: float, duration_s: float) -> None:
        """Record that a bucket of gradients is reduced, whether or not the device waits for it."""
        self._add(REDUCTION, "backward", "", axes, start_s, duration_s)

    def ahead(self, kind: str, axes: tuple[int, ...], start_s: float, duration_s: float) -> None:
        """Record that parameters are gathered, or gradients scattered, until the next block begins."""
        self._add(AHEAD[kind], self._moment.phase, self._moment.group, axes, start_s, duration_s)

    def wait_for_ahead(self) -> None:
        """Record that everything sent ahead has arrived before anything else begins."""
        self.waits.append(len(self.events))

    def _add(
        self,
        name: str,
        phase: str,
        group: str,
        axes: tuple[int, ...] | None,
        start_s: float,
        duration_s: float,
    ) -> None:
        self.events.append(_StepEvent(name, phase, group, axes, start_s, duration_s, self._moment.kind))

    def begin_micro_batch(self, now_s: float) -> None:
        """Record that a micro-batch begins, which may occur several times."""
        self._micro_batch = now_s, len(self.events), len(self.curve), len(self._begun), len(self.waits)
        self.moments.clear()

    def repeat(self, count: int, loop_s: float) -> None:
        """Record that the micro-batch occurs ``count`` times, every ``loop_s`` seconds; then comes the next
        one, whose moments are recorded in its place."""
        began_s, *starts = self._micro_batch
        # Its remaining frees come before its copies begin.
        self.finish(began_s + loop_s)
        self.moments.clear()
        events, curve = self.events[starts[0] :], self.curve[starts[1] :]
        begun, waits = self._begun[starts[2] :], self.waits[starts[3] :]
        states = self.states[starts[1] :]
        together = {one: product for one, product in self.together.items() if one >= starts[0]}
        for number in range(1, count):
            later = number * loop_s
            self.waits += [wait + number * len(events) for wait in waits]
            before = number * len(events)
            self.together |= {one + before: product + before for one, product in together.items()}
            self.events += [replace(event, start_s=event.start_s + later) for event in events]
            self.curve += [(time_s + later, kept, transient) for time_s, kept, transient in curve]
            self._begun += [(begun_s + later, host_s) for begun_s, host_s in begun]
            moments = number * len(begun)
            self.states += [_counted(state, moments) for state in states]

    def finish(self, now_s: float) -> None:
        """Record that everything that was begun is over."""
        self.end_s = now_s
        self._over(self._moment, now_s)
        self._mark_freed()

    def wait_for_host(self, device_s: float) -> None:
        """Once all is recorded, make the device wait wherever the host has not yet issued what comes next.

        Step follows step: the host's lead at the beginning of a step on the device is the smallest one with
        which no step is longer than the slower of the two.

        Args:
            device_s: the time that the step takes on the device alone.
        """
        begun, takes = np.array(self._begun).T
        issued = np.cumsum(takes) - takes  # the time at which the host reaches a moment
        host_s = float(takes.sum())
        if not host_s:
            return
        # From every moment on, the device has to do the rest of the step, but not before it is issued.
        longest = max(device_s, host_s, float(np.max(issued + device_s - begun)))
        lead_s = longest - max(device_s, host_s)
        delays = np.maximum.accumulate(np.maximum(issued - lead_s - begun, 0.0))

        def later(time_s: float) -> float:
            return float(delays[max(int(np.searchsorted(begun, time_s, side="right")) - 1, 0)])

        self.events = [replace(event, start_s=event.start_s + later(event.start_s)) for event in self.events]
        self.curve = [(time_s + later(time_s), kept, transient) for time_s, kept, transient in self.curve]
        self._begun = [(time_s + later(time_s), host_s) for time_s, host_s in self._begun]
        self.end_s += later(self.end_s)

    def memory_at(self, lasting: Mapping[str, float]) -> tuple[tuple[float, dict[str, float]], ...]:
        """(time, bytes by kind) after every change, beginning with what is alive before the step.

        Args:
            lasting: bytes by kind that are alive during the whole step.
        """
        start = (0.0, {**lasting, "kept": 0.0, "transient": 0.0})
        return (
            start,
            *((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in self.curve),
        )


def _counted(state: tuple[int, int, int], on: int) -> tuple[int, int, int]:
    """The moments of a point of the curve, in a later micro-batch."""
    kept, transient, workspace = (moment + on if moment >= 0 else moment for moment in state)
    return kept, transient, workspace


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "kept", "transient")
ALLOCATOR = ("requested", "allocated", "reserved", "reserved_expandable")
"""The figures of a replay of PyTorch's allocator: the peaks of what was requested, what blocks occupied, and
what was taken from the device, without and with expandable segments; in bytes."""
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
        """The device's time for the group: operators and copies."""
        return self.forward_s + self.backward_s + self.copies_s


@dataclass(frozen=True)
class EdgeRow:
    """A resharding; ``bytes`` of one rank and ``seconds`` per step, forward and backward, including
    copies."""

    tensor: str
    kind: str
    producer: str
    consumer: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    collectives: tuple[str, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class TimelineEvent:
    """Something that takes time. ``lane``: ``compute``, or ``link`` and the mesh axes of a collective; in a
    placed plan, ``device`` and its number, or ``link`` and the links that a message occupies. ``copies``: it
    brings something to where it is used, and is not an operator of the model."""

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
        return self.lane == COMPUTE or self.lane.startswith("device ")


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
them, since, until): an :class:`OwnerRow` in the form that a placed or pipelined point stores."""


@dataclass(frozen=True)
class Recording:
    """The recorded step of a placed or pipelined point, as plain rows, which are read when looked at.

    Attributes:
        rows: the fields of each :class:`OperatorRow`, by name.
        events: the fields of each :class:`TimelineEvent`, up to ``group``.
        curve: the fields of each :class:`MemoryAt`.
        owners: the owners of the bytes of this curve (:data:`Owned`); None if an older version saved it.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Sequence[Any]] = ()
    curve: Sequence[Sequence[float]] = ()
    owners: Sequence[Sequence[Any]] | None = None

    @classmethod
    def of(
        cls,
        rows: Iterable[OperatorRow],
        events: Iterable[Sequence[Any]],
        curve: Iterable[Sequence[float]],
        owners: Iterable[Owned],
    ) -> Recording:
        """The recording of these rows."""
        plain = [{**asdict(row), "members": list(row.members), "options": list(row.options)} for row in rows]
        return cls(plain, *(list(map(list, each)) for each in (events, curve, owners)))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Recording:
        """The recording that :meth:`to_data` wrote, maybe among other things."""
        return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})

    def to_data(self) -> dict[str, Any]:
        """The recording as plain data; nothing of an empty one."""
        return {name: rows for name, rows in vars(self).items() if rows is not None} if self.rows else {}

    def operator_rows(self) -> list[OperatorRow]:
        """The rows of operators, or of stages."""
        return [
            OperatorRow(**{**row, "members": tuple(row["members"]), "options": tuple(row["options"])})
            for row in self.rows
        ]

    def timeline(self) -> tuple[TimelineEvent, ...]:
        """The events of the step."""
        return tuple(TimelineEvent(*event) for event in self.events)

    def memory_curve(self) -> tuple[MemoryAt, ...]:
        """The memory of the fullest device or rank."""
        return tuple(MemoryAt(*at) for at in self.curve)


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
    """Whether issuing a step takes the host longer than the device takes to execute it."""
    # A place of a pipeline is also idle while it waits for others.
    return bool(step.host_s and step.idle_s) and step.host_s > _busy_s(step)


def _busy_s(step: TwoQueues) -> float:
    """The seconds in which the device computes or waits for communication, as far as a plan file has them."""
    return step.compute_s + (step.exposed_s or 0.0)


def host_wait_s(step: TwoQueues) -> float:
    """The seconds in which the device waits for the host that issues its work; 0 unless it is host-bound."""
    return min(step.idle_s, step.host_s - _busy_s(step)) if is_host_bound(step) else 0.0
