"""Devices and links as timetables, for schedules made operator by operator.

:class:`IdleSlots` is one device into whose gaps operators are inserted; :class:`Links` is all links, whose
messages queue. Both only estimate: the simulator has the last word.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import DeviceSet
from tensoropt.types import Floats


class IdleSlots:
    """The times when a device is idle: disjoint gaps, the last one open."""

    def __init__(self, free_from: float = 0.0):
        self._starts = [free_from]
        self._ends = [float("inf")]

    @property
    def tail_s(self) -> float:
        """The time when its last work ends."""
        return self._starts[-1]

    def earliest(self, ready: float, duration: float) -> float:
        """Return the earliest start at which a task of this duration is not interrupted."""
        # A gap that ends before the task is ready is of no use, and gaps are in order of time.
        for gap in range(bisect_left(self._ends, ready), len(self._ends)):
            start = max(ready, self._starts[gap])
            if start + duration <= self._ends[gap]:
                return start
        raise AssertionError("the last gap is open")

    def book(self, start: float, duration: float) -> None:
        """Occupy a time that :meth:`earliest` gave."""
        # There is nothing to occupy, and an empty interval would cut a gap in two.
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
    """The times when messages can be sent: each occupies its lanes, and messages that share a lane queue."""

    def __init__(self, devices: DeviceSet):
        self.devices = devices
        count = devices.count
        pairs = {(i, j): devices.lanes_of(i, j) for i in range(count) for j in range(count) if i != j}
        number = {
            lane: i for i, lane in enumerate(dict.fromkeys(x for lanes in pairs.values() for x in lanes))
        }
        most = max((len(lanes) for lanes in pairs.values()), default=0)
        self._never = len(number)
        """A lane that is always free, for pairs with fewer lanes than others."""
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
        """Book a message at the end of its queues; return when it arrives."""
        lanes = self._lanes[source, target]
        start = max(ready, float(self._free[lanes].max()))
        end = start + self.devices.transfer_s(num_bytes, source, target)
        self._free[lanes] = end
        self._free[self._never] = 0.0  # pairs with fewer lanes than others name it too
        self.version += 1
        return end

    def arrivals(self, messages: Sequence[tuple[float, int, float]], known: Sequence[Floats]) -> Floats:
        """Return (devices,) when the last of some tensors would arrive if they were sent now, in this order.

        Args:
            messages: (when the tensor is made, where, bytes) of each.
            known: for each message, (devices,) its arrival where it was already sent, otherwise NaN.
        """
        latest = np.zeros(self.devices.count)
        free: Floats | None = None
        for (made, source, num_bytes), there in zip(messages, known, strict=True):
            # The lanes of a pair are free when the last of them is.
            if free is None:
                free = self._free[self._lanes].max(axis=2)
            start = np.maximum(made, free[source])
            end = start + (self.devices.latency_s[source] + num_bytes * self.devices.seconds_per_byte[source])
            # On its own device it is there as soon as it is made.
            end[source] = made
            sent = np.isnan(there)
            latest = np.maximum(latest, np.where(sent, end, there))
            # Messages to one device queue behind each other too, where they share a lane.
            if len(messages) > 1:
                free = np.where(self._shared[source] & sent, np.maximum(free, end), free)
        return latest
