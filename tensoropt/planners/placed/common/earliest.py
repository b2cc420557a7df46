"""Earliest task first: repeatedly choose, of all ready operators and devices, the pair that can start first.

J.-J. Hwang et al., *Scheduling precedence graphs in systems with interprocessor communication times*, SIAM
J. Comput. 18(2), 1989 (ETF), under Baechi's memory caps (B. Jeon et al., SoCC 2020, section 3.1, m-ETF): a
pair whose device lacks room for the operator is not considered. As in Baechi, only forward operators choose
devices and backward stays with its forward; a tensor is sent to a device once; messages queue on their links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.memory import MemoryBook, NoRoomError
from tensoropt.planners.placed.common.timetable import Links
from tensoropt.planners.placed.common.units import Units
from tensoropt.types import Floats


@dataclass(frozen=True)
class ForwardSchedule:
    """The devices and starts of all forward operators.

    Attributes:
        free_s: when the last operator of each device ends.
    """

    device: tuple[int, ...]
    starts: tuple[float, ...]
    free_s: tuple[float, ...]


def earliest_first(
    problem: PlacementProblem, units: Units, memory: MemoryBook, favourite: Sequence[int] | None = None
) -> ForwardSchedule:
    """Schedule forward. Ties go to the operator made first, then to the first device.

    Args:
        favourite: the favourite child of each operator or -1, for SCT (see :mod:`.m_sct`); None for ETF.

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
        """Return (ready, devices) the earliest permitted starts, inf where there is none."""
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
            others = np.arange(count) != (-1 if row is None else row)
            starts[others, device] = np.maximum(starts[others, device], waits[others])
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
        _, messages, known = self._inputs(int(self.ready[row]))
        arrivals = self.links.arrivals(messages, known)
        if not fresh and (arrivals == self.arrival[row]).all():
            return False
        self.arrival[row] = arrivals
        return True

    def _inputs(self, operator: int) -> tuple[list[int], list[tuple[float, int, float]], list[Floats]]:
        """Return the tensors that an operator reads, in the order in which they are made; (when, where,
        bytes) of each; and where each already is."""
        tensors = self.problem.tensors
        order = sorted((self.ends[tensors[t].producer], t) for t in self.problem.read[operator])
        messages = [(end, self.device[tensors[t].producer], float(tensors[t].bytes)) for end, t in order]
        nowhere = np.full(self.problem.devices.count, np.nan)
        read = [t for _, t in order]
        return read, messages, [self.there.get(t, nowhere) for t in read]

    def _restrict(self, row: int) -> None:
        """Set where the row's operator may lie now, and what it would book."""
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
        for tensor, (made, source, num_bytes), there in zip(*self._inputs(operator), strict=True):
            if source != device and np.isnan(there[device]):
                there = there.copy()
                there[device] = self.links.send(num_bytes, source, device, made)
                self.there[tensor] = there
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
