"""The Pareto algebra of (memory, time) points: reduce, product and union.

Source: Cai et al., "TensorOpt: Exploring the Tradeoffs in Distributed DNN Training with Auto-Parallelism",
section 4.1 and Algorithm 1 (the names are the paper's). A point beats another if it needs no more memory and
no more time and is not equal to it; of equal points the first is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensoropt.types import Floats

IndexArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Frontier:
    """Points that no other point beats.

    ``memory`` (n,) is strictly ascending and ``time`` (n,) strictly descending; both are float64 and finite.
    ``origin`` (n, 2) int32 records where each point comes from: after :func:`reduce` (0, row of the input),
    after :func:`product` (index in the left factor, index in the right factor), after :func:`union` (which
    frontier, index in it).
    """

    memory: Floats
    time: Floats
    origin: IndexArray

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


def reduce(memory: ArrayLike, time: ArrayLike, origin: IndexArray | None = None) -> Frontier:
    """Keep the points that no other point beats (Algorithm 1): sort by memory, keep strict improvements of
    time.

    ``memory`` and ``time`` are (n,) in any order; points with an infinite entry are dropped. Raises
    ``ValueError`` on NaN.
    """
    m, t = np.asarray(memory, dtype=np.float64), np.asarray(time, dtype=np.float64)
    if m.ndim != 1 or m.shape != t.shape:
        raise ValueError(f"memory and time must be two arrays of one length; got {m.shape} and {t.shape}")
    if np.isnan(m).any() or np.isnan(t).any():
        raise ValueError("a cost is NaN; mark the impossible with inf")
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
    """All sums of a point of ``left`` and a point of ``right``, reduced; a factor with one point only shifts
    the other."""
    i = np.repeat(np.arange(len(left), dtype=np.int32), len(right))
    j = np.tile(np.arange(len(right), dtype=np.int32), len(left))
    origin = np.stack([i, j], axis=1)
    memory, time = left.memory[i] + right.memory[j], left.time[i] + right.time[j]
    # Shifting preserves the order, so nothing has to be sorted or reduced unless two sums round to the same
    # value.
    if len(left) == 1 or len(right) == 1:
        distinct = np.all(np.diff(memory) > 0) and np.all(np.diff(time) < 0)  # rounding can equate points
        if distinct:
            return Frontier(memory, time, origin)
    return reduce(memory, time, origin)


def union(frontiers: Sequence[Frontier]) -> Frontier:
    """The frontier of all points of all ``frontiers``; of equal points the earliest frontier's is kept."""
    if not frontiers:
        return Frontier(np.empty(0), np.empty(0), np.empty((0, 2), np.int32))
    sizes = [len(f) for f in frontiers]
    which = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes])
    return reduce(
        np.concatenate([f.memory for f in frontiers]),
        np.concatenate([f.time for f in frontiers]),
        np.stack([which, index], axis=1),
    )


def segmented_staircase(entry: NDArray[np.int64], time: Floats) -> NDArray[np.bool_]:
    """Mark the points that improve on the time of all earlier ones of their entry; sorted by entry, then
    memory."""
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
