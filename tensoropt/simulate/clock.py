"""The plain interpreter of one strategy's step, with the time of everything that happens.

:mod:`tensoropt.simulate.simulator` is its vectorised twin and documents overlap and waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.simulate.candidates import Overlap
from tensoropt.simulate.step import AliveBytes, Sends, Step

REDUCTION = "reduction of gradients"
AHEAD = {"all_gather": "gathering parameters ahead", "reduce_scatter": "scattering gradients"}
"""The names of collectives that overlap with a block."""

_Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Work on the device, or a collective over mesh ``axes``; ``kind`` is that of its moment."""

    name: str
    phase: str
    group: str
    axes: _Axes | None
    start_s: float
    duration_s: float
    kind: str

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class TimedStep:
    """One strategy's step with the time of everything in it.

    Attributes:
        events: in the order of issue.
        curve: (time, kept, transient) from each moment on in which they change, and after the step.
        states: for each point of the curve, its moment.
        moment_times: the start of each moment, through all micro-batches, and the step's end.
        end_s: the end of the last event.
        waits: events before which all asynchronous collectives complete.
        together: collective -> the work that starts with it.
        device_s, host_s: seconds of the device alone, and of the host alone.
        compute_s, communication_s: seconds of computing, and of all collectives.
        turns: (first event, device time) of each micro-batch's forward and backward, the step's tail and end.
        scattering: seconds that each backward waits at its end for reduce-scatters.
        reducing_s: seconds that the end of the step waits for buckets.
    """

    def __init__(self, step: Step, overlap: Overlap):
        self.step, self._overlap = step, overlap
        self.events: list[StepEvent] = []
        self.moment_times: list[float] = []
        self.waits: list[int] = []
        self.together: dict[int, int] = {}
        self.turns: list[tuple[int, float]] = []
        self.scattering: list[float] = []
        self.compute_s = self.communication_s = self.reducing_s = self.host_s = 0.0
        self._host: list[float] = []  # the host's seconds to issue each moment
        self.curve, self.states = list[tuple[float, float, float]](), list[int]()
        self._moment, self._issuing = step.instructions[0].moment, [""]
        self._now_s = 0.0
        self._busy: dict[str, float] = {}  # until when collectives that overlap occupy the links
        self._arrival_s = 0.0  # when everything sent ahead has arrived
        # The remaining seconds of collectives that overlap with computation, since when, and what was
        # computed by then.
        self._flying_s = self._since_s = self._since_computed_s = 0.0
        self._scattering_s = 0.0
        self._sends_ahead = overlap.beside and any(
            sends.kind and sends.until != "step" for now in step.instructions for sends in now.sends
        )
        self._run()

    @property
    def exposed_s(self) -> float:
        """The seconds of exposed collectives."""
        return min(max(self.device_s - self.compute_s, 0.0), self.communication_s)

    @property
    def time_s(self) -> float:
        """Seconds of the step, the slower of device and host."""
        return max(self.device_s, self.host_s)

    def memory_at(self, lasting: Mapping[str, float]) -> tuple[tuple[float, dict[str, float]], ...]:
        """Return (time, bytes by kind) from before the step, after every change, with ``lasting`` bytes."""
        points = (0.0, 0.0, 0.0), *self.curve
        return tuple((time_s, {**lasting, "kept": k, "transient": t}) for time_s, k, t in points)

    def _run(self) -> None:
        step = self.step
        for number in range(step.micro_batches):
            self._run_micro_batch(first=number == 0, last=number == step.micro_batches - 1)
        self._turn()
        for position in range(step.last, len(step.instructions)):
            if step.instructions[position].moment.kind == "step":
                self._wait_for_buckets()
            self._run_instruction(position)
        self.end_s = self.device_s = self._now_s
        self._remember(AliveBytes())
        self._turn()
        self._wait_for_host()

    def _run_micro_batch(self, *, first: bool, last: bool) -> None:
        self._issuing = ["", *(["first"] * first), *(["last"] * last)]
        # What is left of collectives counts from here, as in the simulator, which repeats micro-batches.
        self._since_s, self._since_computed_s = self._now_s, self.compute_s
        self._turn()
        phases = [now.moment.phase for now in self.step.instructions[: self.step.last]]
        forward_end = next((i for i, phase in enumerate(phases) if phase != "forward"), self.step.last)
        for position in range(forward_end):
            self._run_instruction(position)
        self._turn()
        for position in range(forward_end, self.step.last):
            self._run_instruction(position)
        self.scattering.append(self._scattering_s)

    def _turn(self) -> None:
        self.turns.append((len(self.events), self._now_s))

    def _remember(self, alive: AliveBytes) -> None:
        kept, transient = alive.kept, alive.transient + alive.workspace
        if (kept, transient) != (self.curve[-1][1:] if self.curve else (0.0, 0.0)):
            self.curve.append((self._now_s, kept, transient))
            self.states.append(len(self._host))

    def _run_instruction(self, position: int) -> None:
        now, begun_s = self.step.instructions[position], self._now_s
        self._remember(self.step.memory[position])
        self._moment = now.moment
        self.moment_times.append(begun_s)
        self._host.append(now.host_s)
        # The work that begins together with a collective is an event of its own.
        product_s = max((sends.product_s for sends in now.sends), default=0.0) * self._overlap.beside
        self._work(begun_s, now.work_s - product_s)
        product = len(self.events)
        self._work(begun_s + now.work_s - product_s, product_s)
        self._compute(now.work_s)
        waits = self._sends_ahead and now.moment.kind == "begin"
        issued = [sends for sends in now.sends if sends.only in self._issuing]
        if waits:
            self._arrive()
            # Gradients arrive and complete buckets before anything else is sent.
            issued.sort(key=lambda sends: sends.until != "step")
        for sends in issued:
            if sends.seconds or sends.kind:
                self._send(sends, product if sends.product_s and self._overlap.beside else None)
        # When backward ends, nothing follows with which a collective could overlap.
        if waits and position == self.step.last - 1:
            self._slow_down_beside()
            computed_s = self._now_s
            self._arrive()
            self._scattering_s = self._now_s - computed_s

    def _work(self, start_s: float, seconds: float) -> None:
        if start_s + seconds > start_s:  # more than a rounding error
            self._event(self._moment.words, None, start_s, seconds)

    def _event(self, name: str, axes: _Axes | None, start_s: float, seconds: float) -> None:
        moment = self._moment
        phase, group = (moment.phase, moment.group) if name != REDUCTION else ("backward", "")
        self.events.append(StepEvent(name, phase, group, axes, start_s, seconds, moment.kind))

    def _compute(self, seconds: float) -> None:
        self._now_s += seconds
        self.compute_s += seconds

    def _slow_down(self, seconds: float) -> None:
        self._work(self._now_s, seconds)
        self._compute(seconds)

    def _slow_down_beside(self) -> None:
        """Add the slow-down of computing: s seconds of overlap do s / (1 + slower) of work."""
        slower = self._overlap.slower
        if slower and self._flying_s:
            computed_s = (self.compute_s - self._since_computed_s) * (1.0 + slower)
            self._slow_down(min(self._flying_s, computed_s) * (slower / (1.0 + slower)))
            self._pass()

    def _pass(self) -> None:
        self._flying_s = max(self._flying_s - (self._now_s - self._since_s), 0.0)
        self._since_s, self._since_computed_s = self._now_s, self.compute_s

    def _arrive(self) -> None:
        self._slow_down_beside()
        self.waits.append(len(self.events))
        self._now_s = max(self._now_s, self._arrival_s)
        self._pass()

    def _wait_for_buckets(self) -> None:
        self._slow_down_beside()
        before_s = self._now_s
        self._now_s = max([self._now_s, *self._busy.values()])
        # Nothing is under way any longer that could slow down the optimizer.
        self._flying_s = 0.0
        self.reducing_s = self._now_s - before_s

    def _send(self, sends: Sends, product: int | None) -> None:
        """Send collectives; ``product`` is the event of work that starts with them."""
        axes, seconds, since_s = sends.axes, sends.seconds, sends.product_s
        self.host_s += sends.host_s
        beside = self._overlap.beside and sends.until != ""
        self.communication_s += seconds
        self._slow_down_beside()
        links = self._overlap.links(axes)
        begin_s = self._now_s if product is None else self._now_s - since_s
        start_s = max([begin_s, *(self._busy.get(link, 0.0) for link in links)])
        end_s, slower = start_s + seconds, self._overlap.slower
        if product is not None:
            self.together[len(self.events)] = product
        if sends.until == "step":
            self._event(REDUCTION, axes, start_s, seconds)
        elif seconds or beside:
            self._event(AHEAD[sends.kind] if beside else self._moment.words, axes, start_s, seconds)
        if beside:
            self._busy |= dict.fromkeys(links, end_s)
            self._pass()
            self._flying_s += seconds
            if sends.until == "block":
                self._arrival_s = max(self._arrival_s, end_s)
            return
        if product is not None and slower:
            overlapped_s = min(max(self._now_s - start_s, 0.0), seconds / (1.0 + slower))
            self._slow_down(overlapped_s * slower)
        self._now_s = max(self._now_s, end_s)
        self._pass()
        self._busy |= dict.fromkeys(self._busy.keys() & links, self._now_s)

    def _wait_for_host(self) -> None:
        """Delay the device until the host has launched what comes next."""
        begun, takes = np.array(self.moment_times), np.array(self._host)
        issued = np.cumsum(takes) - takes  # the time at which the host reaches a moment
        host_s = float(takes.sum())
        # The host also issues buckets, at no moment of their own.
        self.host_s = self.host_s + host_s if host_s else 0.0
        if not host_s:
            return
        # From every moment on, the device has to do the rest of the step, but not before it is issued.
        longest = max(self.device_s, host_s, float(np.max(issued + self.device_s - begun)))
        lead_s = longest - max(self.device_s, host_s)
        delays = np.maximum.accumulate(np.maximum(issued - lead_s - begun, 0.0))

        def later(time_s: float) -> float:
            return float(delays[max(int(np.searchsorted(begun, time_s, side="right")) - 1, 0)])

        self.events = [replace(event, start_s=event.start_s + later(event.start_s)) for event in self.events]
        self.curve = [(time_s + later(time_s), kept, transient) for time_s, kept, transient in self.curve]
        self.moment_times = [time_s + later(time_s) for time_s in self.moment_times]
        self.end_s += later(self.end_s)
