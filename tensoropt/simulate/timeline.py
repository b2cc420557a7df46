"""A scheduler of tasks that wait for other tasks and for resources; messages slow down computation."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

import numpy as np
from numba import njit

from tensoropt.types import Floats, Indices


@njit(cache=True, nogil=True)
def take_place(
    seconds: Floats,
    predecessors: Indices,
    first: Indices,
    successors: Indices,
    uses: Indices,
    first_resource: Indices,
    resources: Indices,
    first_end: Indices,
    ends: Indices,
    works: Indices,
    slower: float,
) -> tuple[Floats, Floats, Indices]:
    """Return (starts, ends, order) of tasks; deadlocked tasks are not in the order.

    A task starts when its predecessors have ended and its resources are free. Tasks take resources in the
    order in which their last predecessors end; of equal times, the smaller index comes first. A message slows
    down computation on the devices at its ends. Each end is half of a collective's kernel, so half of the
    message's seconds count: during s of them, s / (1 + slower) seconds of computation are done.

    Args:
        seconds: (n,) durations without other tasks.
        predecessors: (n,) the number of predecessors.
        first, successors: the successors of task i are ``successors[first[i]:first[i + 1]]``.
        uses: (n,) the index of the set of resources that a task occupies throughout; -1 for none.
        first_resource, resources: set k has ``resources[first_resource[k]:first_resource[k + 1]]``.
        first_end, ends: a message over set k slows down devices ``ends[first_end[k]:first_end[k + 1]]``.
        works: (n,) the device on which a task can be slowed down; -1 for none.
        slower: the share by which messages slow down computation; infinite if they block.
    """
    count = len(seconds)
    waiting, earliest = predecessors.copy(), np.zeros(count)
    free = np.zeros(resources.max() + 1 if len(resources) else 0)
    starts, over, order = np.zeros(count), np.zeros(count), np.empty(count, np.int64)
    # The remaining seconds of messages beside each device's work, and since when.
    devices = works.max() + 1 if count else 0
    flying, since = np.zeros(devices), np.zeros(devices)
    lost = slower / (1.0 + slower) if slower < np.inf else 1.0
    ready = [(0.0, i) for i in range(count) if waiting[i] == 0]
    taken = 0
    while len(ready):
        start, i = heappop(ready)
        row, took = uses[i], seconds[i]
        if row >= 0:
            for resource in resources[first_resource[row] : first_resource[row + 1]]:
                start = max(start, free[resource])
        if slower > 0.0 and row >= 0:
            for device in ends[first_end[row] : first_end[row + 1]]:
                if device < devices:
                    if start > since[device]:
                        flying[device] = max(flying[device] - (start - since[device]), 0.0)
                        since[device] = start
                    flying[device] += 0.5 * took
        device = works[i]
        if slower > 0.0 and device >= 0:
            if start > since[device]:
                flying[device] = max(flying[device] - (start - since[device]), 0.0)
            if took > 0.0 and flying[device] > 0.0:
                took += min(flying[device] * lost, took * slower)
            flying[device] = max(flying[device] - took, 0.0)
            since[device] = start + took
        end = start + took
        if row >= 0:
            for resource in resources[first_resource[row] : first_resource[row + 1]]:
                free[resource] = end
        starts[i], over[i], order[taken] = start, end, i
        taken += 1
        for j in successors[first[i] : first[i + 1]]:
            earliest[j] = max(earliest[j], end)
            waiting[j] -= 1
            if waiting[j] == 0:
                heappush(ready, (earliest[j], j))
    return starts, over, order[:taken]


@njit(cache=True, nogil=True)
def by_predecessor(before: Indices, behind: Indices, count: int) -> tuple[Indices, Indices, Indices]:
    """Return the arguments (predecessors, first, successors) of :func:`take_place` from pairs of tasks."""
    predecessors, first = np.zeros(count, np.int64), np.zeros(count + 1, np.int64)
    for pair in range(len(before)):
        predecessors[behind[pair]] += 1
        first[before[pair] + 1] += 1
    for task in range(count):
        first[task + 1] += first[task]
    following, successors = first.copy(), np.empty(len(before), np.int64)
    for pair in range(len(before)):
        successors[following[before[pair]]] = behind[pair]
        following[before[pair]] += 1
    return predecessors, first, successors


def joined(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return tuple(result)


def length_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of all spans in seconds; overlaps count twice (see :func:`joined`)."""
    return sum(end - start for start, end in spans)
