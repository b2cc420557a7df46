"""One strategy's step with the time of each computation and collective, and its memory over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from tensoropt.simulate.batch import Batch
from tensoropt.simulate.clock import BEGINS, BLOCKS, REDUCES, Issue, clock, program
from tensoropt.simulate.readings import Axes
from tensoropt.simulate.simulator import StepColumns
from tensoropt.types import Floats

REDUCTION = "reduction of gradients"
AHEAD = {"all_gather": "gathering parameters ahead", "reduce_scatter": "scattering gradients"}
"""The names of collectives that overlap with a block's computation."""

_ROUNDING = 1e-12
"""The share of the time so far below which a duration counts as rounding; an assumption."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Computation on the device, or a collective over mesh ``axes``; ``kind``: its :class:`Moment`'s kind."""

    name: str
    phase: str
    group: str
    axes: Axes | None
    start_s: float
    duration_s: float
    kind: str

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class TimedStep:
    """One strategy's step with the time of each computation and collective, and its memory over time.

    Args:
        batch: a batch of one strategy.
        micro_batches: the number of micro-batches; by default the strategy's.
        launched: whether the device waits for the host's launches.

    Attributes:
        events: computation and collectives, in the order of issue.
        curve: (time, saved bytes, transient bytes) at each moment when the bytes change, and at the end.
        states: for each point of the curve, the index of its moment in ``moment_times``.
        moment_times: the start of each moment, of all micro-batches and then of the step's end.
        end_s: the end of the last event.
        waits: the indices of events before which all asynchronous collectives complete.
        together: index of a collective's event -> index of the computation that starts with it.
        clocked: the timing on the device alone, by micro-batch.
        turns: (index of the next event, device time in seconds) at the start of each forward and backward,
            after the last backward, and at the end of the step.
        device_s, host_s: seconds of the device alone, and of the host alone.
    """

    def __init__(self, batch: Batch, *, micro_batches: int | None = None, launched: bool = True):
        assert batch.count == 1, "one strategy is timed"
        self.batch, self.micro_batches = batch, micro_batches or batch.mesh[0]
        columns, schedule = StepColumns(batch), batch.schedule
        self.moments, self.last = schedule.moments, schedule.last
        self._overlap, self._issues = batch.overlap, columns.issues
        self._work_s: list[float] = columns.work[:-1, 0].tolist()
        turns = program(schedule, self._issues, self._overlap)
        runs = [1] * self.micro_batches
        self.clocked = clock(schedule, columns.work[:-1], self._issues, self._overlap, runs, turns)
        kept, transient = (np.cumsum(changes[:, 0]) for changes in (columns.kept, columns.transient))
        self._alive = np.stack([kept, transient + columns.workspace[:, 0]], axis=1).tolist()
        self.events: list[StepEvent] = []
        self.moment_times: list[float] = []
        self.waits: list[int] = []
        self.together: dict[int, int] = {}
        self.turns: list[tuple[int, float]] = []
        self.curve, self.states = list[tuple[float, float, float]](), list[int]()
        self._now_s = 0.0
        self._entries, tail = turns
        of_run, of_tail = (defaultdict[int, list[int]](list) for _ in range(2))
        for number, turn in enumerate(self._entries):
            (of_run if number < tail else of_tail)[turn.position].append(number)
        for run in range(self.micro_batches):
            self._turn()
            self._pass(range(schedule.forward_end), of_run, run)
            self._turn()
            self._pass(range(schedule.forward_end, self.last), of_run, run)
        self._turn()
        for number in of_tail[self.last - 1]:
            self._take(number, self.micro_batches, {})
        self._pass(range(self.last, len(self.moments)), of_tail, self.micro_batches)
        self.end_s = self.device_s = float(self.clocked.device_s[0])
        self._remember(0.0, 0.0)
        self._turn()
        takes = columns.host[:-1, 0]
        takes = np.concatenate([*[takes[: self.last]] * self.micro_batches, takes[self.last :]])
        self.host_s = float(takes.sum())
        if launched and self.host_s:
            self._wait_for_host(takes)
            # The host also launches buckets, which belong to no moment.
            self.host_s += float(columns.issuing_buckets[0])

    @property
    def time_s(self) -> float:
        """The duration of the step in seconds, by the slower of device and host."""
        return max(self.device_s, self.host_s)

    def memory_at(self, lasting: Mapping[str, float]) -> tuple[tuple[float, dict[str, float]], ...]:
        """Return (time, bytes by kind) before the step and after each change. ``lasting``: the bytes of the
        kinds that do not change."""
        points = (0.0, 0.0, 0.0), *self.curve
        return tuple((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in points)

    def _turn(self) -> None:
        self.turns.append((len(self.events), self._now_s))

    def _remember(self, kept: float, transient: float) -> None:
        if (kept, transient) != (self.curve[-1][1:] if self.curve else (0.0, 0.0)):
            self.curve.append((self._now_s, kept, transient))
            self.states.append(len(self.moment_times))

    def _pass(self, positions: Iterable[int], entries: Mapping[int, list[int]], run: int) -> None:
        for position in positions:
            self._remember(*self._alive[position])
            self.moment_times.append(self._now_s)
            taken = entries.get(position, ())
            issued = [
                self._issues[turn.issue] for turn in (self._entries[n] for n in taken) if turn.issue >= 0
            ]
            # The work that begins together with a collective is an event of its own.
            product_s = max((self._beside_s(issue) for issue in issued), default=0.0)
            self._work(position, self._work_s[position] - product_s)
            products = {position: len(self.events)} if product_s else {}
            self._work(position, product_s)
            for number in taken:
                self._take(number, run, products)

    def _beside_s(self, issue: Issue) -> float:
        return float(issue.product_s[0]) if issue.product_s is not None and self._overlap.beside else 0.0

    def _take(self, number: int, run: int, products: Mapping[int, int]) -> None:
        """Record event ``number`` of :func:`program` in micro-batch ``run``. ``products``: position -> index
        in ``events`` of the computation at this position that starts together with a collective."""
        turn, (now_s, start_s, _, after_s) = self._entries[number], self.clocked.times[run, number].tolist()
        if isnan(now_s):
            return
        if self._overlap.slower:
            self._work(turn.position, now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        if turn.code >= BEGINS:
            self.waits.append(len(self.events))
        else:
            issue, slower = self._issues[turn.issue], self._overlap.slower
            seconds, product_s = float(issue.seconds[0]), self._beside_s(issue)
            if product_s:
                self.together[len(self.events)] = products[turn.position]
            name = self.moments[turn.position].words
            if issue.until == "step":
                name = REDUCTION
            elif BLOCKS < turn.code <= REDUCES:
                name = AHEAD[issue.kind]
            self._event(turn.position, name, issue.axes, start_s, seconds)
            if product_s:
                self._work(turn.position, min(max(now_s - start_s, 0.0), seconds / (1.0 + slower)) * slower)
        # Sums in another order may be a last bit less, and time never goes back.
        self._now_s = max(self._now_s, after_s)

    def _work(self, position: int, seconds: float) -> None:
        if seconds > _ROUNDING * self._now_s:
            self._event(position, self.moments[position].words, None, self._now_s, seconds)
            self._now_s += seconds

    def _event(self, position: int, name: str, axes: Axes | None, start_s: float, seconds: float) -> None:
        moment = self.moments[position]
        phase, group = (moment.phase, moment.group) if name != REDUCTION else ("backward", "")
        self.events.append(StepEvent(name, phase, group, axes, start_s, seconds, moment.kind))

    def _wait_for_host(self, takes: Floats) -> None:
        begun = np.array(self.moment_times)
        delays = launch_delays(begun, takes, self.device_s)

        def later(time_s: float) -> float:
            return float(
                delays[max(int(np.searchsorted(begun, time_s * (1.0 + _ROUNDING), side="right")) - 1, 0)]
            )

        self.events = [replace(event, start_s=event.start_s + later(event.start_s)) for event in self.events]
        self.curve = [(time_s + later(time_s), kept, transient) for time_s, kept, transient in self.curve]
        self.moment_times = [time_s + later(time_s) for time_s in self.moment_times]
        self.end_s += later(self.end_s)


def launch_delays(begun: Floats, takes: Floats, device_s: float) -> Floats:
    """Return (moments,) seconds by which host launches delay the start of each moment on the device.

    Args:
        begun: (moments,) the start of each on the device alone.
        takes: (moments,) the host's seconds to launch each.
    """
    issued, host_s = np.cumsum(takes) - takes, float(takes.sum())  # the time at which the host reaches each
    # From every moment on, the device has to do the rest of the step, but not before it is issued.
    longest = max(device_s, host_s, float(np.max(issued + device_s - begun)))
    lead_s = longest - max(device_s, host_s)
    return np.maximum.accumulate(np.maximum(issued - lead_s - begun, 0.0))
