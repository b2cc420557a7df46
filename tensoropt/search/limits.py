"""Exact pruning: which partial points can still reach the frontier.

A partial point p at a table entry e is completed by something outside e. The outside messages say
``weight_m * memory + weight_t * time >= outside[e, w]`` for every completion, which is a convex region H. The
known strategies (the upper staircase) leave room only below and left of their inner corners. So p survives
iff some corner u and some h in H have ``p + h <= u``, that is, iff its time is at most

    limit(memory) = max over corners u of  u.time - H(u.memory - memory)

where H(x) is the least completion time within memory x. H is convex, so the best corner moves in one
direction with memory, and divide and conquer finds all breakpoints. A point on a corner survives: every value
on the true frontier is kept, and the result stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from tensoropt.search.hull import SLACK, Hull
from tensoropt.types import Floats

BREAKPOINTS = 64
"""The number of memories at which the limit of an entry is evaluated; fewer prune less, more cost time per
entry (an assumption). An entry with fewer candidate points than this is not limited at all."""
NEIGHBOURS = 32
"""The number of corners under one roof: a line above it rules them all out, which halved the CPU time on 1.7
million entries and 27 corners."""


@dataclass(frozen=True, eq=False, slots=True)
class Corners:
    """The inner corners of the known strategies' staircase, and the lines of the hull, for kernels.

    ``memory``, ``time`` (C,), memory ascending, ends possibly inf; ``height`` (W, C) are their weighted
    costs, raised by :data:`SLACK` against the rounding of sums; ``weight_m``, ``weight_t`` (W,) are the
    lines.
    """

    memory: Floats
    time: Floats
    height: Floats
    weight_m: Floats
    weight_t: Floats

    @property
    def roof(self) -> Floats:
        """(W, ceil(C / NEIGHBOURS)) the largest height among neighbouring corners."""
        return np.maximum.reduceat(self.height, np.arange(0, len(self.memory), NEIGHBOURS), axis=1)


def corners_of(hull: Hull, memory: Floats, time: Floats, most: int) -> Corners:
    """Corners of the staircase (memory, time); at most about ``most``, coarsened upwards (stays exact)."""
    m = np.append(memory[1:], np.inf)
    t = time.copy()
    if time[-1] * hull.weight_t[-1] <= hull.value[-1]:
        m, t = m[:-1], t[:-1]  # nothing is faster
    if memory[0] * hull.weight_m[0] > hull.value[0]:
        m, t = np.append(memory[0], m), np.append(np.inf, t)  # a leaner strategy may exist
    if len(m) == 0:  # one point beats everything; it remains as its own corner
        m, t = memory[:1], time[:1]
    if len(m) > most:
        finite = np.isfinite(m) & np.isfinite(t)
        width = max(np.ptp(m[finite]), 1e-300)
        height = max(np.ptp(t[finite]), 1e-300)
        # The distance along the staircase by memory, by time and by number of corners, so that neither a
        # steep stretch nor a crowded one falls into a single cell.
        along = (np.where(finite, m, m[finite].min()) - m[finite].min()) / width
        along += (t[finite].max() - np.where(finite, t, t[finite].max())) / height
        along += 2.0 * np.arange(len(m)) / len(m)
        along[~np.isfinite(m)] = np.inf
        cell = np.minimum(along * (most / 4.0), 4.0 * most).astype(np.int64)
        starts = np.flatnonzero(np.concatenate([[True], np.diff(cell) != 0]))
        ends = np.append(starts[1:], len(m)) - 1
        # The largest memory and the largest time of a cell: a corner that leaves at least the room of each
        # corner that it replaces, so pruning stays exact.
        m, t = m[ends], t[starts]
    with np.errstate(invalid="ignore"):
        height_m = np.where(hull.weight_m[:, None] > 0, hull.weight_m[:, None] * m, 0.0)
        height_t = np.where(hull.weight_t[:, None] > 0, hull.weight_t[:, None] * t, 0.0)
    return Corners(m, t, (height_m + height_t) * (1.0 + SLACK), hull.weight_m, hull.weight_t)


@njit(cache=True, nogil=True)
def reachable(inside, outside, height, roof):
    """Whether any strategy through an entry can still reach the frontier (all lines, some corner).

    A line above the ``roof`` of neighbouring corners rules all of them out at once.
    """
    lines, count = height.shape
    # Anything impossible is impossible under all lines.
    if inside[0] == np.inf or outside[0] == np.inf:
        return False
    hint = 0  # the line that ruled one corner out rules out most others
    least = inside[0] + outside[0]
    for block in range(roof.shape[1]):
        if least > roof[hint, block]:
            continue
        below = True
        for w in range(lines):
            value = inside[w] + outside[w]
            if value > roof[w, block]:
                hint = w
                least = value
                below = False
                break
        if not below:
            continue
        for c in range(block * NEIGHBOURS, min((block + 1) * NEIGHBOURS, count)):
            if least > height[hint, c]:
                continue
            alive = True
            for w in range(lines):
                value = inside[w] + outside[w]
                if value > height[w, c]:
                    hint = w
                    least = value
                    alive = False
                    break
            if alive:
                return True
    return False


@njit(cache=True, nogil=True)
def envelope(values, weight_m, weight_t, slope, level, start):
    """The upper envelope of ``time >= (value - weight_m * memory) / weight_t``.

    Every value is lowered by :data:`SLACK` of *itself*: the sums through an entry can be many decades above
    the line's least value, and so can their rounding. Writes the lines in use, steepest first, to ``slope``
    and ``level``, and the start of each to ``start``; returns their number. The lines must be in order of
    rising weight of time.
    """
    size = 0
    for w in range(values.shape[0]):
        # The line of least memory says nothing about time; the callers read the least memory from it
        # themselves.
        if weight_t[w] <= 0.0:
            continue
        s = weight_m[w] / weight_t[w]
        c = values[w] * (1.0 - SLACK) / weight_t[w]
        if size > 0 and s >= slope[size - 1]:
            if c <= level[size - 1]:
                continue
            size -= 1
        # As in the monotone chain of a hull: slopes fall, so the lines that the new one covers come last.
        while size > 0:
            x = (level[size - 1] - c) / (slope[size - 1] - s)
            if x <= start[size - 1]:
                size -= 1
            else:
                break
        start[size] = -np.inf if size == 0 else (level[size - 1] - c) / (slope[size - 1] - s)
        slope[size] = s
        level[size] = c
        size += 1
    return size


@njit(cache=True, nogil=True)
def least_time(x, size, slope, level, start):
    """The height of the envelope at memory ``x``."""
    low = 0
    high = size
    while high - low > 1:
        mid = (low + high) // 2
        if start[mid] <= x:
            low = mid
        else:
            high = mid
    return level[low] - slope[low] * x


@njit(cache=True, nogil=True)
def breakpoints(inside, outside, corner_m, weight_m, weight_t, slope, level, start, limit_m):
    """Compute the memories at which the limit of an entry is evaluated, in even steps of memory and of time.

    Fills ``limit_m`` (BREAKPOINTS,) in ascending order, from the entry's least memory to the largest useful
    one.
    """
    least = inside[0] / weight_m[0]
    most = least
    for c in range(corner_m.shape[0]):
        if corner_m[c] < np.inf:
            most = max(most, corner_m[c] - outside[0] / weight_m[0])
    size = envelope(inside, weight_m, weight_t, slope, level, start)
    # Half of them by memory, for the flat end of a frontier, half by time, for the steep end.
    half = limit_m.shape[0] // 2
    top = least_time(least, size, slope, level, start)
    bottom = least_time(most, size, slope, level, start)
    even = 0
    for i in range(half):  # merge two ascending sequences
        goal = top + (bottom - top) * (i + 0.5) / half
        x = least
        for line in range(size):
            if slope[line] > 0.0:
                x = max(x, (level[line] - goal) / slope[line])
        x = min(x, most)
        while even < half and least + (most - least) * even / half <= x:
            limit_m[i + even] = least + (most - least) * even / half
            even += 1
        limit_m[i + even] = x
    while even < half:
        limit_m[half + even] = least + (most - least) * even / half
        even += 1


@njit(cache=True, nogil=True)
def fill_limits(
    outside, corner_m, corner_t, weight_m, weight_t, slope, level, start, limit_m, limit_t, stack
):
    """Fill ``limit_t[g]`` with the largest time at which a point of memory ``limit_m[g]`` can still be
    useful.

    ``outside`` (W,): the entry's outside message. Between breakpoints the left value applies, because the
    limit never ascends.
    """
    size = envelope(outside, weight_m, weight_t, slope, level, start)
    needed = outside[0] / weight_m[0]
    corners = corner_m.shape[0]
    # The corner without a memory limit admits every completion: it gives the same room at all memories, and
    # is left out of the search for the best corner.
    always = -np.inf
    last = corners
    if corner_m[corners - 1] == np.inf:
        always = corner_t[corners - 1] - level[size - 1] if slope[size - 1] == 0.0 else np.inf
        last = corners - 1
    stack[0, 0] = 0
    stack[0, 1] = limit_m.shape[0]
    stack[0, 2] = 0
    stack[0, 3] = last
    depth = 1
    while depth > 0:
        depth -= 1
        g0, g1, c0, c1 = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
        g = (g0 + g1) // 2
        best = -np.inf
        pick = c0
        for c in range(c0, c1):
            x = corner_m[c] - limit_m[g]
            # This corner has less memory than any completion needs; the best one is further right.
            if x < needed:
                pick = c
                continue
            if corner_t[c] == np.inf:
                best = np.inf
                pick = c
                break
            room = corner_t[c] - least_time(x, size, slope, level, start)
            if room > best:
                best = room
                pick = c
        limit_t[g] = max(best, always)
        # The best corner only moves up with memory: leaner breakpoints need look no further than it, larger
        # ones no earlier.
        if g > g0:
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = g0, g, c0, min(pick + 1, c1)
            depth += 1
        if g + 1 < g1:
            stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = g + 1, g1, pick, c1
            depth += 1
    # Kernels drop whole blocks because the limit never ascends; rounding must not break that.
    for g in range(limit_m.shape[0] - 2, -1, -1):
        limit_t[g] = max(limit_t[g], limit_t[g + 1])


@njit(cache=True, nogil=True)
def reachable_entries(inside, outside, height, roof):
    """(entries,) :func:`reachable` for every row of ``inside`` and ``outside``."""
    found = np.empty(inside.shape[0], np.bool_)
    for e in range(inside.shape[0]):
        found[e] = reachable(inside[e], outside[e], height, roof)
    return found
