"""Earliest task first: repeatedly choose the ready operator and the device that can start first.

J.-J. Hwang et al., *Scheduling precedence graphs in systems with interprocessor communication times*, SIAM J.
Comput. 18(2), 1989 (ETF), under Baechi's memory caps (B. Jeon et al., SoCC 2020, section 3.1, m-ETF): a
device without room for an operator is no choice for it. As in Baechi, only forward operators choose devices,
and backward runs on the same devices, here in the opposite order. A tensor is sent to a device once, and
messages queue on the links' lanes. Times are estimates; the simulator determines the final ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common.units import MemoryBook, NoRoomError
from tensoropt.types import Flags, Floats


class EarliestFirst:
    """A scheduler of forward by earliest start. Ties go to the first operator, then to the first device.

    Matrices have a row for each operator and a column for each device. As messages queue, inputs can only
    arrive later than computed before, so earlier results are lower bounds. An operator and a device are
    chosen by these bounds. If the operator's arrivals, computed anew, have changed, the choice is repeated.

    Args:
        favourite: for SCT, each operator's favourite child (the reader to run next on its device) or -1; None
            for ETF.
    """

    def __init__(self, problem: PlacementProblem, memory: MemoryBook, favourite: Sequence[int] | None = None):
        size, count, units = problem.size, problem.devices.count, memory.units
        self.problem, self.units, self.memory, self.favourite = problem, units, memory, favourite
        self.device = [-1] * size
        self.starts = [0.0] * size
        self.ends = [0.0] * size
        self.lanes: dict[str, float] = {}
        """The time in seconds at which each lane of a link is free."""
        self.there: dict[tuple[int, int], float] = {}
        """(tensor, device) -> the time at which the tensor arrived there."""
        self.free = np.zeros(count)
        self.now = 0.0
        self.last = [-1] * count
        """The operator that ran last on each device."""
        self.ready = np.zeros(size, dtype=bool)
        self.arrival = np.zeros((size, count))
        """The time at which the inputs of each ready operator would be on each device."""
        self.seen = [-1] * size
        """The number of messages sent when each operator's arrivals were last computed."""
        self.open = units.allowed[list(units.of)]
        """Whether each operator may lie on each device, apart from memory."""
        self.bytes = np.stack([units.bytes, units.transient_bytes], axis=1)[list(units.of)]
        """The bytes that each operator would book: for the whole step, and while it runs."""

    def placement(self) -> Placement:
        """Return the placement, in which backward runs in the opposite order.

        Raises:
            NoRoomError: no ready operator fits on any device.
        """
        problem = self.problem
        waiting = [len({problem.tensors[t].producer for t in read}) for read in problem.read]
        self.ready[:] = np.equal(waiting, 0)
        for _ in range(problem.size):
            operator, device, start = self._choose()
            self._start(operator, device, start)
            for reader in {r for t in problem.made[operator] for r in problem.tensors[t].readers}:
                waiting[reader] -= 1
                if not waiting[reader]:
                    self.ready[reader] = True
                    self._refresh(reader)
        return Placement.by_start(self.device, problem.devices.count, self.starts)

    def _choose(self) -> tuple[int, int, float]:
        while True:
            starts = self._starts()
            operator, device = divmod(int(starts.argmin()), len(self.free))
            earliest = float(starts[operator, device])
            if earliest == float("inf"):
                raise NoRoomError(self.units.of[int(self.ready.argmax())])
            # The operator's arrivals were lower bounds. If they grew, another pair may start earlier.
            if not self._refresh(operator):
                return operator, device, earliest

    def _starts(self) -> Floats:
        fits = self.open & self.memory.rooms(self.bytes[:, :1], self.bytes[:, 1:])
        starts = np.where(fits & self.ready[:, None], np.maximum(self.arrival, self.free), np.inf)
        if self.favourite is not None:
            self._keep_awake(starts, fits, self.favourite)
        return starts

    def _keep_awake(self, starts: Floats, fits: Flags, favourite: Sequence[int]) -> None:
        """Change ``starts`` by SCT's rule: a device waits for the favourite child of its last operator.

        Before that child, the device may only run operators whose inputs could be on every device by the time
        they start (urgent ones). The rule ends once another device can start the child earlier, or if the
        device lacks room for it (Baechi, section 3.1).
        """
        # When the inputs could be on any permitted device: the latest of the arrivals.
        permitted = fits & self.ready[:, None]
        waits = np.where(permitted, self.arrival, -np.inf).max(axis=1)
        for device, last in enumerate(self.last):
            child = favourite[last] if last >= 0 else -1
            if child < 0 or self.device[child] >= 0 or not fits[child, device]:
                continue
            if self.ready[child]:
                if self._refresh(child):
                    starts[child] = np.where(
                        permitted[child], np.maximum(self.arrival[child], self.free), np.inf
                    )
                if starts[child, device] > starts[child].min():
                    continue
            own = starts[child, device]
            starts[:, device] = np.maximum(starts[:, device], waits)
            starts[child, device] = own
        # A device that was awake may be free again, but time does not go back: nothing starts before what was
        # started last.
        np.maximum(starts, self.now, out=starts)

    def _refresh(self, operator: int) -> bool:
        if self.seen[operator] == len(self.there):
            return False
        self.seen[operator] = len(self.there)
        before = self.arrival[operator].copy()
        for device in np.flatnonzero(self.open[operator]).tolist():
            self.arrival[operator, device] = self._receive(operator, device)[0]
        return bool((before != self.arrival[operator]).any())

    def _receive(
        self, operator: int, device: int
    ) -> tuple[float, dict[str, float], dict[tuple[int, int], float]]:
        """Return the time at which an operator's inputs reach a device if sent now, with the resulting
        changes of ``self.lanes`` (when links are free) and ``self.there`` (when tensors arrive).
        """
        devices, tensors = self.problem.devices, self.problem.tensors
        latest, lanes, there = 0.0, dict[str, float](), dict[tuple[int, int], float]()
        for made, number in sorted((self.ends[tensors[t].producer], t) for t in self.problem.read[operator]):
            source = self.device[tensors[number].producer]
            arrival = made if source == device else self.there.get((number, device))
            if arrival is None:
                taken = devices.lanes_of(source, device)
                start = max([made, *(lanes.get(lane, self.lanes.get(lane, 0.0)) for lane in taken)])
                arrival = start + devices.transfer_s(tensors[number].bytes, source, device)
                lanes |= dict.fromkeys(taken, arrival)
                there[number, device] = arrival
            latest = max(latest, arrival)
        return latest, lanes, there

    def _start(self, operator: int, device: int, start: float) -> None:
        _, lanes, there = self._receive(operator, device)
        self.lanes |= lanes
        self.there |= there
        end = start + float(self.problem.forward_s[operator, device])
        self.device[operator], self.starts[operator], self.ends[operator] = device, start, end
        self.ready[operator] = False
        self.free[device] = end
        self.last[device] = operator
        self.now = max(self.now, start)
        unit = self.units.of[operator]
        if self.memory.device[unit] < 0:
            self.memory.book(unit, device)
            # The rest of the unit has to go there, and books nothing more.
            members = list(self.units.members[unit])
            self.open[members] = False
            self.open[members, device] = True
            self.bytes[members] = 0.0
