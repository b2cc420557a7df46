"""Numba kernels on staircases (Pareto frontiers of memory and time): thinning, and unions of products.

A staircase is a pair of arrays: memory strictly ascending, time strictly descending. Costs are multiples of a
power of two, so that sums are exact in any order. ``fastmath`` is off because ``inf`` marks impossible costs.
``nogil`` is set because the search runs threads. ``tests/naive.py`` has plain versions of all kernels.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# The number of points that append_shifted drops with one comparison. An assumption: larger blocks are dropped
# less often, smaller ones need more comparisons.
_BLOCK = 16


@njit(cache=True, nogil=True)
def grown(array, size):
    """Return a copy of ``array`` with room for at least ``size`` items."""
    larger = np.empty(max(size, 2 * array.shape[0]), array.dtype)
    for i in range(array.shape[0]):  # a slice assignment takes twenty times longer to compile
        larger[i] = array[i]
    return larger


@njit(cache=True, nogil=True)
def _merge_runs(m, t, k, start, middle, end, tm, tt, tk):
    """Merge the staircases in ``start:middle`` and ``middle:end`` in place; return the new end.

    The arrays are memory ``m``, time ``t`` and labels ``k``. Of equal points that of the first staircase is
    kept, so that the result does not depend on how work was split. ``tm, tt, tk`` are scratch arrays with
    room for the first staircase.
    """
    # Only the first run is copied: when j - middle + i points have been read, at most as many have been
    # written from ``start`` on, so writing never overtakes reading in the second run.
    n = middle - start
    for i in range(n):
        tm[i] = m[start + i]
        tt[i] = t[start + i]
        tk[i] = k[start + i]
    i = 0
    j = middle
    out = start
    best = np.inf
    while i < n or j < end:
        # At equal costs the first run's point wins, and the other then fails to improve on ``best``.
        if j == end or (i < n and (tm[i] < m[j] or (tm[i] == m[j] and tt[i] <= t[j]))):
            memory, time, label = tm[i], tt[i], tk[i]
            i += 1
        else:
            memory, time, label = m[j], t[j], k[j]
            j += 1
        if time < best:
            best = time
            m[out] = memory
            t[out] = time
            k[out] = label
            out += 1
    return out


@njit(cache=True, nogil=True)
def _locate(limit_m, value):
    """Return the index of the last item of ascending ``limit_m`` that is at most ``value``; -1 for none."""
    low = 0
    high = limit_m.shape[0]
    while low < high:
        mid = (low + high) // 2
        if limit_m[mid] <= value:
            low = mid + 1
        else:
            high = mid
    return low - 1


@njit(cache=True, nogil=True)
def _append_shifted(m, t, k, end, sm, st, first, last, dm, dt, label, limit_m, limit_t):
    """Append the points ``first:last`` of (sm, st), each plus (dm, dt), to (m, t); return the new end.

    Each gets ``label`` in k. A point is dropped if its time exceeds ``limit_t[g]``, where ``limit_m[g]`` is
    the last item up to its memory. A block of points is skipped if its least memory and least time together
    are above the limit. This skips no other points, because the limit never ascends.
    """
    count = limit_m.shape[0]
    # An array without breakpoints means no limit; for None, numba would compile the kernel a second time.
    if count == 0:
        for i in range(first, last):
            m[end] = sm[i] + dm
            t[end] = st[i] + dt
            k[end] = label
            end += 1
        return end
    g = _locate(limit_m, sm[first] + dm)
    # The ideal corner of the whole run: its least memory and its least time.
    if g >= 0 and st[last - 1] + dt > limit_t[g]:
        return end
    start = first
    while start < last:
        stop = min(start + _BLOCK, last)
        x = sm[start] + dm
        while g + 1 < count and limit_m[g + 1] <= x:
            g += 1
        if g < 0 or st[stop - 1] + dt <= limit_t[g]:
            for i in range(start, stop):
                x = sm[i] + dm
                y = st[i] + dt
                while g + 1 < count and limit_m[g + 1] <= x:
                    g += 1
                if g < 0 or y <= limit_t[g]:
                    m[end] = x
                    t[end] = y
                    k[end] = label
                    end += 1
        start = stop
    return end


@njit(cache=True, nogil=True)
def union_of_products(left, right, loff, lm, lt, roff, rm, rt, limit_m, limit_t, m, t, k, tm, tt, tk, runs):
    """Return the frontier of all sums of points of staircases ``left[c]`` and ``right[c]``, for all c.

    ``left``, ``right`` (C,) index two flat tables of staircases (offsets, memory, time). Sums above the limit
    (``limit_m``, ``limit_t``) are dropped; c becomes the label ``k`` of a sum. The longer staircase, shifted
    by one point of the shorter, is a sorted run (``runs``: scratch). Runs are merged like a binary counter,
    in O(log runs) merges per point (output-sensitive Pareto sum; cf. Funke et al., arXiv 2409.10232). Returns
    (count, m, t, k, tm, tt, tk, made): the result in ``m[:count]``, ``t[:count]`` and ``k[:count]``, scratch
    arrays that may have grown, and the number of sums written and shifts tried.
    """
    made = np.int64(0)
    depth = np.int64(0)
    end = np.int64(0)  # a literal would make numba compile the helpers twice
    for c in range(left.shape[0]):
        a0 = loff[left[c]]
        a1 = loff[left[c] + 1]
        b0 = roff[right[c]]
        b1 = roff[right[c] + 1]
        if a0 == a1 or b0 == b1:
            continue
        # The same test on the ideal corner of the whole product, before any of its shifts is made.
        if limit_m.shape[0] > 0:
            g = _locate(limit_m, lm[a0] + rm[b0])
            if g >= 0 and lt[a1 - 1] + rt[b1 - 1] > limit_t[g]:
                continue
        # The longer factor is the one that is shifted: this gives fewer and longer runs to merge.
        swap = a1 - a0 > b1 - b0
        if swap:
            shifts0, shifts1, length = b0, b1, a1 - a0
        else:
            shifts0, shifts1, length = a0, a1, b1 - b0
        for s in range(shifts0, shifts1):
            if end + length > m.shape[0]:
                m = grown(m, end + length)
                t = grown(t, end + length)
                k = grown(k, end + length)
                tm = grown(tm, end + length)
                tt = grown(tt, end + length)
                tk = grown(tk, end + length)
            if swap:
                stop = _append_shifted(m, t, k, end, lm, lt, a0, a1, rm[s], rt[s], c, limit_m, limit_t)
            else:
                stop = _append_shifted(m, t, k, end, rm, rt, b0, b1, lm[s], lt[s], c, limit_m, limit_t)
            made += 1 + stop - end
            if stop == end:
                continue
            runs[depth] = end
            depth += 1
            end = stop
            # Each run stays more than twice as long as the next one, so ``runs`` needs only one slot per
            # power of two: the caller's 64 suffice for any number of points.
            while depth > 1 and runs[depth - 1] - runs[depth - 2] <= 2 * (end - runs[depth - 1]):
                end = _merge_runs(m, t, k, runs[depth - 2], runs[depth - 1], end, tm, tt, tk)
                depth -= 1
    while depth > 1:
        end = _merge_runs(m, t, k, runs[depth - 2], runs[depth - 1], end, tm, tt, tk)
        depth -= 1
    return end, m, t, k, tm, tt, tk, made


@njit(cache=True, nogil=True)
def thin(m, t, n, wanted, chosen, hull):
    """Choose at most ``wanted`` of ``n`` points: the ends, and in each section the point nearest the hull.

    Sections have equal length along the curve, with both costs scaled to the unit square. The hull is the
    lower convex hull of the points (Andrew's monotone chain). ``chosen`` and ``hull`` are int64 scratch
    arrays (n,). The ascending indices are written to ``chosen``; the return value is their number. All points
    are chosen if ``wanted`` is below 2.
    """
    if n <= wanted or wanted < 2:
        for i in range(n):
            chosen[i] = i
        return n
    size = 0
    for i in range(n):
        while size > 1:
            a = hull[size - 2]
            b = hull[size - 1]
            # A turn that is not strictly convex, including collinear points, removes the middle point.
            if (m[b] - m[a]) * (t[i] - t[a]) - (t[b] - t[a]) * (m[i] - m[a]) <= 0:
                size -= 1
            else:
                break
        hull[size] = i
        size += 1
    # Options that differ by less than the grid of costs have equal memory or time.
    width = m[n - 1] - m[0] if m[n - 1] > m[0] else 1.0
    height = t[0] - t[n - 1] if t[0] > t[n - 1] else 1.0
    # The two ends are always chosen.
    cells = wanted - 2
    count = 1
    chosen[0] = 0
    h = 0
    current = -1
    nearest = np.inf
    for i in range(1, n - 1 if cells > 0 else 0):
        while hull[h + 1] < i:
            h += 1
        a = hull[h]
        b = hull[h + 1]
        run = m[b] - m[a]
        slope = (t[b] - t[a]) / run if run > 0.0 else 0.0
        # In the unit square a point lies ``above`` its hull edge; along the diagonal, with both costs lowered
        # by the same share of their spans, it is this far away. The slope is not positive, so nothing divides
        # by 0.
        above = (t[i] - t[a] - slope * (m[i] - m[a])) / height
        distance = above / (1.0 - slope * width / height)
        along = ((m[i] - m[0]) / width + (t[0] - t[i]) / height) * 0.5
        cell = min(int(along * cells), cells - 1)
        if cell != current:
            current = cell
            nearest = distance
            chosen[count] = i
            count += 1
        elif distance < nearest:
            nearest = distance
            chosen[count - 1] = i
    chosen[count] = n - 1
    return count + 1


@njit(cache=True, nogil=True)
def find_pair(am, at, bm, bt, memory, time):
    """Return (i, j) for which point i of a plus point j of b is (memory, time) exactly; else (-1, -1)."""
    # Both staircases ascend in memory, so j only descends while i ascends: linear time.
    j = bm.shape[0] - 1
    for i in range(am.shape[0]):
        while j >= 0 and am[i] + bm[j] > memory:
            j -= 1
        if j < 0:
            break
        # Exact comparison of sums is valid only on a dyadic grid. Several pairs may share the memory, so the
        # time decides.
        if am[i] + bm[j] == memory and at[i] + bt[j] == time:
            return i, j
    return -1, -1
