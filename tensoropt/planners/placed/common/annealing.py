"""Simulated annealing over placements: operators change devices, which run them in order of starts.

S. Kirkpatrick et al., *Optimization by Simulated Annealing*, Science 220, 1983. A chain minimises the time of
a step under a cap on each device's memory (the bytes stored for the whole step or saved for backward). The
fastest states that it visits are stored by the memory of their fullest device, so that one chain finds
placements for many caps. The simulator then determines their time and memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numba import njit

from tensoropt.placement import Placement, PlacementProblem, SimulatedPlacement
from tensoropt.placement.flat import FlatProblem, Integers, flat_step, joined
from tensoropt.planners.placed.common.units import Units
from tensoropt.types import Flags, Floats

_HOT, _COLD = 1e-3, 1e-5
"""The temperature at a chain's first and last try, as shares of the step's time. Assumptions: with 20,000
tries on Inception-v3 on two devices, 3e-3 ended 3 % slower; 3e-4 ended within 1 %, on AmoebaNet-D on four
devices too."""
_PENALTY = 4.0
"""The penalty for memory above the cap: a share of the step's time per share of all memory. An assumption,
high enough that no move gains as much."""
_TOGETHER = 6.0
"""The mean number of connected operators, beyond the first two, that move together; an assumption."""
_JOINS = 0.7
"""The probability that a neighbour moves along, so that different sets move each time; an assumption."""
_ALONE = 0.3
"""The share of moves of one operator alone; an assumption."""

_Arrays = tuple[Any, ...]
"""A named tuple of arrays as a plain tuple, for compiled kernels."""


class MoveTables(NamedTuple):
    """The constraints and memory sizes of a placement problem, as flat arrays for moving its operators.

    Rows of different lengths are joined: row ``i`` of ``x`` is ``x[first_x[i] : first_x[i + 1]]``.

    Attributes:
        first_near, near: the producers and the readers of each operator.
        unit: the unit of each operator, (operators,); a unit is a set of operators that must share a device.
        first_member, members: the operators of each unit.
        first_choice, choices: the devices on which each unit may lie.
        allowed: whether each unit may lie on each device, (units, devices).
        bytes: the bytes that each unit stores on its device, and saves inside its operators, (units,).
        kept_bytes: the size of each storage that backward needs, for all micro-batches, in bytes,
            (storages,).
        first_keeper, keepers: for each such storage, the operators whose backward needs it. Each device with
            one of them holds the storage.
    """

    first_near: Integers
    near: Integers
    unit: Integers
    first_member: Integers
    members: Integers
    first_choice: Integers
    choices: Integers
    allowed: Flags
    bytes: Floats
    kept_bytes: Floats
    first_keeper: Integers
    keepers: Integers

    @classmethod
    def of(cls, problem: PlacementProblem, units: Units) -> Self:
        """Return the arrays of a placement problem."""
        tensors = problem.tensors
        near: list[set[int]] = [set() for _ in range(problem.size)]
        for tensor in tensors:
            for reader in tensor.readers:
                near[reader].add(tensor.producer)
                near[tensor.producer].add(reader)
        count = problem.micro_batches
        own = problem.stored_bytes + count * problem.kept_bytes
        keepers: dict[int, set[int]] = {}
        for number, tensor in enumerate(tensors):
            storage = number
            while (into := tensors[storage].lies_in) is not None:
                storage = into
            if tensor.kept_by and not tensors[storage].stored:
                keepers.setdefault(storage, set()).update(tensor.kept_by)
        return cls(
            *joined(map(sorted, near)),
            np.array(units.of, dtype=np.int64),
            *joined(units.members),
            *joined(np.flatnonzero(row).tolist() for row in units.allowed),
            units.allowed,
            np.array([own[list(members)].sum() for members in units.members]),
            np.array([count * (tensors[t].extent or tensors[t].bytes) for t in keepers], dtype=float),
            *joined(sorted(operators) for operators in keepers.values()),
        )

    @property
    def all_bytes(self) -> float:
        """The memory in bytes that all operators together would take on one device: parameters, gradients,
        optimizer state, and tensors saved for backward."""
        return float(self.bytes.sum() + self.kept_bytes.sum())


class State(NamedTuple):
    """A placement as arrays.

    Attributes:
        device: the device of each operator, (operators,).
        ahead, back: all operators in the order of forward and of backward, (operators,). Both orders respect
            dependences, and each device runs its own operators in these orders.
    """

    device: Integers
    ahead: Integers
    back: Integers

    @classmethod
    def of(cls, simulated: SimulatedPlacement) -> Self:
        """Return a simulated placement as arrays, with operators in the order of their starts."""
        starts, numbers = simulated.operator_starts, np.arange(simulated.problem.size)
        ahead, back = np.lexsort((numbers, starts[0])), np.lexsort((-numbers, starts[1]))
        return cls(np.array(simulated.placement.device, dtype=np.int64), ahead, back)

    def copy(self) -> Self:
        return self._replace(device=self.device.copy(), ahead=self.ahead.copy(), back=self.back.copy())

    def placement(self, problem: PlacementProblem) -> Placement:
        return Placement.in_order(self.device, problem.devices.count, self.ahead, self.back)

    def booked(self, tables: MoveTables, devices: int) -> Floats:
        """Return the stored and saved memory of each device in bytes, (devices,)."""
        booked = np.zeros(devices)
        booking = (tables.bytes, *tables[3:5], *tables[9:])
        _book(booking, self.device, booked)
        return booked


class Shelf(NamedTuple):
    """The fastest state visited so far for each level of memory on the fullest device.

    Attributes:
        edges: the upper bound of each level in bytes, ascending, (levels,). A state belongs to the first
            level whose bound is at least the memory of its fullest device.
        seconds: the step time of each level's state, (levels,); inf for a level without one.
        device, ahead, back: the arrays of each level's :class:`State`, (levels, operators).
    """

    edges: Floats
    seconds: Floats
    device: Integers
    ahead: Integers
    back: Integers

    @classmethod
    def empty(cls, edges: Floats, size: int) -> Self:
        count = len(edges)
        rows = [np.zeros((count, size), np.int64) for _ in range(3)]
        return cls(np.asarray(edges, dtype=float), np.full(count, np.inf), *rows)

    def state(self, number: int) -> State:
        return State(*(rows[number].copy() for rows in (self.device, self.ahead, self.back)))

    def unbeaten(self) -> list[int]:
        """Return the levels whose state is faster than those of all lower levels, ascending."""
        fastest = np.minimum.accumulate(np.concatenate([[np.inf], self.seconds[:-1]]))
        return np.flatnonzero(self.seconds < fastest).tolist()


@njit(cache=True, nogil=True)
def _put(
    shelf: _Arrays, fullest: float, seconds: float, device: Integers, ahead: Integers, back: Integers
) -> None:
    edges, fastest, devices, aheads, backs = shelf
    number = np.searchsorted(edges, fullest)
    if number < edges.shape[0] and seconds < fastest[number]:
        fastest[number] = seconds
        devices[number] = device
        aheads[number] = ahead
        backs[number] = back


@njit(cache=True, nogil=True)
def _move(
    links: _Arrays,
    units: _Arrays,
    device: Integers,
    operator: int,
    target: int,
    want: int,
    seen: Integers,
    mark: int,
    stack: Integers,
) -> None:
    """Move an operator, and up to ``want - 1`` connected ones of its device, to the device ``target``.

    Units (operators that must share a device) move as a whole. ``seen`` (units,) holds the ``mark`` of the
    move that last reached each unit, and ``stack`` is scratch space.
    """
    first_near, near = links
    unit, first_member, members, _, _, allowed = units
    source = device[operator]
    stack[0] = operator
    seen[unit[operator]] = mark
    count, k = 1, 0
    while k < count and count < want:
        o = stack[k]
        k += 1
        for e in range(first_near[o], first_near[o + 1]):
            other = near[e]
            if (
                count < want
                and device[other] == source
                and seen[unit[other]] != mark
                and np.random.random() < _JOINS
                and allowed[unit[other], target]
            ):
                seen[unit[other]] = mark
                stack[count] = other
                count += 1
    for k in range(count):
        number = unit[stack[k]]
        for m in range(first_member[number], first_member[number + 1]):
            device[members[m]] = target


@njit(cache=True, nogil=True)
def _book(booking: _Arrays, device: Integers, booked: Floats) -> float:
    """Write each device's stored and saved bytes to ``booked``; return the largest."""
    sizes, first_member, members, kept_bytes, first_keeper, keepers = booking
    booked[:] = 0.0
    for unit in range(sizes.shape[0]):
        booked[device[members[first_member[unit]]]] += sizes[unit]
    holds = np.full(booked.shape[0], -1, np.int64)
    for t in range(kept_bytes.shape[0]):
        for k in range(first_keeper[t], first_keeper[t + 1]):
            d = device[keepers[k]]
            if holds[d] != t:
                holds[d] = t
                booked[d] += kept_bytes[t]
    return booked.max()


def anneal(
    problem: FlatProblem, tables: MoveTables, state: State, caps: Floats, tries: int, seed: int, shelf: Shelf
) -> float:
    """Run an annealing chain that changes ``state`` in place; return the final state's step time in seconds.

    Args:
        caps: the stored and saved bytes permitted on each device, (devices,). More is penalised, not refused,
            so that a chain may begin above its caps.
        tries: the number of states whose step is computed.
        shelf: collects the fastest states within the caps.
    """
    return float(_anneal(tuple(problem), tuple(tables), tuple(state), caps, tries, seed, tuple(shelf)))


@njit(cache=True, nogil=True)
def _anneal(
    problem: _Arrays, tables: _Arrays, state: _Arrays, caps: Floats, tries: int, seed: int, shelf: _Arrays
) -> float:
    """Run :func:`anneal` on plain tuples: compiled code for named tuples would depend on their names."""
    np.random.seed(seed)
    device, ahead, back = state
    links, units, (sizes, kept_bytes, first_keeper, keepers) = tables[:2], tables[2:8], tables[8:]
    unit, first_member, members, first_choice, choices, _ = units
    booking = (sizes, first_member, members, kept_bytes, first_keeper, keepers)
    training = problem[13]
    size, devices = device.shape[0], caps.shape[0]
    booked = np.zeros(devices)
    fullest = _book(booking, device, booked)
    now, starts, returns = flat_step(problem, device, ahead, back)
    price = _PENALTY * now / max(1.0, sizes.sum() + kept_bytes.sum())
    over = np.maximum(booked - caps, 0.0).sum()
    if over == 0.0:
        _put(shelf, fullest, now, device, ahead, back)
    moved, stack, seen = device.copy(), np.empty(size, np.int64), np.full(sizes.shape[0], -1, np.int64)
    for number in range(tries):
        temperature = now * _HOT * (_COLD / _HOT) ** (number / tries)
        o = np.random.randint(size)
        target = choices[np.random.randint(first_choice[unit[o]], first_choice[unit[o] + 1])]
        if target == device[o]:
            continue
        moved[:] = device
        want = 1 if np.random.random() < _ALONE else 2 + int(np.random.exponential(_TOGETHER))
        _move(links, units, moved, o, target, want, seen, number, stack)
        next_fullest = _book(booking, moved, booked)
        next_over = np.maximum(booked - caps, 0.0).sum()
        seconds, starts, returns = flat_step(problem, moved, ahead, back)
        gain = now + price * over - seconds - price * next_over
        if gain >= 0 or np.random.random() < np.exp(gain / temperature):
            now, over, fullest = seconds, next_over, next_fullest
            device[:] = moved
            # Sorted by time, so that an operator that changes its device comes in where it would run.
            ahead[:] = ahead[np.argsort(starts[ahead], kind="mergesort")]
            if training:
                back[:] = back[np.argsort(returns[back], kind="mergesort")]
            if over == 0.0:
                _put(shelf, fullest, now, device, ahead, back)
    return now
