"""Devices and links as timetables, for schedules made operator by operator.

:class:`IdleSlots` is one device into whose gaps operators are inserted; :class:`Links` is all links, whose
messages queue. Both only estimate: the judge has the last word.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import DeviceSet, PlacementProblem

Floats = NDArray[np.float64]


class IdleSlots:
    """When a device is idle: disjoint gaps in time, the last one open."""

    def __init__(self, free_from: float = 0.0):
        self._starts = [free_from]
        self._ends = [float("inf")]

    @property
    def tail_s(self) -> float:
        """When the last of its work ends."""
        return self._starts[-1]

    def earliest(self, ready: float, duration: float) -> float:
        """The earliest start at which so long a task is not interrupted."""
        for gap in range(bisect_left(self._ends, ready), len(self._ends)):
            start = max(ready, self._starts[gap])
            if start + duration <= self._ends[gap]:
                return start
        raise AssertionError("the last gap is open")

    def book(self, start: float, duration: float) -> None:
        """Take a time that :meth:`earliest` gave."""
        if duration <= 0:
            return
        end = start + duration
        gap = bisect_right(self._starts, start) - 1
        before, after = self._starts[gap], self._ends[gap]
        starts = ([before] if before < start else []) + ([end] if end < after else [])
        ends = ([start] if before < start else []) + ([after] if end < after else [])
        self._starts[gap : gap + 1] = starts
        self._ends[gap : gap + 1] = ends


class Links:
    """When messages can be sent: each occupies its lanes, and those that share a lane queue."""

    def __init__(self, devices: DeviceSet):
        self.devices = devices
        count = devices.count
        pairs = {(i, j): devices.lanes_of(i, j) for i in range(count) for j in range(count) if i != j}
        number = {
            lane: i for i, lane in enumerate(dict.fromkeys(x for lanes in pairs.values() for x in lanes))
        }
        most = max((len(lanes) for lanes in pairs.values()), default=0)
        self._never = len(number)
        """A lane that is always free, where a pair has fewer lanes than others."""
        self._lanes = np.full((count, count, max(most, 1)), self._never)
        for (i, j), lanes in pairs.items():
            self._lanes[i, j, : len(lanes)] = [number[lane] for lane in lanes]
        self._free = np.zeros(len(number) + 1)
        self.version = 0
        """Grows with every message."""

    @cached_property
    def _shared(self) -> NDArray[np.bool_]:
        """(source, other source, target): whether messages from two devices to a third share a lane."""
        lanes = self._lanes
        found = np.zeros((len(lanes),) * 3, bool)
        for a in range(lanes.shape[2]):
            for b in range(lanes.shape[2]):
                found |= (lanes[:, None, :, a] == lanes[None, :, :, b]) & (
                    lanes[:, None, :, a] != self._never
                )
        return found

    def send(self, num_bytes: float, source: int, target: int, ready: float) -> float:
        """Book a message at the end of its queues; when it arrives."""
        lanes = self._lanes[source, target]
        start = max(ready, float(self._free[lanes].max()))
        end = start + self.devices.transfer_s(num_bytes, source, target)
        self._free[lanes] = end
        self._free[self._never] = 0.0
        self.version += 1
        return end

    def arrivals(self, messages: Sequence[tuple[float, int, float]], known: Sequence[Floats]) -> Floats:
        """(devices,) when the last of some tensors would be there, were they sent now, in this order.

        Args:
            messages: (when it is made, where, bytes).
            known: per message (devices,) its arrival where it was sent already, else NaN.
        """
        latest = np.zeros(self.devices.count)
        free: Floats | None = None
        for (made, home, num_bytes), there in zip(messages, known, strict=True):
            if free is None:
                free = self._free[self._lanes].max(axis=2)
            start = np.maximum(made, free[home])
            end = start + (self.devices.latency_s[home] + num_bytes * self.devices.seconds_per_byte[home])
            end[home] = made
            sent = np.isnan(there)
            latest = np.maximum(latest, np.where(sent, end, there))
            if len(messages) > 1:
                free = np.where(self._shared[home] & sent, np.maximum(free, end), free)
        return latest


def backward_starts(
    problem: PlacementProblem, device: Sequence[int], ready_s: Sequence[float]
) -> list[float]:
    """Starts of backward where devices are given: whatever is ready first runs first, the last made before.

    What a framework's ready queue does, and an earliest task first schedule without choice of devices.

    Args:
        ready_s: per device when its forward is done; its backward starts then.
    """
    return _Backward(problem, device, ready_s).run()


class _Backward:
    """Events in time: an operator ends and sends, a device looks for something to do."""

    def __init__(self, problem: PlacementProblem, device: Sequence[int], ready_s: Sequence[float]):
        self.problem = problem
        self.device = device
        self.links = Links(problem.devices)
        self.free = list(ready_s)
        self.starts = [0.0] * problem.size
        self.ready = [0.0] * problem.size
        self.waiting = [0] * problem.size
        """Per operator how many readers and messages it waits for."""
        self.unread: dict[tuple[int, int], int] = defaultdict(int)
        """(tensor, device) -> how many readers there have still to add to its gradient."""
        self.found: list[list[int]] = [[] for _ in ready_s]
        """Per device what could run, the last made first."""
        self.events: list[tuple[float, int, int, int]] = []
        """(time, 0: an operator ends; 1: an operator is ready; 2: a device is free, which)."""

    def run(self) -> list[float]:
        problem, device = self.problem, self.device
        for number, tensor in enumerate(problem.tensors):
            if tensor.gradient:
                home = device[tensor.producer]
                for reader in tensor.readers:
                    self.unread[number, device[reader]] += 1
                self.waiting[tensor.producer] += len({device[r] for r in tensor.readers})
        for operator in range(problem.size):
            if not self.waiting[operator]:
                heapq.heappush(self.events, (self.free[device[operator]], 1, -operator, operator))
        while self.events:
            now, kind, _, which = heapq.heappop(self.events)
            if kind == 0:
                self._end(which, now)
            elif kind == 1:
                home = device[which]
                heapq.heappush(self.found[home], -which)
                heapq.heappush(self.events, (max(now, self.free[home]), 2, home, home))
            elif self.found[which] and self.free[which] <= now:
                operator = -heapq.heappop(self.found[which])
                self.starts[operator] = now
                end = now + float(problem.backward_s[operator, which])
                self.free[which] = end
                heapq.heappush(self.events, (end, 0, -operator, operator))
                heapq.heappush(self.events, (end, 2, which, which))
        return self.starts

    def _end(self, operator: int, now: float) -> None:
        here = self.device[operator]
        for number in self.problem.read[operator]:
            tensor = self.problem.tensors[number]
            if not tensor.gradient:
                continue
            self.unread[number, here] -= 1
            if self.unread[number, here]:
                continue
            producer, home = tensor.producer, self.device[tensor.producer]
            there = now if home == here else self.links.send(tensor.bytes, here, home, now)
            self.ready[producer] = max(self.ready[producer], there)
            self.waiting[producer] -= 1
            if not self.waiting[producer]:
                at = max(self.ready[producer], self.free[home])
                heapq.heappush(self.events, (at, 1, -producer, producer))
