"""The fastest placement of a small problem, proven: all devices and all orders, by branch and bound.

Units get devices one after another, in the order of the model; where all have one, the tasks of the step
(forward and backward of each operator) are appended in the order of their starts, in which every set of
orders comes up once. Branches are cut by lower bounds on the step: the work of each device, and chains of
tasks. The bounds leave out that messages wait for each other on a lane, so that they hold whatever the
simulator decides there; it has the last word on all orders that are not cut
(:func:`~tensoropt.placement.flat.flat_step`).

B. Giffler, G. L. Thompson, *Algorithms for Solving Production-Scheduling Problems*, Operations Research 8,
1960, enumerate schedules so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tensoropt.placement import PlacementProblem, SimulatedPlacement, simulate_placement
from tensoropt.placement.flat import FlatProblem, Integers, flat_step
from tensoropt.planners.placed.common.annealing import Arrays, MoveTables, State, book
from tensoropt.planners.placed.common.units import units_of
from tensoropt.types import Floats

MOST_OPERATORS = 20
"""The most operators of a problem for which all placements are tried. Of 40 random problems with 14 operators
on two devices all were proven, the slowest with 59 million nodes; of 20 operators, three million nodes prove
nearly all that read from the last three only, and few that read from the last twelve."""
NODES_PER_SECOND = 5e6
"""The nodes looked at in a second on one core of an AMD EPYC: turns seconds into effort."""
_ROUNDED = 1e-12
"""The share by which sums of seconds may be off, as they are added up in another order."""


class FastestFound(NamedTuple):
    """The end of a search through all placements.

    Attributes:
        state: the fastest placement; None if none is faster than what was known.
        seconds: of its step, or of the known one.
        nodes: the number of partial placements and orders that were looked at.
        proven: whether nothing is faster; False if the nodes were used up.
    """

    state: State | None
    seconds: float
    nodes: int
    proven: bool


def bound_s(problem: PlacementProblem) -> float:
    """Return seconds that no step beats: of the longest chain of tasks, each on its fastest device,
    or of all work, spread evenly; of one micro-batch."""
    size, devices = problem.size, problem.devices.count
    anywhere, waits = np.full(size, -1, np.int64), np.zeros((2, size, size))
    flat = tuple(FlatProblem.of(problem))
    _fill_waits(flat, anywhere, waits)
    chain_s = _fill_tails(flat, anywhere, waits, np.zeros((2, size)))
    work_s = (problem.forward_s + problem.backward_s + problem.update_s).min(axis=1).sum()
    return max(float(chain_s), float(work_s) / devices)


def fastest(problem: PlacementProblem, known_s: float, caps: Floats, nodes: int) -> FastestFound:
    """Return the fastest placement of a problem in one micro-batch, over all devices and all orders.

    Args:
        known_s: the seconds of a known placement; only faster ones are looked for.
        caps: (devices,) the bytes that may be booked on each.
        nodes: the most nodes to look at.
    """
    assert problem.micro_batches == 1, "several micro-batches are not searched"
    flat, tables = FlatProblem.of(problem), MoveTables.of(problem, units_of(problem))
    best = State(*(np.zeros(problem.size, np.int64) for _ in range(3)))
    alike = _first_alike(problem)
    seconds, used = _devices(tuple(flat), tuple(tables), alike, caps, known_s, nodes, tuple(best))
    return FastestFound(best if seconds < known_s else None, float(seconds), int(used), used < nodes)


def frontier(problem: PlacementProblem, known: Sequence[State], nodes: int) -> tuple[list[State], int]:
    """Return (the fastest placements under lower and lower caps on booked bytes; how many are proven to be,
    the first ones).

    Args:
        known: placements, so that only better ones are looked for.
        nodes: the most nodes to look at in all.
    """
    count, capacity = problem.devices.count, problem.devices.capacity_bytes.astype(float)
    flat, tables = FlatProblem.of(problem), MoveTables.of(problem, units_of(problem))
    booked = [state.booked(tables, count) for state in known]
    seconds = [float(flat_step(tuple(flat), *state)[0]) for state in known]
    found: list[State] = []
    cap = float("inf")
    while True:
        caps = np.minimum(capacity, cap)
        within = [number for number, each in enumerate(booked) if (each <= caps).all()]
        best = min(within, key=lambda number: (seconds[number], booked[number].max()), default=None)
        proof = fastest(problem, float("inf") if best is None else seconds[best], caps, nodes)
        nodes -= proof.nodes
        if proof.state is not None:
            found.append(proof.state)
        elif best is not None:
            found.append(known[best])
        elif proof.proven:
            return found, len(found)
        if not proof.proven:
            return found, max(0, len(found) - 1)
        cap = float(found[-1].booked(tables, count).max()) - 1.0  # bytes are whole


def tried_out(
    problem: PlacementProblem, known: Sequence[SimulatedPlacement], seconds: float
) -> tuple[list[SimulatedPlacement], str]:
    """Return (placements of a small problem that none beats in booked bytes and seconds, none of a larger
    one; a note on what is proven of the fastest one, "" for several micro-batches).

    Args:
        known: placements, which may be among them.
        seconds: the effort, in seconds of the machine where it was measured.
    """
    if problem.micro_batches > 1:
        return [], ""
    found, proven = [], 0
    if problem.size <= MOST_OPERATORS:
        states = [State.of(simulated) for simulated in known]
        states, proven = frontier(problem, states, int(seconds * NODES_PER_SECOND))
        found = [simulate_placement(problem, state.placement(problem)) for state in states]
    if proven and found[0].fits():
        return found, "proven over all devices and orders: nothing is faster"
    best_s = min((simulated.time_s for simulated in (*known, *found) if simulated.fits()), default=0.0)
    if not best_s:
        return found, ""
    gap = max(0.0, 1 - bound_s(problem) / best_s)
    return found, f"proven: no step is more than {gap:.2%} shorter (longest chain, work spread evenly)"


def _first_alike(problem: PlacementProblem) -> Integers:
    """Return (devices,) for each device the first that differs from it in nothing."""
    devices = problem.devices
    alike = np.arange(devices.count)
    if devices.lanes or problem.pinned:
        return alike
    of_devices = [
        *(problem.forward_s, problem.backward_s, problem.update_s),
        *(devices.capacity_bytes[None], devices.end_seconds.T),
        *(() if problem.host_s is None else (problem.host_s,)),
    ]
    of_pairs = (devices.latency_s, devices.seconds_per_byte)
    for d in range(devices.count):
        for e in range(d):
            swapped = np.arange(devices.count)
            swapped[[d, e]] = e, d
            if all(np.array_equal(x[:, d], x[:, e]) for x in of_devices) and all(
                np.array_equal(x, x[np.ix_(swapped, swapped)]) for x in of_pairs
            ):
                alike[d] = alike[e]
                break
    return alike


@njit(cache=True, nogil=True)
def _devices(
    problem: Arrays, tables: Arrays, alike: Integers, caps: Floats, known_s: float, most: int, best: Arrays
) -> tuple[float, int]:
    """Return (the seconds of the fastest placement, or ``known_s``; the nodes looked at)."""
    forward_s, backward_s, update_s = problem[1:4]
    first_member, members, first_choice, choices = tables[5:9]
    booking = (tables[9], first_member, members, tables[10], tables[11], tables[12])
    work_s = forward_s + backward_s + update_s
    units = first_member.shape[0] - 1
    size, devices = work_s.shape
    # The least work of the units from each one on, which all devices share.
    later = np.zeros(units + 1)
    for u in range(units - 1, -1, -1):
        least = np.inf
        for c in range(first_choice[u], first_choice[u + 1]):
            least = min(least, work_s[members[first_member[u] : first_member[u + 1]], choices[c]].sum())
        later[u] = later[u + 1] + least
    device = np.full(size, -1, np.int64)
    next_choice = first_choice[:-1].copy()
    load, booked = np.zeros(devices), np.zeros(devices)
    waits, tail = np.zeros((2, size, size)), np.zeros((2, size))
    best_s, nodes, u = known_s, 0, 0
    while u >= 0 and nodes < most:
        own = members[first_member[u] : first_member[u + 1]]
        if device[own[0]] >= 0:
            load[device[own[0]]] -= work_s[own, device[own[0]]].sum()
            device[own] = -1
        if next_choice[u] == first_choice[u + 1]:
            next_choice[u] = first_choice[u]
            u -= 1
            continue
        d = choices[next_choice[u]]
        next_choice[u] += 1
        if _has_empty_equal(alike, device, d):
            continue
        device[own] = d
        load[d] += work_s[own, d].sum()
        nodes += 1
        limit = best_s * (1 - _ROUNDED)
        if max(load.max(), (load.sum() + later[u + 1]) / devices) >= limit:
            continue
        _fill_waits(problem, device, waits)
        if _fill_tails(problem, device, waits, tail) >= limit:
            continue
        if u + 1 < units:
            u += 1
        elif _fits(booking, device, booked, caps):
            best_s, nodes = _orders(problem, device, waits, tail, best_s, nodes, most, best)
    return best_s, nodes


@njit(cache=True, nogil=True)
def _has_empty_equal(alike: Integers, device: Integers, d: int) -> bool:
    """Whether an equal device before ``d`` is empty: of empty equals the first stands for all."""
    found = False
    for e in range(d):
        found = found or (alike[e] == alike[d] and not (device == e).any())
    return found


@njit(cache=True, nogil=True)
def _fits(booking: Arrays, device: Integers, booked: Floats, caps: Floats) -> bool:
    book(booking, device, booked)
    return bool((booked <= caps).all())


@njit(cache=True, nogil=True)
def _fill_waits(problem: Arrays, device: Integers, waits: Floats) -> None:
    """Fill (2, n, n) the seconds from the end of one operator's task to the start of another's that needs it:
    from maker to reader in forward, from reader to maker in backward; -1 where neither needs the other.

    They are those of the message between them, 0 on one device and where a device is not chosen yet.
    """
    producer, gradient, first_reader, readers, message_s = problem[5:10]
    waits[:] = -1.0
    for t in range(producer.shape[0]):
        maker = producer[t]
        for r in range(first_reader[t], first_reader[t + 1]):
            reader = readers[r]
            a, b = device[maker], device[reader]
            apart = a >= 0 and b >= 0 and a != b
            there, back = (message_s[t, a, b], message_s[t, b, a]) if apart else (0.0, 0.0)
            waits[0, maker, reader] = max(waits[0, maker, reader], there)
            if gradient[t]:
                waits[1, reader, maker] = max(waits[1, reader, maker], back)


@njit(cache=True, nogil=True)
def _fill_tails(problem: Arrays, device: Integers, waits: Floats, tail: Floats) -> float:
    """Fill (2, n) the least seconds from the start of each forward and backward to the end of the step;
    return those of the whole step."""
    forward_s, backward_s, update_s = problem[1:4]
    training = problem[13]
    size = device.shape[0]
    # Makers come before readers.
    for o in range(size):
        d = device[o]
        tail[1, o] = 0.0
        if training:
            seconds = backward_s[o, d] if d >= 0 else backward_s[o].min()
            tail[1, o] = seconds + (update_s[o, d] if d >= 0 else update_s[o].min())
            for maker in range(o):
                if waits[1, o, maker] >= 0:
                    tail[1, o] = max(tail[1, o], seconds + waits[1, o, maker] + tail[1, maker])
    for o in range(size - 1, -1, -1):
        d = device[o]
        seconds = forward_s[o, d] if d >= 0 else forward_s[o].min()
        tail[0, o] = seconds + tail[1, o]
        for reader in range(o + 1, size):
            if waits[0, o, reader] >= 0:
                tail[0, o] = max(tail[0, o], seconds + waits[0, o, reader] + tail[0, reader])
    return float(tail[0].max())


@njit(cache=True, nogil=True)
def _orders(
    problem: Arrays,
    device: Integers,
    waits: Floats,
    tail: Floats,
    best_s: float,
    nodes: int,
    most: int,
    best: Arrays,
) -> tuple[float, int]:
    """Return (the seconds of the fastest orders on these devices, or ``best_s``; the nodes looked at).

    Tasks are numbered: forwards, then backwards. ``sequence[k]`` is the task that starts as number k.
    """
    forward_s, backward_s, update_s = problem[1:4]
    training = problem[13]
    size, devices = forward_s.shape
    tasks = 2 * size if training else size
    seconds = np.zeros(tasks)
    remaining = np.zeros(devices)  # the seconds of each device's tasks that are not in the sequence
    forwards = np.zeros(devices, np.int64)
    for o in range(size):
        d = device[o]
        seconds[o] = forward_s[o, d]
        forwards[d] += 1
        remaining[d] += seconds[o]
        if training:
            seconds[size + o] = backward_s[o, d]
            remaining[d] += seconds[size + o] + update_s[o, d]
    begun, end = np.zeros(tasks, np.bool_), np.zeros(tasks)
    sequence, start = np.full(tasks, -1, np.int64), np.zeros(tasks)
    free = np.zeros((tasks + 1, devices))  # of each device, at each level
    level = 0
    while level >= 0 and nodes < most:
        if level == tasks:
            nodes += 1
            best_s = _kept(problem, device, sequence, best_s, best)
            level -= 1
        task = sequence[level]
        if task >= 0:
            begun[task] = False
            remaining[device[task % size]] += seconds[task]
            forwards[device[task % size]] += task < size
        sequence[level] = -1
        last = sequence[level - 1] if level else -1
        for candidate in range(task + 1, tasks):
            d = device[candidate % size]
            if begun[candidate] or (candidate >= size and forwards[d]):
                continue
            ready = max(free[level, d], _ready(waits, begun, end, candidate))
            if ready == np.inf:
                continue
            # What started earlier, or beside the last on an earlier device, comes up before it elsewhere.
            if last >= 0 and (
                ready < start[level - 1]
                or (ready == start[level - 1] and seconds[last] > 0 and d < device[last % size])
            ):
                continue
            nodes += 1
            if not _cut(
                free[level], remaining, device, begun, tail, ready, candidate, best_s * (1 - _ROUNDED)
            ):
                sequence[level], start[level] = candidate, ready
                break
        task = sequence[level]
        if task < 0:
            level -= 1
            continue
        d = device[task % size]
        begun[task], end[task] = True, start[level] + seconds[task]
        remaining[d] -= seconds[task]
        forwards[d] -= task < size
        free[level + 1] = free[level]
        free[level + 1, d] = end[task]
        level += 1
    return best_s, nodes


@njit(cache=True, nogil=True)
def _ready(waits: Floats, begun: NDArray[np.bool_], end: Floats, task: int) -> float:
    """Return when all that a task needs from other operators has arrived; inf if some has not begun."""
    size = waits.shape[1]
    phase, o = task // size, task % size
    ready = 0.0
    for other in range(size):
        if waits[phase, other, o] >= 0:
            if not begun[phase * size + other]:
                return np.inf
            ready = max(ready, end[phase * size + other] + waits[phase, other, o])
    return ready


@njit(cache=True, nogil=True)
def _cut(
    free: Floats,
    remaining: Floats,
    device: Integers,
    begun: NDArray[np.bool_],
    tail: Floats,
    now: float,
    task: int,
    limit: float,
) -> bool:
    """Whether no step is shorter than ``limit`` in which ``task`` starts now and all other tasks later."""
    size = device.shape[0]
    for d in range(free.shape[0]):
        if remaining[d] > 0 and max(free[d], now) + remaining[d] >= limit:
            return True
    for other in range(begun.shape[0]):
        if (
            not begun[other]
            and max(free[device[other % size]], now) + tail[other // size, other % size] >= limit
        ):
            return True
    return False


@njit(cache=True, nogil=True)
def _kept(problem: Arrays, device: Integers, sequence: Integers, best_s: float, best: Arrays) -> float:
    """Write a whole sequence into ``best`` if its step is shorter; return the seconds of the shorter one."""
    size = device.shape[0]
    ahead = sequence[sequence < size]
    back = sequence[sequence >= size] - size if problem[13] else np.arange(size - 1, -1, -1)
    took = flat_step(problem, device, ahead, back)[0]
    if took < best_s:
        best[0][:], best[1][:], best[2][:] = device, ahead, back
    return min(best_s, took)
