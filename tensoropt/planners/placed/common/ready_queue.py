"""Backward on given devices: whatever is ready first runs first, as in a framework's ready queue."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common.answer import orders_by_start
from tensoropt.planners.placed.common.earliest import ForwardSchedule
from tensoropt.planners.placed.common.timetable import Links


def backward_starts(
    problem: PlacementProblem, device: Sequence[int], ready_s: Sequence[float]
) -> list[float]:
    """Return the starts of backward on given devices: whatever is ready first runs first; of several, the
    last made.

    A framework's ready queue does this, and so does earliest task first when devices are given.

    Args:
        ready_s: when the forward of each device is done; its backward starts then.
    """
    return _ReadyQueue(problem, device, ready_s).schedule()


class _Event(IntEnum):
    """The kinds of events; of events at the same moment, the kind listed first happens first."""

    OPERATOR_ENDS = 0
    OPERATOR_READY = 1
    DEVICE_FREE = 2


class _ReadyQueue:
    """Events over time: an operator ends and sends, a device looks for something to do."""

    def __init__(self, problem: PlacementProblem, device: Sequence[int], ready_s: Sequence[float]):
        self.problem = problem
        self.device = device
        self.links = Links(problem.devices)
        self.free = list(ready_s)
        self.starts = [0.0] * problem.size
        self.ready = [0.0] * problem.size
        self.waiting = [0] * problem.size
        """How many readers and messages each operator waits for."""
        self.unread: dict[tuple[int, int], int] = defaultdict(int)
        """(tensor, device) -> how many readers there still have to add to its gradient."""
        self.found: list[list[int]] = [[] for _ in ready_s]
        """What could run on each device, the last made first."""
        self.events: list[tuple[float, _Event, int, int]] = []
        """A heap of (time, what happens, priority among equals, which operator or device)."""

    def schedule(self) -> list[float]:
        problem, device = self.problem, self.device
        for number, tensor in enumerate(problem.tensors):
            if tensor.gradient:
                for reader in tensor.readers:
                    self.unread[number, device[reader]] += 1
                self.waiting[tensor.producer] += len({device[r] for r in tensor.readers})
        for operator in range(problem.size):
            if not self.waiting[operator]:
                heapq.heappush(
                    self.events, (self.free[device[operator]], _Event.OPERATOR_READY, -operator, operator)
                )
        while self.events:
            now, event, _, which = heapq.heappop(self.events)
            if event == _Event.OPERATOR_ENDS:
                self._end(which, now)
            elif event == _Event.OPERATOR_READY:
                where = device[which]
                # Not started at once: others may become ready at the same moment, and the last made of them
                # goes first.
                heapq.heappush(self.found[where], -which)
                heapq.heappush(self.events, (max(now, self.free[where]), _Event.DEVICE_FREE, where, where))
            # A device is called free once for every operator that may run on it; calls while it is busy are
            # void.
            elif self.found[which] and self.free[which] <= now:
                operator = -heapq.heappop(self.found[which])
                self.starts[operator] = now
                end = now + float(problem.backward_s[operator, which])
                self.free[which] = end
                heapq.heappush(self.events, (end, _Event.OPERATOR_ENDS, -operator, operator))
                heapq.heappush(self.events, (end, _Event.DEVICE_FREE, which, which))
        return self.starts

    def _end(self, operator: int, now: float) -> None:
        device = self.device[operator]
        for number in self.problem.read[operator]:
            tensor = self.problem.tensors[number]
            if not tensor.gradient:
                continue
            # Gradients of all readers on one device add up there and are sent once, as in the simulator.
            self.unread[number, device] -= 1
            if self.unread[number, device]:
                continue
            producer, source = tensor.producer, self.device[tensor.producer]
            there = now if source == device else self.links.send(tensor.bytes, device, source, now)
            self.ready[producer] = max(self.ready[producer], there)
            self.waiting[producer] -= 1
            if not self.waiting[producer]:
                at = max(self.ready[producer], self.free[source])
                heapq.heappush(self.events, (at, _Event.OPERATOR_READY, -producer, producer))


def with_backward(problem: PlacementProblem, forward: ForwardSchedule) -> Placement:
    """Return the placement of a forward schedule, with backward on the devices of its forward, run as it
    becomes ready."""
    device, count = forward.device, problem.devices.count
    backward = None
    if problem.training:
        starts = backward_starts(problem, device, forward.free_s)
        backward = orders_by_start(device, starts, count, backward=True)
    return Placement(device, orders_by_start(device, forward.starts, count), backward)
