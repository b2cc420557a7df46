"""The plain interpreter of a step in time: it runs the instructions of one strategy's step one by one.

What overlaps and what is waited for is said in :mod:`tensoropt.simulate.simulator`, which does the same for
many strategies with arrays, and only for their figures. Here all that happens gets its time: work and
collectives, the memory that is alive, and the moments of the step. The two are tested against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tensoropt.costs.effects import Effect
from tensoropt.costs.prices import CommunicationCosts, Send
from tensoropt.simulate.candidates import Overlap
from tensoropt.simulate.step import AliveBytes, RankStep, SharedSend

REDUCTION = "reduction of gradients"
AHEAD = {"all_gather": "gathering parameters ahead", "reduce_scatter": "scattering gradients"}
"""The names of collectives that overlap with the computation of a block."""

_Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something that takes time: work on the device, or a collective over mesh ``axes``; ``kind`` is that of
    its moment."""

    name: str
    phase: str
    group: str
    axes: _Axes | None
    start_s: float
    duration_s: float
    kind: str

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step to the end of the event."""
        return self.start_s + self.duration_s


class MicroBatchSeconds(NamedTuple):
    """The device's seconds of a micro-batch; ``scattering``: those that backward waits at its very end for
    gradients on their way to their shards."""

    forward: float
    backward: float
    scattering: float


@dataclass
class TimedStep:
    """One strategy's step, and when everything happens in it.

    Attributes:
        events: in the order in which they were issued.
        curve: (time, kept, transient) after every change of memory, in time order.
        states: for each point of the curve, the numbers of the moments whose kept, transient and workspace
            bytes it contains, counted through all micro-batches; -1 if there are none.
        moment_times: the time at which each moment begins, through all micro-batches and to the step's end.
        end_s: the time at which the last event is over.
        waits: numbers of events before which everything that was sent ahead is waited for.
        together: numbers of collectives that overlap with work which begins with them, mapped to the number
            of that work.
        device_s, host_s: seconds that the step takes on the device alone, and on the host alone.
        compute_s, communication_s: seconds of computing, and of all collectives.
        micro_batches: those of each micro-batch on the device.
        closing_s: those after the last of them, ``reducing_s`` of which are spent waiting for buckets.
    """

    step: RankStep
    events: list[StepEvent] = field(default_factory=list)
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    states: list[tuple[int, int, int]] = field(default_factory=list)
    moment_times: list[float] = field(default_factory=list)
    end_s: float = 0.0
    waits: list[int] = field(default_factory=list)
    together: dict[int, int] = field(default_factory=dict)
    device_s: float = 0.0
    host_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    micro_batches: list[MicroBatchSeconds] = field(default_factory=list)
    closing_s: float = 0.0
    reducing_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """The seconds of collectives for which the device waits."""
        return min(max(self.device_s - self.compute_s, 0.0), self.communication_s)

    @property
    def time_s(self) -> float:
        """Seconds of the step: the slower of device and host."""
        return max(self.device_s, self.host_s)

    def memory_at(self, lasting: Mapping[str, float]) -> tuple[tuple[float, dict[str, float]], ...]:
        """Return (time, bytes by kind) after every change, beginning with what is alive before the step.

        Args:
            lasting: bytes by kind that are alive during the whole step.
        """
        points = (0.0, 0.0, 0.0), *self.curve
        return tuple((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in points)


def time_step(step: RankStep, communication: CommunicationCosts, overlap: Overlap) -> TimedStep:
    """Return a step with the time of everything that happens in it.

    Args:
        communication: the extra seconds of coming from work to collectives and going back.
    """
    return _Clock(step, communication, overlap).run()


class _Send(NamedTuple):
    """The collectives of one moment over one set of axes, of which ``bytes`` is the size of the largest; they
    begin together with the last ``product_s`` seconds of the moment's work."""

    axes: _Axes
    seconds: float
    bytes: int
    product_s: float


class _Work(NamedTuple):
    """The work of an instruction on the device and on the host, and the collectives of its effects."""

    seconds: float
    host_s: float
    sends: list[_Send]

    @classmethod
    def of(cls, effects: list[Effect]) -> _Work:
        by_axes: dict[_Axes, list[tuple[Send, float]]] = {}
        for effect in effects:
            for send in effect.sends:
                by_axes.setdefault(send.axes, []).append((send, effect.beside_work_s))
        sends = [
            _Send(
                axes,
                sum(send.seconds for send, _ in of_axes),
                max(send.bytes for send, _ in of_axes),
                max(product_s for _, product_s in of_axes),
            )
            for axes, of_axes in sorted(by_axes.items())
        ]
        return cls(
            sum(effect.local_s + effect.passing.device_s for effect in effects),
            sum(effect.host_s + effect.passing.host_s for effect in effects),
            [send for send in sends if send.seconds],
        )


class _MemoryCurve:
    """The points of a memory curve; all that ends at one time is one point, which is written when the time
    moves on or something begins."""

    def __init__(self, points: list[tuple[float, float, float]], states: list[tuple[int, int, int]]):
        self.points, self.states = points, states
        self._alive, self._state = AliveBytes(), (-1, -1, -1)
        self._freed_s: float | None = None

    def free_workspace(self, now_s: float) -> None:
        """Record that the running instruction is done."""
        if self._alive.workspace:
            self._free(now_s)
            self._alive, self._state = self._alive._replace(workspace=0.0), (*self._state[:2], -1)

    def begin(self, now_s: float, number: int, before: AliveBytes, alive: AliveBytes) -> None:
        """Record that moment ``number`` begins, given the bytes before it and during it."""
        kept, transient = alive.kept - before.kept, alive.transient - before.transient
        if kept < 0 or transient < 0:
            self._free(now_s)
            now = self._alive
            self._alive = AliveBytes(now.kept + min(kept, 0.0), now.transient + min(transient, 0.0))
        # If nothing is added, the bytes are the current ones, even if others have replaced them.
        of_kept, of_transient, of_workspace = self._state
        self._state = (
            number if kept <= 0 else of_kept,
            number if transient <= 0 else of_transient,
            of_workspace,
        )
        if kept > 0 or transient > 0 or alive.workspace:
            self._write_freed()
            self._alive, self._state = alive, (number, number, number)
            self._write(now_s)

    def finish(self, now_s: float) -> None:
        """Record that everything is over."""
        self.free_workspace(now_s)
        self._write_freed()

    def _free(self, now_s: float) -> None:
        if self._freed_s != now_s:
            self._write_freed()
        self._freed_s = now_s

    def _write_freed(self) -> None:
        if self._freed_s is not None:
            self._write(self._freed_s)
            self._freed_s = None

    def _write(self, now_s: float) -> None:
        self.points.append((now_s, self._alive.kept, self._alive.transient + self._alive.workspace))
        self.states.append(self._state)


class _Clock:
    """A device that runs a step: its time, and what is under way."""

    def __init__(self, step: RankStep, communication: CommunicationCosts, overlap: Overlap):
        self.step, self.communication, self.overlap = step, communication, overlap
        self.timed = TimedStep(step)
        self.works = [_Work.of(now.effects) for now in step.instructions]
        self.memory = _MemoryCurve(self.timed.curve, self.timed.states)
        self.host: list[float] = []  # the host's seconds to issue each moment
        self.moment = step.instructions[0].moment
        self.now_s = 0.0
        # The seconds of work since the last collective, and the largest bytes over each set of axes of the
        # collectives just before that work.
        self.worked_s, self.sent = 0.0, Counter[_Axes]()
        self.busy: dict[str, float] = {}  # until when collectives that overlap occupy the links
        self.arrival_s = 0.0  # when everything sent ahead has arrived
        # The remaining seconds of collectives that overlap with computation, since when, and what was
        # computed by then.
        self.flying_s = self.since_s = self.since_computed_s = 0.0
        self.scattering_s = 0.0
        self.issuing = [""]  # the kinds of micro-batches that this one is
        self.sends_ahead = overlap.beside and any(
            shared.until != "step" for now in step.instructions for shared in now.shared
        )

    def run(self) -> TimedStep:
        step, timed = self.step, self.timed
        for number in range(step.micro_batches):
            self._micro_batch(first=number == 0, last=number == step.micro_batches - 1)
        backward_end_s = self.now_s
        for position in range(step.last, len(step.instructions)):
            if step.instructions[position].moment.kind == "step":
                self._wait_for_buckets()
            self._instruction(position)
        self._slow_down_work()
        timed.device_s, timed.closing_s = self.now_s, self.now_s - backward_end_s
        timed.end_s = self.now_s
        self.memory.finish(self.now_s)
        self._wait_for_host()
        return timed

    def _micro_batch(self, *, first: bool, last: bool) -> None:
        self.issuing = ["", *(["first"] * first), *(["last"] * last)]
        self.worked_s, self.sent = 0.0, Counter()
        self.since_s, self.since_computed_s = self.now_s, self.timed.compute_s
        began_s, turned_s = self.now_s, None
        for position in range(self.step.last):
            if turned_s is None and self.step.instructions[position].moment.phase != "forward":
                turned_s = self.now_s
            self._instruction(position)
        turned_s = self.now_s if turned_s is None else turned_s
        # The work after the last collective is counted before the micro-batch is over, so that every one
        # pays for it.
        self._slow_down_work()
        seconds = MicroBatchSeconds(turned_s - began_s, self.now_s - turned_s, self.scattering_s)
        self.timed.micro_batches.append(seconds)
        if not last:
            self.memory.finish(self.now_s)

    def _instruction(self, position: int) -> None:
        now, work = self.step.instructions[position], self.works[position]
        self._begin(position)
        # The work that begins together with a collective is an event of its own.
        product_s = max((send.product_s for send in work.sends), default=0.0) if self.overlap.beside else 0.0
        apart_s = work.seconds - product_s
        self._work(self.now_s, apart_s)
        product = len(self.timed.events)
        self._work(self.now_s + apart_s, product_s)
        self._compute(work.seconds)
        self.worked_s += work.seconds
        waits = self.sends_ahead and now.moment.kind == "begin"
        if waits:
            self._arrive()
        shared = [each for each in now.shared if each.only in self.issuing]
        # When a block begins, gradients arrive and complete buckets before anything else is sent.
        early = [each for each in shared if waits and each.until == "step"]
        for each in early:
            self._send_shared(each)
        for send in work.sends:
            self._send(send, product=product if send.product_s and self.overlap.beside else None)
        for each in shared[: len(shared) - len(early)]:
            self._send_shared(each)
        # When backward ends, nothing follows with which a collective could overlap.
        if waits and position == self.step.last - 1:
            self._slow_down_beside()
            computed_s = self.now_s
            self._arrive()
            self.scattering_s = self.now_s - computed_s

    def _begin(self, position: int) -> None:
        self.moment, number = self.step.instructions[position].moment, len(self.host)
        self.timed.moment_times.append(self.now_s)
        self.host.append(self.works[position].host_s)
        before = self.step.memory[position - 1] if position else AliveBytes()
        self.memory.free_workspace(self.now_s)
        self.memory.begin(self.now_s, number, before, self.step.memory[position])

    def _work(self, start_s: float, seconds: float) -> None:
        if start_s + seconds > start_s:  # more than a rounding error
            self._event(self.moment.words, None, start_s, seconds)

    def _event(self, name: str, axes: _Axes | None, start_s: float, seconds: float) -> None:
        moment = self.moment
        phase, group = (moment.phase, moment.group) if name != REDUCTION else ("backward", "")
        self.timed.events.append(StepEvent(name, phase, group, axes, start_s, seconds, moment.kind))

    def _compute(self, seconds: float) -> None:
        self.now_s += seconds
        self.timed.compute_s += seconds

    def _slow_down(self, seconds: float) -> None:
        """Compute for longer than the work by itself takes."""
        self._work(self.now_s, seconds)
        self._compute(seconds)

    def _slow_down_work(self) -> float:
        """Count, and return, the extra time that the last collectives have caused in the work since then."""
        if not self.worked_s > 0.0:
            return 0.0
        extra = (self.communication.leaving_s(axes, self.worked_s, size) for axes, size in self.sent.items())
        extra_s = max(map(float, extra), default=0.0)
        self.sent.clear()
        self._slow_down(extra_s)
        return extra_s

    def _slow_down_beside(self) -> None:
        """Count the extra time that computing has taken during collectives until now.

        In s seconds of overlap, s / (1 + slower) of computing are done; until now all of it was counted as
        done.
        """
        slower = self.overlap.slower
        if slower and self.flying_s:
            computed_s = (self.timed.compute_s - self.since_computed_s) * (1.0 + slower)
            self._slow_down(min(self.flying_s, computed_s) * (slower / (1.0 + slower)))
            self._pass()

    def _pass(self) -> None:
        """Let what is under way run on until now."""
        self.flying_s = max(self.flying_s - (self.now_s - self.since_s), 0.0)
        self.since_s, self.since_computed_s = self.now_s, self.timed.compute_s

    def _arrive(self) -> None:
        """Wait for everything that was sent ahead."""
        self._slow_down_beside()
        self.timed.waits.append(len(self.timed.events))
        self.now_s = max(self.now_s, self.arrival_s)
        self._pass()

    def _wait_for_buckets(self) -> None:
        self._slow_down_beside()
        before_s = self.now_s
        self.now_s = max([self.now_s, *self.busy.values()])
        self.timed.reducing_s = self.now_s - before_s

    def _send_shared(self, shared: SharedSend) -> None:
        send = shared.send
        self.timed.host_s += shared.host_s
        self._send(_Send(send.axes, send.seconds, send.bytes, 0.0), shared)

    def _send(self, send: _Send, shared: SharedSend | None = None, product: int | None = None) -> None:
        """Send collectives.

        Args:
            product: the number of the event of work that begins together with them.
        """
        axes, seconds, slowed_s = send.axes, send.seconds, 0.0
        beside = shared is not None and shared.until != "" and self.overlap.beside
        if not beside:  # part of the sequence that ranks execute
            slowed_s = self._slow_down_work()
            seconds += float(self.communication.arriving_s(axes, self.worked_s, send.bytes))
            self.worked_s, self.sent[axes] = 0.0, max(self.sent[axes], send.bytes)
        self.timed.communication_s += seconds
        self._slow_down_beside()
        since_s = 0.0 if product is None else send.product_s + slowed_s
        links = self.overlap.links(axes)
        start_s = max([self.now_s - since_s, *(self.busy.get(link, 0.0) for link in links)])
        name = self.moment.words
        if shared is not None and shared.until == "step":
            name = REDUCTION
        elif beside and shared is not None:
            name = AHEAD[shared.send.kind]
        if product is not None:
            self.timed.together[len(self.timed.events)] = product
        if seconds or name != self.moment.words:
            self._event(name, axes, start_s, seconds)
        if beside:
            self.busy |= dict.fromkeys(links, start_s + seconds)
            self._pass()
            self.flying_s += seconds
            if name != REDUCTION:
                self.arrival_s = max(self.arrival_s, start_s + seconds)
            return
        end_s, slower = start_s + seconds, self.overlap.slower
        if product is not None and slower:
            overlapped_s = min(max(self.now_s - start_s, 0.0), seconds / (1.0 + slower))
            self._slow_down(overlapped_s * slower)
        self.now_s = max(self.now_s, end_s)
        self._pass()
        for link in self.busy.keys() & links:
            self.busy[link] = self.now_s

    def _wait_for_host(self) -> None:
        """Once all is recorded, make the device wait wherever the host has not yet issued what comes next.

        Step follows step: the host's lead at the beginning of a step on the device is the smallest one with
        which no step is longer than the slower of the two.
        """
        timed, begun, takes = self.timed, np.array(self.timed.moment_times), np.array(self.host)
        issued = np.cumsum(takes) - takes  # the time at which the host reaches a moment
        host_s = float(takes.sum())
        # The host also issues buckets, at no moment of their own.
        timed.host_s = timed.host_s + host_s if host_s else 0.0
        if not host_s:
            return
        # From every moment on, the device has to do the rest of the step, but not before it is issued.
        longest = max(timed.device_s, host_s, float(np.max(issued + timed.device_s - begun)))
        lead_s = longest - max(timed.device_s, host_s)
        delays = np.maximum.accumulate(np.maximum(issued - lead_s - begun, 0.0))

        def later(time_s: float) -> float:
            return float(delays[max(int(np.searchsorted(begun, time_s, side="right")) - 1, 0)])

        timed.events = [
            replace(event, start_s=event.start_s + later(event.start_s)) for event in timed.events
        ]
        timed.curve = [(time_s + later(time_s), kept, transient) for time_s, kept, transient in timed.curve]
        timed.moment_times = [time_s + later(time_s) for time_s in timed.moment_times]
        timed.end_s += later(timed.end_s)
