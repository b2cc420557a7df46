"""The recording of one strategy's simulated step: its events in time, and the memory that is alive.

The simulator reports everything that happens to a recorder, in the order of the step's moments. Timeline,
memory curve and peak are derived from it; nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        pairs = {sent: product for sent, product in self.together.items() if sent >= starts[0]}
        for number in range(1, count):
            later = number * loop_s
            self.waits += [wait + number * len(events) for wait in waits]
            before = number * len(events)
            self.together |= {sent + before: product + before for sent, product in pairs.items()}
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
        """Return (time, bytes by kind) after every change, beginning with what is alive before the step.

        Args:
            lasting: bytes by kind that are alive during the whole step.
        """
        start = (0.0, {**lasting, "kept": 0.0, "transient": 0.0})
        return (
            start,
            *((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in self.curve),
        )


def _counted(state: tuple[int, int, int], on: int) -> tuple[int, int, int]:
    """Return the moments of a point of the curve, in a later micro-batch."""
    kept, transient, workspace = (moment + on if moment >= 0 else moment for moment in state)
    return kept, transient, workspace
