"""Earliest task first: repeatedly choose, of all ready operators and devices, the pair that can start first.

J.-J. Hwang et al., *Scheduling precedence graphs in systems with interprocessor communication times*, SIAM
J. Comput. 18(2), 1989 (ETF), under Baechi's memory caps (B. Jeon et al., SoCC 2020, section 3.1, m-ETF): a
pair whose device lacks room for the operator is not considered. As in Baechi, only forward operators choose
devices and backward stays with its forward; a tensor is sent to a device once; messages queue on their links.

Devices and links are timetables, for schedules made operator by operator.

:class:`IdleSlots` is one device into whose gaps operators are inserted; :class:`Links` is all links, whose
messages queue. Both only estimate: the simulator has the last word.

Backward runs on given devices: the operator that is ready first runs first, as in a framework's ready queue.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import DeviceSet, Placement, PlacementProblem
from tensoropt.planners.placed.common.units import MemoryBook, NoRoomError, Units, orders_by_start
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
        """Whether messages from two devices to a third share a lane, by (source, other source, target)."""
        lanes = self._lanes
        shared = np.zeros((len(lanes),) * 3, bool)
        for a in range(lanes.shape[2]):
            for b in range(lanes.shape[2]):
                shared |= (lanes[:, None, :, a] == lanes[None, :, :, b]) & (
                    lanes[:, None, :, a] != self._never
                )
        return shared

    def send(self, num_bytes: float, source: int, target: int, ready: float) -> float:
        """Book a message at the end of its queues; return when it arrives."""
        lanes = self._lanes[source, target]
        start = max(ready, float(self._free[lanes].max()))
        end = start + self.devices.transfer_s(num_bytes, source, target)
        self._free[lanes] = end
        self._free[self._never] = 0.0  # pairs with fewer lanes than others name it too
        self.version += 1
        return end

    def arrivals(self, messages: Sequence[tuple[float, int, float]], sent_s: Sequence[Floats]) -> Floats:
        """Return the times at which the last of some tensors would arrive at each device, (devices,), if they
        were sent now, in this order.

        Args:
            messages: (time when the tensor is made, its device, its bytes) of each.
            sent_s: for each message, (devices,) its arrival where it was already sent, otherwise NaN.
        """
        latest = np.zeros(self.devices.count)
        free: Floats | None = None
        for (made, source, num_bytes), earlier in zip(messages, sent_s, strict=True):
            # The lanes of a pair are free when the last of them is.
            if free is None:
                free = self._free[self._lanes].max(axis=2)
            start = np.maximum(made, free[source])
            end = start + (self.devices.latency_s[source] + num_bytes * self.devices.seconds_per_byte[source])
            # On its own device it is there as soon as it is made.
            end[source] = made
            sent = np.isnan(earlier)
            latest = np.maximum(latest, np.where(sent, end, earlier))
            # Messages to one device queue behind each other too, where they share a lane.
            if len(messages) > 1:
                free = np.where(self._shared[source] & sent, np.maximum(free, end), free)
        return latest


@dataclass(frozen=True)
class ForwardSchedule:
    """The devices and starts of all forward operators.

    Attributes:
        free_s: the time when the last operator of each device ends.
    """

    device: tuple[int, ...]
    starts: tuple[float, ...]
    free_s: tuple[float, ...]


def earliest_first(
    problem: PlacementProblem, units: Units, memory: MemoryBook, favourite: Sequence[int] | None = None
) -> ForwardSchedule:
    """Schedule forward. Ties go to the operator made first, then to the first device.

    Args:
        favourite: the favourite child of each operator or -1, for SCT (see ``m_sct.py``); None for ETF.

    Raises:
        NoRoomError: no ready operator fits on any device.
    """
    return _EarliestFirst(problem, units, memory, favourite).schedule()


class _EarliestFirst:
    """The state between two choices. In matrices rows are ready operators and columns are devices.

    Arrivals only ever get later as messages queue, so those computed before are lower bounds: a choice is
    made by them, and they are computed anew for the chosen operator until the choice stays the same.
    """

    def __init__(
        self, problem: PlacementProblem, units: Units, memory: MemoryBook, favourite: Sequence[int] | None
    ):
        count = problem.devices.count
        self.problem, self.units, self.memory, self.favourite = problem, units, memory, favourite
        self.links = Links(problem.devices)
        self.device = [-1] * problem.size
        self.starts = [0.0] * problem.size
        self.ends = [0.0] * problem.size
        self.unit_device = [-1] * len(units.members)
        self.there: dict[int, Floats] = {}
        """(devices,) when each tensor that was sent arrived; NaN where it was not sent."""
        self.free = np.zeros(count)
        self.now = 0.0
        self.last = [-1] * count
        """The operator that ran last on each device."""
        self.waiting = [len({problem.tensors[t].producer for t in read}) for read in problem.read]
        self.readers = [
            sorted({r for t in made for r in problem.tensors[t].readers}) for made in problem.made
        ]
        # Columns start with 16 rows, an assumption, and are doubled when full.
        self.ready = np.empty(16, dtype=np.intp)
        """The operator of each row."""
        self.rows: dict[int, int] = {}
        self.arrival = np.empty((16, count))
        self.open = np.empty((16, count), dtype=bool)
        """The devices that it may lie on, memory aside."""
        self.size = np.empty((16, 2))
        """The bytes it would book: for the whole step, and as its largest transient."""
        self.seen = np.empty(16, dtype=np.int64)
        """The state of the links for which its arrivals were computed."""

    def schedule(self) -> ForwardSchedule:
        for operator in range(self.problem.size):
            if not self.waiting[operator]:
                self._enter(operator)
        for _ in range(self.problem.size):
            operator, device, start = self._choose()
            self._leave(operator)
            self._start(operator, device, start)
            for reader in self.readers[operator]:
                self.waiting[reader] -= 1
                if not self.waiting[reader]:
                    self._enter(reader)
        return ForwardSchedule(tuple(self.device), tuple(self.starts), tuple(float(f) for f in self.free))

    # -- choosing ---------------------------------------------------------------------------------

    def _choose(self) -> tuple[int, int, float]:
        """Return (operator, device, start) of the earliest start."""
        while True:
            starts = self._starts()
            earliest = float(starts.min())
            if earliest == float("inf"):
                raise NoRoomError(self.units.of[int(self.ready[: len(starts)].min())])
            rows, devices = np.nonzero(starts == earliest)
            best = np.lexsort((devices, self.ready[rows]))[0]
            row, device = int(rows[best]), int(devices[best])
            # Arrivals of the chosen row were a lower bound; if they grew, another pair may start earlier.
            if not self._refresh(row):
                return int(self.ready[row]), device, earliest

    def _starts(self) -> Floats:
        """Return the earliest permitted starts, (ready, devices); inf where there is none."""
        count = len(self.rows)
        permitted = self.open[:count]
        if not self.memory.unlimited:
            permitted = permitted & self.memory.rooms(self.size[:count, :1], self.size[:count, 1:])
        starts = np.where(permitted, np.maximum(self.arrival[:count], self.free), np.inf)
        if self.favourite is not None:
            self._keep_awake(starts, permitted, self.favourite)
        return starts

    def _keep_awake(self, starts: Floats, permitted: NDArray[np.bool_], favourite: Sequence[int]) -> None:
        """Apply SCT's rule (Baechi, section 3.1): a device whose last operator's favourite child is still to
        come is awake for it. It takes that child, or an urgent operator: one whose inputs could be on any
        device by then, so that waiting elsewhere gains it nothing. It is free when another device starts the
        child earlier, or when it has no room for the child."""
        count = len(starts)
        # When the inputs could be on any permitted device: the latest of the arrivals.
        waits = np.where(permitted, self.arrival[:count], -np.inf).max(axis=1)
        for device, last in enumerate(self.last):
            child = favourite[last] if last >= 0 else -1
            if child < 0 or self.device[child] >= 0 or not self._fits(child, device):
                continue
            row = self.rows.get(child)
            if row is not None:
                if self._refresh(row):
                    starts[row] = np.where(permitted[row], np.maximum(self.arrival[row], self.free), np.inf)
                if starts[row, device] > starts[row].min():
                    continue
            other_rows = np.arange(count) != (-1 if row is None else row)
            starts[other_rows, device] = np.maximum(starts[other_rows, device], waits[other_rows])
        # A device that was awake may be free again, but time does not go back: nothing starts before what was
        # started last.
        np.maximum(starts, self.now, out=starts)

    def _fits(self, operator: int, device: int) -> bool:
        unit = self.units.of[operator]
        if self.unit_device[unit] >= 0:
            return self.unit_device[unit] == device
        return bool(self.units.allowed[unit, device] and self.memory.room(self.units, unit)[device])

    # -- what is ready ----------------------------------------------------------------------------

    def _enter(self, operator: int) -> None:
        row = len(self.rows)
        if row == len(self.size):
            self.ready = np.resize(self.ready, 2 * row)
            self.arrival = np.resize(self.arrival, (2 * row, self.arrival.shape[1]))
            self.open = np.resize(self.open, (2 * row, self.open.shape[1]))
            self.size = np.resize(self.size, (2 * row, 2))
            self.seen = np.resize(self.seen, 2 * row)
        self.ready[row] = operator
        self.rows[operator] = row
        self.seen[row] = -1
        self._refresh(row)
        self._restrict(row)

    def _leave(self, operator: int) -> None:
        row, last = self.rows.pop(operator), len(self.rows)
        # The last row takes the free place, so that the first ``len(self.rows)`` rows are those in use.
        if row != last:
            for column in (self.ready, self.arrival, self.open, self.size, self.seen):
                column[row] = column[last]
            self.rows[int(self.ready[row])] = row

    def _refresh(self, row: int) -> bool:
        """Recompute a row's arrivals; return whether that changed them."""
        if self.seen[row] == self.links.version:
            return False
        fresh = self.seen[row] < 0
        self.seen[row] = self.links.version
        _, messages, already_sent = self._inputs(int(self.ready[row]))
        arrivals = self.links.arrivals(messages, already_sent)
        if not fresh and (arrivals == self.arrival[row]).all():
            return False
        self.arrival[row] = arrivals
        return True

    def _inputs(self, operator: int) -> tuple[list[int], list[tuple[float, int, float]], list[Floats]]:
        """Return the tensors that an operator reads, in the order in which they are made; (time, device,
        bytes) of each; and the devices where each already is.
        """
        tensors = self.problem.tensors
        order = sorted((self.ends[tensors[t].producer], t) for t in self.problem.read[operator])
        messages = [(end, self.device[tensors[t].producer], float(tensors[t].bytes)) for end, t in order]
        nowhere = np.full(self.problem.devices.count, np.nan)
        read = [t for _, t in order]
        return read, messages, [self.there.get(t, nowhere) for t in read]

    def _restrict(self, row: int) -> None:
        """Record the devices where the row's operator may lie now, and the bytes that it would book."""
        unit = self.units.of[int(self.ready[row])]
        lies_on = self.unit_device[unit]
        self.open[row] = self.units.allowed[unit]
        self.size[row] = self.units.bytes[unit], self.units.transient_bytes[unit]
        # Its unit was booked with its first member: the operator has to go there, and books nothing more.
        if lies_on >= 0:
            self.open[row] = False
            self.open[row, lies_on] = True
            self.size[row] = 0.0

    def _start(self, operator: int, device: int, start: float) -> None:
        for tensor, (made, source, num_bytes), arrivals in zip(*self._inputs(operator), strict=True):
            if source != device and np.isnan(arrivals[device]):
                arrivals = arrivals.copy()
                arrivals[device] = self.links.send(num_bytes, source, device, made)
                self.there[tensor] = arrivals
        end = start + float(self.problem.forward_s[operator, device])
        self.device[operator], self.starts[operator], self.ends[operator] = device, start, end
        self.free[device] = end
        self.last[device] = operator
        self.now = max(self.now, start)
        unit = self.units.of[operator]
        if self.unit_device[unit] < 0:
            self.unit_device[unit] = device
            self.memory.book(self.units, unit, device)
            for member in self.units.members[unit]:
                if member in self.rows:
                    self._restrict(self.rows[member])


def backward_starts(
    problem: PlacementProblem, device: Sequence[int], ready_s: Sequence[float]
) -> list[float]:
    """Return the starts of backward on given devices: the operator that is ready first runs first; of
    several, the last made.

    A framework's ready queue does this, and so does earliest task first when devices are given.

    Args:
        ready_s: the time when the forward of each device is done; its backward starts then.
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
        """The number of readers and messages that each operator waits for."""
        self.unread: dict[tuple[int, int], int] = defaultdict(int)
        """The readers on a device that have not yet added to a tensor's gradient, by (tensor, device)."""
        self.queues: list[list[int]] = [[] for _ in ready_s]
        """The operators that are ready on each device, the last made first."""
        self.events: list[tuple[float, _Event, int, int]] = []
        """A heap of (time, event, priority among equals, operator or device)."""

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
            time_s, event, _, which = heapq.heappop(self.events)
            if event == _Event.OPERATOR_ENDS:
                self._end(which, time_s)
            elif event == _Event.OPERATOR_READY:
                where = device[which]
                # Not started at once: others may become ready at the same moment, and the last made of them
                # goes first.
                heapq.heappush(self.queues[where], -which)
                heapq.heappush(self.events, (max(time_s, self.free[where]), _Event.DEVICE_FREE, where, where))
            # A device is called free once for every operator that may run on it; calls while it is busy are
            # void.
            elif self.queues[which] and self.free[which] <= time_s:
                operator = -heapq.heappop(self.queues[which])
                self.starts[operator] = time_s
                end = time_s + float(problem.backward_s[operator, which])
                self.free[which] = end
                heapq.heappush(self.events, (end, _Event.OPERATOR_ENDS, -operator, operator))
                heapq.heappush(self.events, (end, _Event.DEVICE_FREE, which, which))
        return self.starts

    def _end(self, operator: int, time_s: float) -> None:
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
            arrival_s = time_s if source == device else self.links.send(tensor.bytes, device, source, time_s)
            self.ready[producer] = max(self.ready[producer], arrival_s)
            self.waiting[producer] -= 1
            if not self.waiting[producer]:
                start_s = max(self.ready[producer], self.free[source])
                heapq.heappush(self.events, (start_s, _Event.OPERATOR_READY, -producer, producer))


def with_backward(problem: PlacementProblem, forward: ForwardSchedule) -> Placement:
    """Return the placement of a forward schedule; backward runs on the devices of its forward, in the order
    in which operators become ready.
    """
    device, count = forward.device, problem.devices.count
    backward = None
    if problem.training:
        starts = backward_starts(problem, device, forward.free_s)
        backward = orders_by_start(device, starts, count, backward=True)
    return Placement(device, orders_by_start(device, forward.starts, count), backward)
