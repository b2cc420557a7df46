"""One pass of frontiers up a program, pruned and thinned, on several threads.

Every entry of a step's table is computed independently, so the result does not depend on how entries are
distributed: the bytes are the same for any number of threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tensoropt.frontier.kernels import grown, thin, union_of_products
from tensoropt.search.limits import BREAKPOINTS, Corners, breakpoints, fill_limits, reachable_entries
from tensoropt.search.memory import TableTooLargeError, memory_allowance
from tensoropt.search.program import Program
from tensoropt.search.threads import in_parts, thread_count
from tensoropt.types import Floats, Indices
from tensoropt.units import format_bytes

INLINE_WORK = 20_000
"""The estimated sums of a step below which threads cost more than they gain; an assumption."""
ENTRIES_PER_THREAD = 10_000
"""The most entries for which one thread checks whether they can reach a corner; an assumption."""
MOST_SUMS = 1 << 62
"""The sums of a pass without a limit: more than any machine computes."""
BYTES_PER_POINT = 20  # 8 bytes each for memory and time, and a 4-byte label


class TooManySumsError(Exception):
    """Raised by a pass that needs more sums than it may make."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """The frontiers of all entries, flat; ``label`` (points,) int32 says which k of the step won."""

    offsets: Indices
    memory: Floats
    time: Floats
    label: NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Pass:
    """All tables of one pass (including leaves), and whether any entry was thinned."""

    tables: tuple[Table, ...]
    thinned: bool

    @property
    def points(self) -> int:
        """The points of all tables together."""
        return sum(len(t.memory) for t in self.tables)


@dataclass(frozen=True, eq=False, slots=True)
class Messages:
    """The scalar bounds (entries, W) of every entry, inside and outside, and the corners to beat.

    ``alive`` (entries,): the entries that can reach some corner.
    """

    inside: Floats
    outside: Floats
    corners: Corners
    alive: NDArray[np.bool_]

    @staticmethod
    def of(inside: Floats, outside: Floats, corners: Corners, threads: int | None = None) -> Messages:
        roof = corners.roof
        expected = len(inside), len(corners.height)
        assert inside.shape == outside.shape == expected, (
            f"bounds {inside.shape}, {outside.shape}: {expected}"
        )

        def part(first: int, last: int) -> NDArray[np.bool_]:
            return reachable_entries(inside[first:last], outside[first:last], corners.height, roof)

        parts = in_parts(part, len(inside), thread_count(threads), ENTRIES_PER_THREAD)
        return Messages(inside, outside, corners, np.concatenate(parts))

    def pairs(self, program: Program) -> int:
        """The number of pairs of entries that a pass has to examine."""
        first = program.base[program.leaves :]
        if not len(first):
            return 0
        alive = np.add.reduceat(self.alive.astype(np.int64), first)
        return int(alive @ np.array([len(s.left_k) for s in program.steps]))


@njit(cache=True, nogil=True)
def step_entries(
    first,
    last,
    left_out,
    left_k,
    right_out,
    right_k,
    loff,
    lm,
    lt,
    roff,
    rm,
    rt,
    inside,
    outside,
    corner_m,
    corner_t,
    alive,
    weight_m,
    weight_t,
    most,
    allowed,
):
    """Compute entries ``first:last`` of a step; return (counts, memory, time, label, thinned, made).

    ``inside``, ``outside`` (entries, W), ``alive`` (entries,): the step's rows, or no rows for no pruning.
    ``most``: points kept per entry, 0 for all. ``made``: sums of points, and pairs of entries examined; once
    they exceed ``allowed``, the rest is not computed.
    """
    # The signature is long because numba takes arrays and no dataclasses. Buffers start at 1,024 items, an
    # assumption, and grow; they are allocated once per call and serve all of its entries.
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
    limit_m = np.empty(BREAKPOINTS)
    limit_t = np.empty(BREAKPOINTS)
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
        if pruned and candidates > BREAKPOINTS:
            use = BREAKPOINTS
            breakpoints(inside[o], outside[o], corner_m, weight_m, weight_t, slope, level, start, limit_m)
            fill_limits(
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
    """The runner of one program's passes, which owns the threads."""

    def __init__(self, program: Program, threads: int | None) -> None:
        self.program = program
        self.threads = thread_count(threads)
        reduced = program.reduced
        self.leaves = tuple(
            Table(leaf.offsets, leaf.memory, leaf.time, np.zeros(len(leaf.memory), np.int32))
            for leaf in reduced.leaves
        )
        # The empty product: one point that costs nothing.
        self.leaves += (Table(np.array([0, 1]), np.zeros(1), np.zeros(1), np.zeros(1, np.int32)),)

    def run_pass(self, messages: Messages | None, most: int, sums: int = MOST_SUMS) -> Pass:
        """Run one pass over all steps, keeping ``most`` points per entry (0: all).

        Raises :class:`TableTooLargeError` before the tables outgrow :func:`memory_allowance`, and
        :class:`TooManySumsError` if it takes more than ``sums`` sums of points and pairs of entries.
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
                    rest = (_NO_ROWS, _NO_ROWS, _NO_LINES, _NO_LINES, _ALL_ALIVE, *(_NO_LINES,) * 2)
                else:
                    base = int(self.program.base[self.program.leaves + n])
                    c = messages.corners
                    rows = slice(base, base + size)
                    rest = (
                        messages.inside[rows], messages.outside[rows], c.memory, c.time, messages.alive[rows],
                        c.weight_m, c.weight_t,
                    )  # fmt: skip
                work = size * len(step.left_k)
                work *= 1 + len(left.memory) // len(left.offsets) + len(right.memory) // len(right.offsets)
                # Entries differ much in cost, so each thread gets several parts; eight is an assumption.
                # Results are taken in the order of the parts, whichever ends first.
                parts = min(size, 8 * self.threads) if self.threads > 1 and work > INLINE_WORK else 1
                ends = [size * i // parts for i in range(parts + 1)]
                spans = list(pairwise(ends))
                if parts == 1:
                    found = [step_entries(0, size, *index, *points, *rest, most, sums - made)]
                else:
                    given = (*index, *points, *rest, most, sums - made)
                    jobs = [pool.submit(step_entries, a, b, *given) for a, b in spans]
                    found = [j.result() for j in jobs]
                # A part that stops has made more than is left for all parts together, so this does not depend
                # on how the entries are distributed.
                made += sum(f[5] for f in found)
                if made > sums:
                    raise TooManySumsError(f"a pass takes more than {sums} sums")
                tables.append(_joined(found))
                # Only now is it known how many points survive.
                used += BYTES_PER_POINT * len(tables[-1].memory)
                if used > allowance:
                    raise TableTooLargeError(
                        f"after {n + 1} of {len(self.program.steps)} tables the frontiers take "
                        f"{format_bytes(used)}, more than half of the free memory; set epsilon or max_points"
                    )
                thinned = thinned or any(f[4] for f in found)
        return Pass(tuple(tables), thinned)


def _joined(parts: list[tuple[Indices, Floats, Floats, NDArray[np.int32], bool, int]]) -> Table:
    if len(parts) == 1:
        counts, memory, time, label, *_ = parts[0]
        memory, time, label = memory.copy(), time.copy(), label.copy()  # free the spare room
    else:
        counts, memory, time, label = (np.concatenate([p[i] for p in parts]) for i in range(4))
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return Table(offsets, memory, time, label)
