"""One search pass: it computes all tables of an elimination program, with pruning, on several threads.

A program (:mod:`tensoropt.search.program`) removes operators from the graph. Its tables have an entry for
each combination of configurations of the operators that remain. An entry has the frontier of partial
strategies. The entries of a table are independent, so the result is the same, bit for bit, for any number of
threads.

Pruning is exact: every partial point that can still reach the frontier is kept. Choices outside entry e
complete a partial point p. Their costs satisfy ``weight_m * memory + weight_t * time >= outside[e, w]`` for
every line w of the hull, which describes a convex region H. The known strategies leave room for better ones
only below and left of the inner corners of their staircase. So p survives iff ``p + h <= u`` for some corner
u and some h in H, that is, iff its time is at most

    limit(memory) = max over corners u of  u.time - H(u.memory - memory)

where H(x) is the least time of a completion within memory x. H is convex, so the best corner moves in one
direction with memory, and divide and conquer finds the limits at all breakpoints (chosen memories). A point
on a corner survives: every value on the true frontier is kept, and the result stays exact.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tensoropt.frontier.kernels import grown, thin, union_of_products
from tensoropt.search.hull import SLACK, Hull, in_parts, thread_count
from tensoropt.search.program import Program, TableTooLargeError, memory_allowance
from tensoropt.types import Floats, Indices
from tensoropt.units import format_bytes

_BREAKPOINTS = 64
"""The number of memories at which the limit of an entry is evaluated; an assumption: fewer prune less, more
cost time per entry. An entry with fewer candidate points than this is not limited at all."""
_NEIGHBOURS = 32
"""The number of neighbouring corners that are checked together: a line above all of them rules them all out,
which halved the CPU time on 1.7 million entries and 27 corners."""


@dataclass(frozen=True, eq=False, slots=True)
class Corners:
    """Inner corners (C) of the known strategies' staircase and lines (W) of the hull, for compiled kernels.

    ``memory``, ``time`` (C,) are the corners, memory ascending; the first time and the last memory may be
    inf. ``height`` (W, C) are the corners' weighted costs, raised by :data:`SLACK` against the rounding of
    sums. ``weight_m``, ``weight_t`` (W,) are each line's weights of memory and time.
    """

    memory: Floats
    time: Floats
    height: Floats
    weight_m: Floats
    weight_t: Floats

    @property
    def roof(self) -> Floats:
        """The largest ``height`` in each block of ``_NEIGHBOURS`` corners, (W, blocks)."""
        return np.maximum.reduceat(self.height, np.arange(0, len(self.memory), _NEIGHBOURS), axis=1)


def corners_of(hull: Hull, memory: Floats, time: Floats, most: int) -> Corners:
    """Return the inner corners of the staircase (memory, time), for pruning. If there are more than ``most``,
    neighbouring ones are merged into one with their largest memory and time, so that pruning stays exact."""
    m = np.append(memory[1:], np.inf)
    t = time.copy()
    if time[-1] * hull.weight_t[-1] <= hull.value[-1]:
        m, t = m[:-1], t[:-1]  # no strategy is faster
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
def _reachable(inside, outside, height, roof):
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
        for c in range(block * _NEIGHBOURS, min((block + 1) * _NEIGHBOURS, count)):
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
def _envelope(values, weight_m, weight_t, slope, level, start):
    """Compute the upper envelope of ``time >= (value - weight_m * memory) / weight_t``; return its size.

    The given lines must be in order of rising weight of time. The envelope's lines are written steepest
    first: the slope, the time at memory 0 (``level``), and the memory from which a line is highest
    (``start``). Each value is lowered by the fraction :data:`SLACK` of itself, as rounding errors grow with
    it.
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
def _least_time(x, size, slope, level, start):
    """Return the time of an envelope, as :func:`_envelope` writes it, at memory ``x``."""
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
def _breakpoints(inside, outside, corner_m, weight_m, weight_t, slope, level, start, limit_m):
    """Fill ``limit_m`` with the memories, ascending, at which the time limit of an entry's points is
    computed: from the entry's least memory to the largest useful one, in even steps of memory and of time."""
    least = inside[0] / weight_m[0]
    most = least
    for c in range(corner_m.shape[0]):
        if corner_m[c] < np.inf:
            most = max(most, corner_m[c] - outside[0] / weight_m[0])
    size = _envelope(inside, weight_m, weight_t, slope, level, start)
    # Half of them by memory, for the flat end of a frontier, half by time, for the steep end.
    half = limit_m.shape[0] // 2
    top = _least_time(least, size, slope, level, start)
    bottom = _least_time(most, size, slope, level, start)
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
def _fill_limits(
    outside, corner_m, corner_t, weight_m, weight_t, slope, level, start, limit_m, limit_t, stack
):
    """Fill ``limit_t[g]`` with the largest useful time of a partial point whose memory is ``limit_m[g]``.

    ``outside`` (W,) are the least weighted costs of the operators that the entry does not cover. The limit
    never ascends with memory, so between two of these memories the limit of the lower one applies.
    """
    size = _envelope(outside, weight_m, weight_t, slope, level, start)
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
            room = corner_t[c] - _least_time(x, size, slope, level, start)
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
    """Return for each table entry whether a strategy that uses it can lie below some corner, (entries,).

    ``inside``, ``outside`` (entries, W): the least weighted costs inside and outside an entry, for each line
    of the hull. ``height`` (W, C): the corners' weighted costs; ``roof``: the largest in each block of
    corners. A block is skipped if a line's bound exceeds its ``roof``.
    """
    reachable_rows = np.empty(inside.shape[0], np.bool_)
    for e in range(inside.shape[0]):
        reachable_rows[e] = _reachable(inside[e], outside[e], height, roof)
    return reachable_rows


_INLINE_WORK = 20_000
"""The estimated sums of points in a step below which threads cost more than they gain; an assumption."""
_ENTRIES_PER_THREAD = 10_000
"""The fewest table entries worth a thread when their reachability is checked; an assumption."""
MOST_SUMS = 1 << 62
"""The limit on sums of points that stands for no limit: more than any machine computes."""
_BYTES_PER_POINT = 20  # 8 bytes each for memory and time, and a 4-byte label


class TooManySumsError(Exception):
    """A search pass has to add up more pairs of partial points than it may."""


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """The frontiers of a table's entries. ``label`` (points,) is the class that the removed operator has."""

    offsets: Indices
    memory: Floats
    time: Floats
    label: NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """The result of one search pass: all tables, input tables first, and whether any entry was thinned."""

    tables: tuple[_Table, ...]
    thinned: bool


@dataclass(frozen=True, eq=False, slots=True)
class Messages:
    """The bounds by which a search pass prunes.

    ``inside``, ``outside`` (entries, W): for each line (weighting of memory and time), the least weighted
    cost of the operators that a table entry covers, and of all others. ``corners`` are those of the known
    strategies' staircase. ``alive`` (entries,) marks entries through which a strategy can lie below a corner.
    """

    inside: Floats
    outside: Floats
    corners: Corners
    alive: NDArray[np.bool_]

    @staticmethod
    def of(inside: Floats, outside: Floats, corners: Corners, threads: int | None = None) -> Messages:
        roof = corners.roof

        def part(first: int, last: int) -> NDArray[np.bool_]:
            return reachable_entries(inside[first:last], outside[first:last], corners.height, roof)

        parts = in_parts(part, len(inside), thread_count(threads), _ENTRIES_PER_THREAD)
        return Messages(inside, outside, corners, np.concatenate(parts))

    def pairs(self, program: Program) -> int:
        """Return how many pairs of table entries a search pass combines if these bounds prune it."""
        first = program.base[program.leaves :]
        if not len(first):
            return 0
        alive = np.add.reduceat(self.alive.astype(np.int64), first)
        return int(alive @ np.array([len(s.left_k) for s in program.steps]))


@njit(cache=True, nogil=True)
def _step_entries(first, last, index, points, bounds, most, allowed):
    """Compute entries ``first:last`` of a step's table; return (counts, memory, time, label, thinned, made).

    ``index``: the step's four index arrays. ``points``: offsets, memory and time of the left, then of the
    right table. ``bounds``: the step's rows of :class:`Messages` (without rows nothing is pruned), then the
    corners and the lines' weights. ``most``: points kept per entry, 0 for all. ``made`` counts added pairs of
    points and examined pairs of entries. Once it exceeds ``allowed``, the rest is not computed.
    """
    left_out, left_k, right_out, right_k = index
    loff, lm, lt, roff, rm, rt = points
    inside, outside, alive, corner_m, corner_t, weight_m, weight_t = bounds
    # Buffers start at 1,024 items, an assumption, and grow; they are allocated once per call and serve all of
    # its entries.
    n_k = left_k.shape[0]
    counts = np.zeros(last - first, np.int64)
    out_m = np.empty(1024)
    out_t = np.empty(1024)
    out_k = np.empty(1024, np.int32)
    m = np.empty(1024)
    t = np.empty(1024)
    k = np.empty(1024, np.int32)
    tm = np.empty(1024)
    tt = np.empty(1024)
    tk = np.empty(1024, np.int32)
    chosen = np.empty(1024, np.int64)
    hull = np.empty(1024, np.int64)
    # Enough for any number of points; see union_of_products.
    runs = np.empty(64, np.int64)
    lines = weight_m.shape[0]
    slope = np.empty(lines)
    level = np.empty(lines)
    start = np.empty(lines)
    # fill_limits halves a range of BREAKPOINTS, so its depth is the logarithm of that.
    stack = np.empty((64, 4), np.int64)
    limit_m = np.empty(_BREAKPOINTS)
    limit_t = np.empty(_BREAKPOINTS)
    left = np.empty(n_k, np.int64)
    right = np.empty(n_k, np.int64)
    pruned = inside.shape[0] > 0
    thinned = False
    end = 0
    made = 0
    for o in range(first, last):
        if pruned and not alive[o]:
            continue
        if made > allowed:
            break
        candidates = 0
        for c in range(n_k):
            left[c] = left_out[o] + left_k[c]
            right[c] = right_out[o] + right_k[c]
            candidates += (loff[left[c] + 1] - loff[left[c]]) * (roff[right[c] + 1] - roff[right[c]])
        made += n_k
        if candidates == 0:
            continue
        use = 0
        # A limit takes BREAKPOINTS evaluations, which so few candidates do not repay.
        if pruned and candidates > _BREAKPOINTS:
            use = _BREAKPOINTS
            _breakpoints(inside[o], outside[o], corner_m, weight_m, weight_t, slope, level, start, limit_m)
            _fill_limits(
                outside[o], corner_m, corner_t, weight_m, weight_t, slope, level, start,
                limit_m, limit_t, stack,
            )  # fmt: skip
        n, m, t, k, tm, tt, tk, sums = union_of_products(
            left, right, loff, lm, lt, roff, rm, rt, limit_m[:use], limit_t[:use], m, t, k, tm, tt, tk, runs
        )
        made += sums
        kept = n
        if most > 0 and n > most:
            if n > chosen.shape[0]:
                chosen = np.empty(2 * n, np.int64)
                hull = np.empty(2 * n, np.int64)
            kept = thin(m, t, n, most, chosen, hull)
            thinned = True
            for i in range(kept):
                m[i] = m[chosen[i]]
                t[i] = t[chosen[i]]
                k[i] = k[chosen[i]]
        if end + kept > out_m.shape[0]:
            out_m = grown(out_m, end + kept)
            out_t = grown(out_t, end + kept)
            out_k = grown(out_k, end + kept)
        for i in range(kept):
            out_m[end + i] = m[i]
            out_t[end + i] = t[i]
            out_k[end + i] = k[i]
        counts[o - first] = kept
        end += kept
    return counts, out_m[:end], out_t[:end], out_k[:end], thinned, made


# Arrays without rows instead of None, so that one compiled kernel serves passes with and without pruning.
_NO_ROWS = np.empty((0, 1))
_NO_LINES = np.empty(0)
_ALL_ALIVE = np.empty(0, np.bool_)


class ProgramRunner:
    """A runner of search passes over one elimination program, with the requested number of threads."""

    def __init__(self, program: Program, threads: int | None) -> None:
        self.program = program
        self.threads = thread_count(threads)
        self.leaves = tuple(
            _Table(leaf.offsets, leaf.memory, leaf.time, np.zeros(len(leaf.memory), np.int32))
            for leaf in program.reduced.leaves
        )
        # The empty product: one point that costs nothing.
        self.leaves += (_Table(np.array([0, 1]), np.zeros(1), np.zeros(1), np.zeros(1, np.int32)),)

    def run_pass(self, messages: Messages | None, most: int, sums: int = MOST_SUMS) -> Pass:
        """Compute all tables of the program, keeping ``most`` points per table entry (0: all).

        ``messages`` are the bounds that prune; None for no pruning. Raises :class:`TableTooLargeError` if the
        tables outgrow :func:`memory_allowance`, and :class:`TooManySumsError` if the pass adds more than
        ``sums`` pairs of points (examined pairs of table entries count as well).
        """
        tables = list(self.leaves)
        thinned, made = False, 0
        allowance, used = memory_allowance(), 0
        with ThreadPoolExecutor(self.threads) as pool:
            for n, step in enumerate(self.program.steps):
                left, right = tables[step.left], tables[step.right]
                index = (step.left_out, step.left_k, step.right_out, step.right_k)
                points = (left.offsets, left.memory, left.time, right.offsets, right.memory, right.time)
                size = len(step.left_out)
                if messages is None:
                    bounds = (_NO_ROWS, _NO_ROWS, _ALL_ALIVE, *(_NO_LINES,) * 4)
                else:
                    base, c = int(self.program.base[self.program.leaves + n]), messages.corners
                    rows, lines = slice(base, base + size), (c.memory, c.time, c.weight_m, c.weight_t)
                    bounds = (messages.inside[rows], messages.outside[rows], messages.alive[rows], *lines)
                work = size * len(step.left_k)
                work *= 1 + len(left.memory) // len(left.offsets) + len(right.memory) // len(right.offsets)
                # Entries differ much in cost, so each thread gets several parts; eight is an assumption.
                # Results are taken in the order of the parts, whichever ends first.
                parts = min(size, 8 * self.threads) if self.threads > 1 and work > _INLINE_WORK else 1
                given = index, points, bounds, most, sums - made
                if parts == 1:
                    results = [_step_entries(0, size, *given)]
                else:
                    spans = pairwise(size * i // parts for i in range(parts + 1))
                    jobs = [pool.submit(_step_entries, a, b, *given) for a, b in spans]
                    results = [j.result() for j in jobs]
                # A part that stops has made more than is left for all parts together, so this does not depend
                # on how the entries are distributed.
                made += sum(f[5] for f in results)
                if made > sums:
                    raise TooManySumsError(f"a pass adds more than {sums} pairs of partial strategies")
                tables.append(_joined(results))
                # Only now is it known how many points survive.
                used += _BYTES_PER_POINT * len(tables[-1].memory)
                if used > allowance:
                    raise TableTooLargeError(
                        f"after {n + 1} of {len(self.program.steps)} tables the search takes "
                        f"{format_bytes(used)}, more than half of the free memory; set epsilon or max_points"
                    )
                thinned = thinned or any(f[4] for f in results)
        return Pass(tuple(tables), thinned)


def _joined(parts: list[tuple[Indices, Floats, Floats, NDArray[np.int32], bool, int]]) -> _Table:
    # A single part is copied as well, which frees its spare room.
    counts, memory, time, label = (np.concatenate([p[i] for p in parts]) for i in range(4))
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return _Table(offsets, memory, time, label)
