"""What is recorded of one strategy's simulated step: its events in time, and the memory that is alive.

The simulator tells a recorder all that happens, in the order of the step's moments. Timeline, memory curve
and peak are read off it; nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.simulate.step_schedule import Moment

REDUCTION = "reduction of gradients"
AHEAD = {"all_gather": "gathering parameters ahead", "reduce_scatter": "scattering gradients"}
"""Names of collectives that run beside the computation of a block."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something that takes time: work on the device, or a collective over mesh ``axes``; ``kind`` of its
    moment."""

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
class MomentMemory:
    """Bytes alive at a moment, beside what lasts through the step: kept for backward, and transient with the
    moment's own workspace."""

    moment: Moment
    kept: float
    transient: float
    workspace: float

    @property
    def total(self) -> float:
        """Bytes of both kinds."""
        return self.kept + self.transient


class StepRecorder:
    """Is told what happens in one strategy's step.

    Attributes:
        events: in the order in which they were issued.
        curve: (time, kept, transient) after every change of memory, in time.
        states: per point of the curve the numbers of the moments whose kept, transient and workspace bytes
            it has, counted through all micro-batches; -1 where there are none.
        end_s: when the step is over.
        moments: memory at every moment of the last micro-batch and of the step's end.
        waits: numbers of events before which all that was sent ahead is waited for.
        together: numbers of collectives that run beside work which begins with them, and the number of that.
    """

    def __init__(self) -> None:
        self.events: list[StepEvent] = []
        self.curve: list[tuple[float, float, float]] = []
        self.states: list[tuple[int, int, int]] = []
        self.end_s = 0.0
        self.moments: list[MomentMemory] = []
        self.waits: list[int] = []
        self.together: dict[int, int] = {}
        self._product = 0
        # When each moment begins, and what the host takes to issue it.
        self._begun: list[tuple[float, float]] = []
        # When the micro-batch began, and how many events, ... there were.
        self._micro_batch: tuple[float, int, int, int, int] = (0.0, 0, 0, 0, 0)
        self._moment = Moment("forward", "compute", "")
        self._kept, self._transient, self._workspace = 0.0, 0.0, 0.0
        # The moments whose kept, transient and workspace bytes these are.
        self._of = (-1, -1, -1)
        # The time of frees that are not in the curve yet: all frees of one time are one point of it, which is
        # written when the time moves on or something is taken.
        self._freed_s: float | None = None

    def begin(self, moment: Moment, now_s: float, host_s: float = 0.0) -> None:
        """A moment begins on the device; what the last one needed for itself is given back.

        Args:
            host_s: seconds in which the host issues it.
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
        """Bytes (kept, transient) that begin or end at the moment, what it needs for itself, and what is
        alive then."""
        kept, transient = (float(x) for x in changed)
        if kept < 0 or transient < 0:
            self._freeing(now_s)
            self._kept, self._transient = self._kept + min(kept, 0.0), self._transient + min(transient, 0.0)
        now = len(self._begun) - 1
        # Where nothing is added the bytes are those of now, also if others have taken their place.
        self._of = (now if kept <= 0 else self._of[0], now if transient <= 0 else self._of[1], self._of[2])
        if kept > 0 or transient > 0 or workspace:
            self._mark_freed()
            self._kept, self._transient, self._workspace = float(alive[0]), float(alive[1]), workspace
            self._of = (now, now, now)
            self._mark(now_s)
        # Also of moments without a change: the memory curve has a point for every computation.
        self.moments.append(
            MomentMemory(self._moment, float(alive[0]), float(alive[1]) + workspace, workspace)
        )

    def _freeing(self, now_s: float) -> None:
        """Something is about to end: what ends at one time is one change, however many moments it comes
        from."""
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
        """When each moment begins, through all micro-batches and to the step's end."""
        return [begun_s for begun_s, _ in self._begun]

    def work(self, start_s: float, end_s: float) -> None:
        """The device works on what the moment is about."""
        if end_s > start_s:
            self._add(
                self._moment.words, self._moment.phase, self._moment.group, None, start_s, end_s - start_s
            )

    def begin_product(self) -> None:
        """The work that is told next begins with a collective."""
        self._product = len(self.events)

    def send(self, axes: tuple[int, ...], start_s: float, duration_s: float, *, beside: bool = False) -> None:
        """The device waits for a collective.

        Args:
            beside: it began with the last product.
        """
        if duration_s:
            if beside:
                self.together[len(self.events)] = self._product
            self._add(self._moment.words, self._moment.phase, self._moment.group, axes, start_s, duration_s)

    def reduction(self, axes: tuple[int, ...], start_s: float, duration_s: float) -> None:
        """A bucket of gradients is reduced, whether or not the device waits for it."""
        self._add(REDUCTION, "backward", "", axes, start_s, duration_s)

    def ahead(self, kind: str, axes: tuple[int, ...], start_s: float, duration_s: float) -> None:
        """Parameters are gathered, or gradients scattered, until the next block begins."""
        self._add(AHEAD[kind], self._moment.phase, self._moment.group, axes, start_s, duration_s)

    def wait_for_ahead(self) -> None:
        """What was sent ahead has arrived before anything else begins."""
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
        self.events.append(StepEvent(name, phase, group, axes, start_s, duration_s, self._moment.kind))

    def begin_micro_batch(self, now_s: float) -> None:
        """A micro-batch begins, which may come several times."""
        self._micro_batch = now_s, len(self.events), len(self.curve), len(self._begun), len(self.waits)
        self.moments.clear()

    def repeat(self, count: int, loop_s: float) -> None:
        """The micro-batch that was recorded comes ``count`` times, every ``loop_s`` seconds; then comes the
        next one, whose moments are recorded in its place."""
        began_s, *starts = self._micro_batch
        # What is left of it ends before its copies begin.
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
        """All that was begun is over."""
        self.end_s = now_s
        self._over(self._moment, now_s)
        self._mark_freed()

    def wait_for_host(self, device_s: float) -> None:
        """Let the device wait wherever the host has not issued what comes next, once all was recorded.

        Step follows step: what the host has issued ahead as a step begins on the device is as little as makes
        no step longer than the slower of the two.

        Args:
            device_s: what the step takes the device alone.
        """
        begun, takes = np.array(self._begun).T
        issued = np.cumsum(takes) - takes  # when the host comes to a moment
        host_s = float(takes.sum())
        if not host_s:
            return
        # From every moment on the device has to do what is left of the step, but not before it is issued.
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
            lasting: bytes by kind that are there all through the step.
        """
        start = (0.0, {**lasting, "kept": 0.0, "transient": 0.0})
        return (
            start,
            *((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in self.curve),
        )


def _counted(state: tuple[int, int, int], on: int) -> tuple[int, int, int]:
    """The moments of a point of the curve in a later micro-batch."""
    kept, transient, workspace = (moment + on if moment >= 0 else moment for moment in state)
    return kept, transient, workspace
