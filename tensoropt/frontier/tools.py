"""Operations on finished frontiers: merge, knee, hypervolume, distance, representatives.

Reduce, product and union: Cai et al., "TensorOpt: Exploring the Tradeoffs in Distributed DNN Training with
Auto-Parallelism", section 4.1 and Algorithm 1. A point beats another if it needs no more memory and time and
is not equal. Of equal points the first is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensoropt.types import Floats, Indices

_IndexArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Frontier:
    """The non-dominated points of a set: ``memory`` (n,) strictly ascends, ``time`` (n,) strictly descends.

    Both are float64 and finite. ``origin`` (n, 2) int32 says where each point comes from: (0, row) after
    :func:`reduce`, (left index, right index) after :func:`product`, (frontier, index) after :func:`merge`.
    """

    memory: Floats
    time: Floats
    origin: _IndexArray

    def __post_init__(self) -> None:
        n = self.memory.shape[0]
        if self.memory.shape != (n,) or self.time.shape != (n,) or self.origin.shape != (n, 2):
            raise ValueError(
                f"a frontier needs memory (n,), time (n,) and origin (n, 2); got {self.memory.shape}, "
                f"{self.time.shape} and {self.origin.shape}"
            )
        if not (np.all(np.diff(self.memory) > 0) and np.all(np.diff(self.time) < 0)):
            raise ValueError("memory must ascend and time descend strictly; build frontiers with reduce()")

    def __len__(self) -> int:
        return self.memory.shape[0]


def reduce(memory: ArrayLike, time: ArrayLike, origin: _IndexArray | None = None) -> Frontier:
    """Return the frontier of points: those that no other point beats (Algorithm 1).

    ``memory`` and ``time`` are (n,) in any order. Infinite points are dropped; NaN is a ``ValueError``.
    """
    m, t = np.asarray(memory, dtype=np.float64), np.asarray(time, dtype=np.float64)
    if m.ndim != 1 or m.shape != t.shape:
        raise ValueError(f"memory and time must be two arrays of one length; got {m.shape} and {t.shape}")
    if np.isnan(m).any() or np.isnan(t).any():
        raise ValueError("a cost is NaN; mark impossible points with inf")
    if origin is None:
        origin = np.stack([np.zeros(len(m), np.int32), np.arange(len(m), dtype=np.int32)], axis=1)
    # The last key sorts first: by memory, then by time. lexsort is stable, so of equal points the first in
    # the input comes first, and only that one is strictly below everything before it.
    order = np.lexsort((t, m))
    order = order[np.isfinite(m[order]) & np.isfinite(t[order])]
    sorted_time = t[order]
    # The slice at the end handles empty input, where the leading inf stands alone.
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(sorted_time)[:-1]])[: len(order)]
    kept = order[sorted_time < best_before]
    return Frontier(m[kept], t[kept], np.ascontiguousarray(origin[kept], dtype=np.int32))


def product(left: Frontier, right: Frontier) -> Frontier:
    """Return the frontier of all sums of a point of ``left`` and a point of ``right``."""
    i = np.repeat(np.arange(len(left), dtype=np.int32), len(right))
    j = np.tile(np.arange(len(right), dtype=np.int32), len(left))
    origin = np.stack([i, j], axis=1)
    return reduce(left.memory[i] + right.memory[j], left.time[i] + right.time[j], origin)


def segmented_staircase(entry: NDArray[np.int64], time: Floats) -> NDArray[np.bool_]:
    """Return a mask of the points on the frontier of their segment (``entry``).

    Points are sorted by segment, then by memory, then by time.
    """
    # A running minimum by doubling: after s passes ``best`` covers 2**s points. This takes a few passes over
    # the whole array instead of a Python loop over its entries.
    best = time.copy()
    longest = int(np.bincount(entry).max(initial=0)) if len(entry) else 0
    step = 1
    while step < longest:
        # Entries are sorted, so equal ends mean that everything in between belongs to the same entry.
        same = entry[step:] == entry[:-step]
        best[step:] = np.where(same, np.minimum(best[step:], best[:-step]), best[step:])
        step *= 2
    kept = np.ones(len(entry), dtype=bool)
    kept[1:] = (entry[1:] != entry[:-1]) | (time[1:] < best[:-1])
    return kept


class Points(Protocol):
    """The costs of n points: ``memory`` and ``time`` are (n,) arrays."""

    @property
    def memory(self) -> Floats: ...

    @property
    def time(self) -> Floats: ...


def merge(frontiers: Sequence[Points]) -> Frontier:
    """Return the frontier of the points of several frontiers; ``origin[p]`` is (frontier, index in it).
    Of equal points, that of the earliest frontier is kept.
    """
    if not frontiers:
        return reduce(np.empty(0), np.empty(0))
    sizes = [len(f.memory) for f in frontiers]
    frontier_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes])
    return reduce(
        np.concatenate([np.asarray(f.memory, dtype=np.float64) for f in frontiers]),
        np.concatenate([np.asarray(f.time, dtype=np.float64) for f in frontiers]),
        np.stack([frontier_of, index], axis=1),
    )


union = merge
"""The paper's name of :func:`merge` (section 4.1)."""


def knee(points: Points) -> int:
    """Return the index of the knee: the point farthest below the chord between the ends, in log-log scale.

    Of equally far points the first counts; the knee of fewer than three points is 0. Raises ``ValueError`` if
    there are no points.
    """
    memory, time = np.asarray(points.memory, np.float64), np.asarray(points.time, np.float64)
    if len(memory) == 0:
        raise ValueError("an empty frontier has no knee")
    if len(memory) < 3:
        return 0
    x, y = _unit_log(memory), _unit_log(time)
    # The ends are (0, 1) and (1, 0): up to a factor this is the distance below the chord between them.
    return int(np.argmax(1.0 - x - y))


def _unit_log(values: Floats) -> Floats:
    # A cost of 0 has no logarithm; a thousandth of the smallest other cost replaces it. An assumption: the
    # smaller this replacement, the more the curve is stretched towards that end.
    floor = values[values > 0].min(initial=np.inf)
    logs = np.log(np.maximum(values, floor * 1e-3 if floor < np.inf else 1.0))
    span = np.ptp(logs)
    return (logs - logs.min()) / span if span > 0 else np.zeros_like(logs)


def hypervolume(points: Points, reference: tuple[float, float]) -> float:
    """Return the area between the frontier and ``reference`` = (memory, time), in byte-seconds.

    Computed by moocore (Fonseca, Paquete, López-Ibáñez 2006).
    """
    import moocore

    data = _matrix(points)
    return float(moocore.hypervolume(data, ref=np.asarray(reference, np.float64))) if len(data) else 0.0


def distance(points: Points, reference: Points) -> float:
    """Return the multiplicative epsilon indicator minus one (Zitzler et al. 2003; moocore).

    0.01 means that for every point of ``reference``, some point of ``points`` is at most 1 % worse in both
    costs. A cost of 0 in ``reference`` that no point has gives ``inf``. Empty frontiers are a ``ValueError``.
    """
    import moocore

    actual, theirs = _matrix(points), _matrix(reference)
    if not len(actual) or not len(theirs):
        raise ValueError("the distance of an empty frontier is undefined")
    # moocore refuses values that are not positive, because the indicator divides by them.
    if (actual > 0).all() and (theirs > 0).all():
        return float(moocore.epsilon_mult(actual, ref=theirs)) - 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        # 0 over 0 is 1, because nothing is lost; anything else over 0 stays inf.
        ratio = np.where(actual[:, None] == theirs[None], 1.0, actual[:, None] / theirs[None])
    return float(ratio.max(axis=2).min(axis=0).max()) - 1.0


def _matrix(points: Points) -> Floats:
    return np.stack([np.asarray(points.memory, np.float64), np.asarray(points.time, np.float64)], axis=1)


def representatives(points: Points, most: int, loss: float, keep: Sequence[int] = ()) -> Indices:
    """Choose ``most`` points of a frontier; more if these lose over the share ``loss`` of hypervolume.

    The point that alone dominates the smallest rectangle is removed repeatedly (greedy hypervolume subset
    selection; Bradstreet, While and Barone, 2007). A rectangle's size is the larger of its shares of the area
    in linear and in log scale. The reference point is the worst of both costs.

    Args:
        points: a frontier, with memory ascending and time strictly descending.
        keep: the indices of points to keep, besides both ends.

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
    """Return the hypervolume of a frontier, with the worst of both costs as the reference point."""
    return float(((memory[1:] - memory[:-1]) * (time[0] - time[:-1])).sum())
