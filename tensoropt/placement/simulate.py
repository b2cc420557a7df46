"""The simulator for placed plans: devices and links as timelines, every tensor from its first to its last
use.

A device runs its forward operators in the plan's order, then its backward operators in theirs, then its
optimizer step. A tensor read on another device is sent there once, as soon as it is made; the gradients of
all its readers there are added up on their device and sent back once. Sending occupies lanes, not devices.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tensoropt.placement.problem import Placement, PlacementProblem
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.simulate.timeline import Holding, Task, Timeline, length_s, schedule


def device_name(device: int) -> str:
    """The name of a device as a resource of the timeline."""
    return f"device {device}"


class TensorTransfer(NamedTuple):
    """A message: a tensor of the placement problem, or with ``backward`` its gradient, between two
    devices.
    """

    tensor: int
    source: int
    target: int
    backward: bool


@dataclass(frozen=True)
class SimulatedPlacement:
    """One simulated training step of a placement.

    Attributes:
        timeline: all tasks with their place in time, and what each takes and gives back of memory.
        transfers: in the order in which they start.
    """

    problem: PlacementProblem
    placement: Placement
    timeline: Timeline
    transfers: tuple[TensorTransfer, ...]

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.total_s

    @cached_property
    def peaks(self) -> tuple[dict[str, float], ...]:
        """Per device the bytes by kind when most is alive."""
        return tuple(
            {kind: float(now.get(kind, 0.0)) for kind in MEMORY_KINDS}
            for now in (self.timeline.peak(device_name(d))[1] for d in range(self.problem.devices.count))
        )

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per device the most bytes alive at once."""
        return tuple(sum(peak.values()) for peak in self.peaks)

    @property
    def memory_bytes(self) -> float:
        """The peak of the fullest device."""
        return max(self.peak_bytes)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per device the seconds in which it computes."""
        return tuple(
            length_s(self.timeline.busy([device_name(d)])) for d in range(self.problem.devices.count)
        )

    @cached_property
    def busiest_lane(self) -> tuple[str, float]:
        """The lane that messages occupy longest, and its seconds; of equals the first by name."""
        seconds: dict[str, float] = defaultdict(float)
        for event in self.timeline.events:
            if event.task.phase.startswith("send"):
                for lane in event.task.resources:
                    seconds[lane] += event.task.duration_s
        return min(seconds.items(), key=lambda item: (-item[1], item[0]), default=("no link", 0.0))

    @cached_property
    def communication_s(self) -> float:
        """Seconds of all messages, added up."""
        return sum(e.task.duration_s for e in self.timeline.events if e.task.phase.startswith("send"))

    def fits(self, limit_bytes: float | None = None) -> bool:
        """Whether every device holds its share, within its capacity and a limit."""
        most = self.problem.devices.within(limit_bytes)
        return all(peak <= room for peak, room in zip(self.peak_bytes, most.tolist(), strict=True))


def simulate_placement(
    problem: PlacementProblem, placement: Placement, *, enforced: bool = True
) -> SimulatedPlacement:
    """One training step of a placement in time: who runs and sends when, and what is alive meanwhile.

    Args:
        enforced: False lets every device take what is ready first, as frameworks do that know no order
            (FastT, section 6.3, compares the two); the placement's orders are then only ties.

    Raises:
        PlanError: the placement is not one of this problem, or its orders wait for each other.
    """
    placement.check(problem)
    return _StepSimulation(problem, placement, enforced).simulate()


@dataclass
class _StepSimulation:
    """The tasks of one step, and where each operator and message stands among them."""

    problem: PlacementProblem
    placement: Placement
    enforced: bool
    tasks: list[Task] = field(default_factory=list)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)
    copies: list[tuple[int, ...]] = field(default_factory=list)
    """Per tensor the devices it is sent to."""
    arrival: dict[tuple[int, int], int] = field(default_factory=dict)
    """(tensor, device) -> the task that brings the tensor there."""
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    """(tensor, device) -> the task that brings the tensor's gradient from there."""
    updates: dict[int, Holding] = field(default_factory=dict)
    """Optimizer task -> what it takes while it runs."""

    def simulate(self) -> SimulatedPlacement:
        problem, place = self.problem, self.placement
        self._number()
        self._forward()
        if problem.training:
            self._backward()
            self._update()
        # Memory follows time: only once the tasks are scheduled is it known which user of a tensor is the
        # last.
        timeline = schedule(self.tasks)
        timeline = Timeline(
            tuple(
                replace(event, task=task)
                for event, task in zip(timeline.events, self._with_memory(timeline), strict=True)
            ),
            timeline.order,
            tuple(self._stored()),
        )
        messages = {i: self._transfer(*key, back=False) for key, i in self.arrival.items()}
        messages |= {i: self._transfer(*key, back=True) for key, i in self.returned.items()}
        transfers = tuple(messages[i] for i in timeline.order if i in messages)
        return SimulatedPlacement(problem, place, timeline, transfers)

    def _transfer(self, tensor: int, device: int, *, back: bool) -> TensorTransfer:
        """A tensor's way from its producer's device to ``device``, or its gradient's way back."""
        producer = self.placement.device[self.problem.tensors[tensor].producer]
        source, target = (device, producer) if back else (producer, device)
        return TensorTransfer(tensor, source, target, back)

    # -- tasks ------------------------------------------------------------------------------------

    def _number(self) -> None:
        """Positions of all tasks, so that they can name each other: operators, messages, backward, update."""
        problem, place = self.problem, self.placement
        # Numbered before any is made, as tasks name others that come later: backward waits for gradients on
        # their way. The methods below append in this very order.
        position = 0
        for order in place.forward:
            for operator in order:
                self.forward[operator] = position
                position += 1
        for number, tensor in enumerate(problem.tensors):
            source = place.device[tensor.producer]
            self.copies.append(tuple(sorted({place.device[r] for r in tensor.readers} - {source})))
            for device in self.copies[number]:
                self.arrival[number, device] = position
                position += 1
        if not problem.training:
            return
        for order in place.backward_orders:
            for operator in order:
                self.backward[operator] = position
                position += 1
        for number, device in self.arrival:
            if problem.tensors[number].gradient:
                self.returned[number, device] = position
                position += 1

    def _forward(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.forward):
            previous: list[int] = []
            for operator in order:
                after = list(previous)
                for number in problem.read[operator]:
                    producer = problem.tensors[number].producer
                    beside = place.device[producer] == device
                    after.append(self.forward[producer] if beside else self.arrival[number, device])
                self._add(operator, device, float(problem.forward_s[operator, device]), after, "forward")
                # Without an enforced order only the device's resource keeps its operators apart, and
                # whichever is ready first takes it.
                previous = [self.forward[operator]] if self.enforced else []
        for number, device in self.arrival:
            self._send(number, device, [self.forward[problem.tensors[number].producer]], "send")

    def _backward(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.backward_orders):
            # A device begins backward after its last forward operator, as one process that runs both does.
            forwards = [self.forward[o] for o in place.forward[device]]
            previous = forwards[-1:] if self.enforced else []
            for operator in order:
                after = [*previous, self.forward[operator]]
                # Its gradient is complete when every reader has added to it, those elsewhere by one message.
                for number in problem.made[operator]:
                    tensor = problem.tensors[number]
                    if tensor.gradient:
                        after += [self.backward[r] for r in tensor.readers if place.device[r] == device]
                        after += [self.returned[number, d] for d in self.copies[number]]
                self._add(operator, device, float(problem.backward_s[operator, device]), after, "backward")
                previous = [self.backward[operator]] if self.enforced else []
        for number, device in self.returned:
            readers = [r for r in problem.tensors[number].readers if place.device[r] == device]
            self._send(number, device, [self.backward[r] for r in readers], "send gradient")

    def _update(self) -> None:
        problem, place = self.problem, self.placement
        for device, order in enumerate(place.backward_orders):
            seconds = sum(float(problem.update_s[o, device]) for o in order)
            peaks = problem.update_peak_bytes
            # The optimizer runs over all parameters of the device at once, so that its temporaries add up.
            peak = 0.0 if peaks is None else sum(float(peaks[o]) for o in order)
            if seconds or peak:
                after = tuple(self.backward[o] for o in order)
                self.updates[len(self.tasks)] = (device_name(device), "transient", peak)
                self.tasks.append(
                    Task(
                        name="optimizer",
                        duration_s=seconds,
                        resources=(device_name(device),),
                        after=after,
                        phase="optimizer",
                    )
                )

    def _add(self, operator: int, device: int, seconds: float, after: list[int], phase: str) -> None:
        name = self.problem.names[operator]
        self.tasks.append(
            Task(
                name=name,
                duration_s=seconds,
                resources=(device_name(device),),
                after=tuple(dict.fromkeys(after)),
                phase=phase,
                group=name,
            )
        )

    def _send(self, number: int, device: int, after: list[int], phase: str) -> None:
        """A tensor to a device, or its gradient from there."""
        tensor, devices = self.problem.tensors[number], self.problem.devices
        ends = (self.placement.device[tensor.producer], device)
        source, target = ends if phase == "send" else ends[::-1]
        self.tasks.append(
            Task(
                name=tensor.name,
                duration_s=devices.transfer_s(tensor.bytes, source, target),
                resources=devices.lanes_of(source, target),
                after=tuple(dict.fromkeys(after)),
                phase=phase,
                group=self.problem.names[tensor.producer],
            )
        )

    # -- memory -----------------------------------------------------------------------------------

    def _stored(self) -> list[Holding]:
        problem, found = self.problem, []
        for operator, device in enumerate(self.placement.device):
            for kind, sizes in zip(
                MEMORY_KINDS[:3],
                (problem.parameter_bytes, problem.gradient_bytes, problem.optimizer_bytes),
                strict=True,
            ):
                if sizes[operator]:
                    found.append((device_name(device), kind, float(sizes[operator])))
        return found

    def _with_memory(self, timeline: Timeline) -> list[Task]:
        """The tasks with what they take and give back, now that it is known which user is the last."""
        problem, place, training = self.problem, self.placement, self.problem.training
        takes: dict[int, list[Holding]] = defaultdict(list)
        gives: dict[int, list[Holding]] = defaultdict(list)
        rank = {i: position for position, i in enumerate(timeline.order)}

        def hold(device: int, kind: str, size: float, first: int, users: list[int]) -> None:
            if size:
                holding = (device_name(device), kind, float(size))
                takes[first].append(holding)
                # By the end in time; among tasks that end together by the order in which they ran.
                last = max([first, *users], key=lambda i: (timeline.events[i].end_s, rank[i]))
                gives[last].append(holding)

        for operator, device in enumerate(place.device):
            forward, backward = self.forward[operator], self.backward.get(operator)
            hold(device, "transient", problem.forward_peak_bytes[operator], forward, [])
            if backward is not None:
                hold(device, "transient", problem.backward_peak_bytes[operator], backward, [])
                hold(device, "kept", problem.kept_bytes[operator], forward, [backward])
        for number, tensor in enumerate(problem.tensors):
            for device in (place.device[tensor.producer], *self.copies[number]):
                users = self._users(number, device)
                kept = [
                    self.backward[o] for o in tensor.kept_by if place.device[o] == device and self.backward
                ]
                first = self.arrival.get((number, device), self.forward[tensor.producer])
                # A whole parameter that its own device reads is stored already.
                size = 0 if tensor.stored and device == place.device[tensor.producer] else tensor.bytes
                hold(device, "kept" if kept else "transient", size, first, [*users, *kept])
                if training and tensor.gradient:
                    for contribution, end in self._gradients(number, device, rank):
                        hold(device, "transient", tensor.bytes, contribution, end)
        for task, holding in self.updates.items():
            takes[task].append(holding)
            gives[task].append(holding)
        return [
            replace(task, allocates=tuple(takes[i]), frees=tuple(gives[i]))
            for i, task in enumerate(self.tasks)
        ]

    def _users(self, number: int, device: int) -> list[int]:
        """What reads a tensor on a device in forward, sending it on included."""
        tensor, place = self.problem.tensors[number], self.placement
        readers = [self.forward[r] for r in tensor.readers if place.device[r] == device]
        made_there = place.device[tensor.producer] == device
        return readers + ([self.arrival[number, d] for d in self.copies[number]] if made_there else [])

    def _gradients(self, number: int, device: int, rank: dict[int, int]) -> list[tuple[int, list[int]]]:
        """(task that makes a gradient on a device, tasks until which it is there).

        The first contribution becomes the sum; each later one is there while it is made.
        """
        tensor, place = self.problem.tensors[number], self.placement
        made_there = place.device[tensor.producer] == device
        made = [self.backward[r] for r in tensor.readers if place.device[r] == device]
        if made_there:
            made += [self.returned[number, d] for d in self.copies[number]]
        made.sort(key=rank.__getitem__)
        end = self.backward[tensor.producer] if made_there else self.returned[number, device]
        return [(task, [end] if position == 0 else []) for position, task in enumerate(made)]
