"""DPOS: put the critical path on the fastest devices, all others where they finish first, in idle slots.

X. Yi et al., *Fast Training of Deep Learning Models over Multiple GPUs* (FastT), Middleware 2020, section
5.1, algorithm 1. Its line 20 assigns the earliest *start* to FT; the finish is meant, as equation EFT says.

FastT places forward and backward operators in the same way, and keeps colocated operators together. Here,
too, ranks and the critical path are those of the whole step. Forward operators choose devices in the order of
their ranks. Then backward operators are scheduled in the order of their ranks, on the devices of their
forward. A device starts backward after its whole forward. As in the paper (equation EST), messages do not
queue; in the simulation they do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common import units
from tensoropt.planners.placed.common.task_ranks import ranks_of
from tensoropt.types import Floats


class DposSchedule(NamedTuple):
    """The result of algorithm 1 (DPOS).

    Attributes:
        finish_s: the algorithm's own estimate of the step in seconds, FT(o_exit).
    """

    placement: Placement
    finish_s: float


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> units.PlacedAnswer:
    """Run algorithm 1 with lower and lower memory caps until its placement fits when simulated.

    Raises:
        InfeasibleError: an operator has no room on any device when its turn comes.
    """
    return units.place_within_memory(
        "dpos", problem, memory_limit_bytes, lambda memory: schedule_by_ranks(problem, memory).placement
    )


def schedule_by_ranks(problem: PlacementProblem, memory: units.MemoryBook) -> DposSchedule:
    """Run algorithm 1 under the caps of ``memory``.

    Raises:
        NoRoomError: an operator fits on no device.
    """
    return _DposScheduler(problem, memory).schedule()


class _IdleSlots:
    """The idle times of a device: disjoint intervals, the last one without an end."""

    def __init__(self, free_from: float):
        self._gaps = [(free_from, float("inf"))]

    @property
    def tail_s(self) -> float:
        """The time in seconds at which the device's last work ends."""
        return self._gaps[-1][0]

    def earliest(self, ready: float, duration: float) -> float:
        """Return the earliest time from ``ready`` on at which the device is idle for ``duration`` seconds."""
        # A gap that ends before the task is ready is of no use, and gaps are in order of time.
        gaps = islice(self._gaps, bisect_left(self._gaps, ready, key=itemgetter(1)), None)
        starts = ((max(ready, begin), end) for begin, end in gaps)
        return next(start for start, end in starts if start + duration <= end)

    def book(self, start: float, duration: float) -> None:
        # There is nothing to occupy, and an empty interval would cut a gap in two.
        if duration > 0:
            gap = bisect_right(self._gaps, start, key=itemgetter(0)) - 1
            before, after = self._gaps[gap]
            left = (before, start), (start + duration, after)
            self._gaps[gap : gap + 1] = [(begin, end) for begin, end in left if begin < end]


class _DposScheduler:
    def __init__(self, problem: PlacementProblem, memory: units.MemoryBook):
        self.problem, self.units, self.memory = problem, memory.units, memory
        self.ranks = ranks_of(problem, self.units)
        self.device = [-1] * problem.size
        self.starts = [0.0] * problem.size
        self.ends = [0.0] * problem.size
        self.slots = [_IdleSlots(0.0) for _ in range(problem.devices.count)]
        self.path = list(self.ranks.path)
        """The operators of the critical path that are not placed yet."""
        self.on_path = set(self.path)
        self.critical = -1
        """The current critical-path device."""

    def schedule(self) -> DposSchedule:
        problem = self.problem
        # A producer's rank is never below its reader's; ties keep the model's order.
        for operator in np.lexsort((np.arange(problem.size), -self.ranks.forward)):
            self._place(int(operator))
        starts, ends = self._backward() if problem.training else (None, self.ends)
        placement = Placement.by_start(self.device, problem.devices.count, self.starts, starts)
        finish_s, updates_s = np.zeros((2, problem.devices.count))
        np.maximum.at(finish_s, self.device, ends)
        np.add.at(updates_s, self.device, problem.update_s[range(problem.size), self.device])
        return DposSchedule(placement, float((finish_s + updates_s).max()))

    # -- forward ----------------------------------------------------------------------------------

    def _place(self, operator: int) -> None:
        ready = self._ready(operator)
        device = self._required_device(operator)
        if device < 0:
            device = self._soonest(operator, ready)
        seconds = float(self.problem.forward_s[operator, device])
        start = self.slots[device].earliest(float(ready[device]), seconds)
        self.slots[device].book(start, seconds)
        self.device[operator], self.starts[operator], self.ends[operator] = device, start, start + seconds
        unit = self.units.of[operator]
        if self.memory.device[unit] < 0:
            self.memory.book(unit, device)

    def _required_device(self, operator: int) -> int:
        unit = self.units.of[operator]
        # Placed operators leave the path, also where their unit decides for them, since line 5 counts what
        # remains.
        if operator in self.on_path:
            self.path.remove(operator)
        if self.memory.device[unit] >= 0:
            return self.memory.device[unit]
        if operator not in self.on_path:
            return -1
        if self.critical < 0 or not self.memory.room(unit)[self.critical]:
            self.critical = self._critical_device(operator)
        return self.critical if self.units.allowed[unit, self.critical] else -1

    def _critical_device(self, operator: int) -> int:
        """Return the device on which the remaining critical-path operators that fit take the least mean time
        (line 5).

        "For each available device, we simulate placing as many remaining operations on the critical path as
        possible onto the device (within its memory capacity), and compute the average execution time"
        (section 5.1). Ties go to the device that takes more operators, then to the first device.
        """
        seconds = self.problem.forward_s + self.problem.backward_s
        best, chosen = (float("inf"), 0), -1
        for device in range(self.problem.devices.count):
            simulated = self.memory.copy()
            times: list[float] = []
            units_on_device: set[int] = set()
            for member in (operator, *self.path):
                unit = self.units.of[member]
                if self.memory.device[unit] >= 0 or not self.units.allowed[unit, device]:
                    continue
                if unit not in units_on_device:
                    # In the order of the path, and no further than the first that does not fit.
                    if not simulated.room(unit)[device]:
                        break
                    units_on_device.add(unit)
                    simulated.book(unit, device)
                times.append(float(seconds[member, device]))
            if times and (float(np.mean(times)), -len(times)) < best:
                best, chosen = (float(np.mean(times)), -len(times)), device
        if chosen < 0:
            raise units.NoRoomError(self.units.of[operator])
        return chosen

    def _ready(self, operator: int) -> Floats:
        """Return (devices,) the time when an operator's inputs reach each device (EST's inner maximum)."""
        devices = self.problem.devices
        ready = np.zeros(devices.count)
        for number in self.problem.read[operator]:
            tensor = self.problem.tensors[number]
            source, end = self.device[tensor.producer], self.ends[tensor.producer]
            arrival = end + (devices.latency_s[source] + tensor.bytes * devices.seconds_per_byte[source])
            arrival[source] = end
            np.maximum(ready, arrival, out=ready)
        return ready

    def _soonest(self, operator: int, ready: Floats) -> int:
        """Return the device with room on which an operator finishes first (arg min EFT, lines 12 to 19); ties
        go to the first device."""
        unit = self.units.of[operator]
        permitted = self.units.allowed[unit] & self.memory.room(unit)
        if not permitted.any():
            raise units.NoRoomError(unit)
        seconds = self.problem.forward_s[operator].tolist()
        finish = {
            d: self.slots[d].earliest(float(ready[d]), seconds[d]) + seconds[d]
            for d in np.flatnonzero(permitted).tolist()
        }
        return min(finish, key=finish.__getitem__)

    # -- backward ---------------------------------------------------------------------------------

    def _backward(self) -> tuple[list[float], list[float]]:
        problem = self.problem
        # No backward before the device's forward is done, so its idle slots in forward are of no use.
        slots = [_IdleSlots(s.tail_s) for s in self.slots]
        starts, ends = [0.0] * problem.size, [0.0] * problem.size
        order: Sequence[int] = np.lexsort((-np.arange(problem.size), -self.ranks.backward)).tolist()
        for operator in order:
            device, ready = self.device[operator], self.ends[operator]
            for number in problem.made[operator]:
                tensor = problem.tensors[number]
                if tensor.gradient:
                    for reader in tensor.readers:
                        reader_device = self.device[reader]
                        sent = problem.devices.transfer_s(tensor.bytes, reader_device, device)
                        ready = max(ready, ends[reader] + sent)
            seconds = float(problem.backward_s[operator, device])
            starts[operator] = slots[device].earliest(ready, seconds)
            slots[device].book(starts[operator], seconds)
            ends[operator] = starts[operator] + seconds
        return starts, ends
