"""A few points that stand for many: those whose selection loses the least hypervolume."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.types import Floats, Indices


def representatives(points: Points, most: int, loss: float, keep: Sequence[int] = ()) -> Indices:
    """Choose the points of a staircase that stand for all: at most ``most`` of them, and no more than are
    needed to lose at most the share ``loss`` of hypervolume.

    The point with the smallest rectangle is removed, one after another, until few enough are left (greedy
    hypervolume subset selection; Bradstreet, While and Barone, "Incrementally maximising hypervolume for
    selection in multi-objective evolutionary algorithms", 2007). A rectangle is measured twice, in bytes and
    seconds and in their logarithms, and the larger share counts, because people compare costs both ways. The
    reference point is the worst of both costs.

    Args:
        points: memory ascending, time strictly descending.
        keep: points that are always kept, in addition to the two ends.

    Returns:
        (n,) indices, ascending.
    """
    memory, time = np.asarray(points.memory, np.float64), np.asarray(points.time, np.float64)
    count = len(memory)
    if count <= max(most, 2):
        return np.arange(count)
    scales = [(memory, time)]
    if memory[0] > 0 and time[-1] > 0:
        scales.append((np.log(memory), np.log(time)))
    totals = [float(dominated_area(*scale)) for scale in scales]
    measured = [
        (m.tolist(), t.tolist(), total)
        for (m, t), total in zip(scales, totals, strict=True)
        # On a scale on which nothing is dominated, nothing can be lost.
        if total > 0
    ]
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))

    def share(i: int) -> float:
        left, right = before[i], after[i]
        return max(((m[right] - m[i]) * (t[left] - t[i]) / total for m, t, total in measured), default=0.0)

    fixed = {0, count - 1, *keep}
    current = {i: share(i) for i in range(count) if i not in fixed}
    waiting = [(size, i) for i, size in current.items()]
    heapq.heapify(waiting)
    kept, lost = np.ones(count, bool), 0.0
    left = count
    while waiting and left > most:
        size, i = heapq.heappop(waiting)
        if not kept[i] or size != current[i]:
            continue  # it is in the heap a second time, with its current rectangle
        # All of it may be lost; rounding can make the sum of all shares slightly exceed 1.
        if lost + size > loss and loss < 1.0:
            break
        kept[i], lost, left = False, lost + size, left - 1
        a, b = before[i], after[i]
        after[a], before[b] = b, a
        for j in (a, b):
            if j in current:
                current[j] = share(j)
                heapq.heappush(waiting, (current[j], j))
    return np.flatnonzero(kept)


def dominated_area(memory: Floats, time: Floats) -> float:
    """The hypervolume of a staircase, with the worst of both costs as the reference point."""
    return float(((memory[1:] - memory[:-1]) * (time[0] - time[:-1])).sum())
