"""The lower convex hull of the frontier: its lines bound all strategies, its vertices are strategies.

The hull is found chord by chord (dichotomic search; Aneja and Nair 1979): between two neighbouring vertices,
the weights normal to their chord either prove that nothing lies below the chord or give a new vertex between
them.

The scalar problem min(weight_t * time + weight_m * memory) is solved exactly for many weights at once. One
pass through the tables of an elimination program, up from its input tables, gives the least weighted cost of
every table entry. One pass down gives the least cost of everything *outside* an entry (the two messages of
min-sum belief propagation on a junction tree; Aji and McEliece 2000). Their sum bounds every strategy through
that entry from below. The strategies that result are the vertices of the lower convex hull of the frontier.

Work is divided among threads. The kernels release Python's lock, so threads of one process use all cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numba import njit

from tensoropt.search.bounds import lower_hull
from tensoropt.search.program import Program
from tensoropt.types import Floats, Indices


@dataclass(frozen=True, eq=False, slots=True)
class _Flat:
    """An elimination program as flat arrays for compiled kernels.

    ``index`` is ``meta`` (steps, 7), then ``left_out``, ``left_k``, ``right_out``, ``right_k`` of all steps.
    A row of ``meta`` has the first entries of the result, the left and the right table, the lengths of the
    step's ``left_out`` and ``left_k``, and where these begin. ``leaves`` are offsets, memory and time of all
    input tables. ``tree`` (logical, 4) has for each logical node (use of a table) the table's first entry,
    its step (-1 for input tables), and the left and right child nodes.
    """

    index: tuple[Indices, Indices, Indices, Indices, Indices]
    leaves: tuple[Indices, Floats, Floats]
    tree: Indices
    entries: int


def flatten(program: Program) -> _Flat:
    """Return a program as flat arrays: the index arrays of all steps, and the points of all input tables."""
    rows, at_out, at_k = [], 0, 0
    for n, step in enumerate(program.steps):
        out = program.base[program.leaves + n]
        sides = program.base[step.left], program.base[step.right]
        rows.append((out, *sides, len(step.left_out), len(step.left_k), at_out, at_k))
        at_out += len(step.left_out)
        at_k += len(step.left_k)
    left_out, left_k, right_out, right_k = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(step, name) for step in program.steps)])
        for name in ("left_out", "left_k", "right_out", "right_k")
    )
    index = np.array(rows, np.int64).reshape(-1, 7), left_out, left_k, right_out, right_k
    _, offsets, memory, time = program.reduced.points()
    # The last leaf is the empty product, whose single point costs nothing.
    leaves = np.append(offsets, offsets[-1] + 1), np.append(memory, 0.0), np.append(time, 0.0)
    tree = np.full((len(program.logical), 4), -1, np.int64)
    for i, node in enumerate(program.logical):
        step_index = node.table - program.leaves
        tree[i] = program.base[node.table], max(step_index, -1), node.left, node.right
    return _Flat(index, leaves, tree, program.entries)


@njit(cache=True, nogil=True)
def leaf_values(leaf_offsets, leaf_m, leaf_t, wm, wt, entries):
    """Return the least weighted cost of each entry of input tables, (entries, W); inf for other tables."""
    count = wm.shape[0]
    value = np.full((entries, count), np.inf)
    for e in range(leaf_offsets.shape[0] - 1):
        for p in range(leaf_offsets[e], leaf_offsets[e + 1]):
            for w in range(count):
                x = wm[w] * leaf_m[p] + wt[w] * leaf_t[p]
                if x < value[e, w]:
                    value[e, w] = x
    return value


@njit(cache=True, nogil=True)
def pass_up(meta, left_out, left_k, right_out, right_k, value):
    """Fill ``value`` (entries, W), set for input tables, with the least weighted cost of other entries."""
    count = value.shape[1]
    for s in range(meta.shape[0]):
        out, left, right, n_out, n_k, at_out, at_k = meta[s]
        for o in range(n_out):
            row = value[out + o]
            for k in range(n_k):
                a = value[left + left_out[at_out + o] + left_k[at_k + k]]
                b = value[right + right_out[at_out + o] + right_k[at_k + k]]
                for w in range(count):
                    x = a[w] + b[w]
                    row[w] = x if x < row[w] else row[w]


@njit(cache=True, nogil=True)
def _pass_down(meta, left_out, left_k, right_out, right_k, value, outside, first, last):
    """Fill columns ``first:last`` of ``outside`` (entries, W): the least weighted cost outside each entry.

    ``outside`` must be 0 at the root and inf elsewhere. A table that is used several times (identical layers)
    gets the least over its uses.
    """
    # Backwards: all uses of a table come after it, so its row is final when its own turn comes.
    for s in range(meta.shape[0] - 1, -1, -1):
        out, left, right, n_out, n_k, at_out, at_k = meta[s]
        for o in range(n_out):
            above = outside[out + o]
            # Anything impossible under one weight is impossible under all.
            if value[out + o, first] == np.inf or above[first] == np.inf:
                continue
            for k in range(n_k):
                i = left + left_out[at_out + o] + left_k[at_k + k]
                j = right + right_out[at_out + o] + right_k[at_k + k]
                a, b, oa, ob = value[i], value[j], outside[i], outside[j]
                if a[first] == np.inf or b[first] == np.inf:
                    continue
                for w in range(first, last):
                    x = above[w] + b[w]
                    oa[w] = x if x < oa[w] else oa[w]
                    y = above[w] + a[w]
                    ob[w] = y if y < ob[w] else ob[w]
    return outside


@njit(cache=True, nogil=True)
def descend(
    meta, left_out, left_k, right_out, right_k, leaf_offsets, leaf_m, leaf_t, tree, root, value, wm, wt
):
    """Find a strategy of least weighted cost for each of W weightings, by descending the tree of tables.

    Returns memory (W,), time (W,) and, per logical node (use of a table), entry (logical, W) and choice
    (logical, W): the class k of the removed operator, or the point of an input table. Of choices with equal
    costs the first is taken.
    """
    count = value.shape[1]
    nodes = tree.shape[0]
    memory = np.zeros(count)
    time = np.zeros(count)
    entry = np.zeros((nodes, count), np.int64)
    choice = np.full((nodes, count), -1, np.int32)
    stack = np.empty(nodes + 1, np.int64)
    for w in range(count):
        stack[0] = root
        depth = 1
        while depth > 0:
            depth -= 1
            node = stack[depth]
            base, s, left_node, right_node = tree[node]
            e = entry[node, w]
            if s < 0:
                best = np.inf
                pick = -1
                for p in range(leaf_offsets[base + e], leaf_offsets[base + e + 1]):
                    x = wm[w] * leaf_m[p] + wt[w] * leaf_t[p]
                    if x < best:
                        best = x
                        pick = p
                choice[node, w] = pick - leaf_offsets[base + e]
                memory[w] += leaf_m[pick]
                time[w] += leaf_t[pick]
                continue
            # The best k is recomputed instead of being kept from the pass up: a strategy needs one entry per
            # node, whereas a pass would have to keep all of them.
            _, left, right, _, n_k, at_out, at_k = meta[s]
            i = left_out[at_out + e]
            j = right_out[at_out + e]
            best = np.inf
            pick = 0
            for k in range(n_k):
                x = value[left + i + left_k[at_k + k], w] + value[right + j + right_k[at_k + k], w]
                if x < best:
                    best = x
                    pick = k
            choice[node, w] = pick
            entry[left_node, w] = i + left_k[at_k + pick]
            entry[right_node, w] = j + right_k[at_k + pick]
            stack[depth] = left_node
            stack[depth + 1] = right_node
            depth += 2
    return memory, time, entry, choice


_PartResult = TypeVar("_PartResult")


def thread_count(threads: int | None) -> int:
    """Return the requested number of threads; by default one per core."""
    # The cores that this process may use; taskset or a container can restrict them.
    return max(1, threads if threads is not None else len(os.sched_getaffinity(0)))


def in_parts(
    function: Callable[[int, int], _PartResult], size: int, threads: int, least: int = 1
) -> list[_PartResult]:
    """Call ``function(first, last)`` for parts of ``range(size)``, a thread each; return results in order.

    Args:
        least: the smallest part that is worth a thread.
    """
    parts = max(1, min(threads, size // max(least, 1)))
    spans = list(pairwise([size * i // parts for i in range(parts + 1)]))
    if parts == 1:
        return [function(*spans[0])]
    with ThreadPoolExecutor(parts) as pool:
        return [job.result() for job in [pool.submit(function, *span) for span in spans]]


SLACK = 2e-12
"""The share by which bounds are lowered. A weighted sum over n tables rounds by at most n ulps (1.1e-16
each), so this covers sums over 18,000 tables."""


@dataclass(frozen=True, eq=False, slots=True)
class Hull:
    """The lower convex hull of the frontier: lines that bound all strategies, and strategies at its vertices.

    Lines, sorted by weight of time: every strategy has ``weight_m * memory + weight_t * time >= value`` (W,).
    The first line has weight_t == 0 (least memory), the last weight_m == 0 (least time). Their nonzero
    weights are powers of two, so their values are exact. Vertices: ``memory``, ``time`` (V,) of strategies.
    ``picks`` has for each vertex the table entry and point of every operator and edge, (operators + edges,
    2).
    """

    weight_m: Floats
    weight_t: Floats
    value: Floats
    memory: Floats
    time: Floats
    picks: tuple[Indices, ...]

    def bounds(self, memory: Floats) -> Floats:
        """Return lower bounds on the time within each memory budget, (n,); inf below the least memory."""
        with np.errstate(invalid="ignore", divide="ignore"):
            # The ends are exact and need no slack; the lines between them do.
            slack = SLACK * np.abs(self.value[1:-1])
            lines = (self.value[1:-1] - slack - self.weight_m[1:-1] * memory[:, None]) / self.weight_t[1:-1]
            lines = np.where(np.isnan(lines), -np.inf, lines)
        last = self.value[-1] / self.weight_t[-1]  # a power of two: exact
        lower = np.maximum(lines.max(axis=1, initial=-np.inf), last)
        return np.where(self.weight_m[0] * memory < self.value[0], np.inf, lower)


def _power_of_two(value: float) -> float:
    """Return a power of two above ``value`` and at most twice as large; 1 for 0."""
    return 2.0 ** math.frexp(value)[1] if value > 0 else 1.0


_LINES_PER_THREAD = 4
"""The fewest lines worth a separate thread: one pass serves several lines at nearly the cost of one."""


class HullSearch:
    """A search for lines and vertices of the frontier's lower convex hull, a few weightings per round."""

    def __init__(self, program: Program, threads: int | None = None) -> None:
        self.program, self.flat, self.threads = program, flatten(program), thread_count(threads)
        self.root = int(program.base[program.logical[program.root].table])
        self.weight_m: list[float] = []
        self.weight_t: list[float] = []
        self.values: list[float] = []
        self.tables: list[tuple[Indices, Floats]] = []  # lines, and the least cost of every entry for them
        self.points: dict[tuple[float, float], Indices] = {}
        self.done: set[tuple[float, ...]] = set()
        self.span_m = self.span_t = 1.0
        self._messages: tuple[Floats, Floats] | None = None

    def solve(self, weight_m: list[float], weight_t: list[float]) -> list[tuple[float, float]]:
        """Find a strategy of least weighted cost per weighting; return their costs, [] if there is none."""
        f = self.flat
        wm, wt = np.array(weight_m), np.array(weight_t)

        def part(first: int, last: int) -> tuple[Floats, tuple[Floats, Floats, Indices, Indices] | None]:
            weights = wm[first:last], wt[first:last]
            table = leaf_values(*f.leaves, *weights, f.entries)
            pass_up(*f.index, table)
            # Anything impossible under one weight is impossible under all.
            if not np.isfinite(table[self.root]).all():
                return table, None
            return table, descend(*f.index, *f.leaves, f.tree, self.program.root, table, *weights)

        costs: list[tuple[float, float]] = []
        n = self.program.inputs
        for table, solution in in_parts(part, len(wm), self.threads, _LINES_PER_THREAD):
            if solution is None:
                return []
            memory, time, entry, choice = solution
            points = list(zip(memory.tolist(), time.tolist(), strict=True))
            at = len(self.values)
            self.tables.append((np.arange(at, at + len(points)), table))
            self.values += table[self.root].tolist()
            for w, point in enumerate(points):
                # Of strategies with equal costs the first one stays, whatever is solved later.
                self.points.setdefault(point, np.stack([entry[:n, w], choice[:n, w]], axis=1))
            costs += points
        self.weight_m += weight_m
        self.weight_t += weight_t
        self._messages = None
        return costs

    def find_hull(self, lines: int) -> Hull | None:
        """Search until the hull is complete or has ``lines`` lines, but at least 4, and return it; None if
        there is no strategy."""
        if not self.values and not self._ends():
            return None
        while len(self.values) < lines:
            # Each round at most doubles the lines: one pass serves many weights, while later chords are
            # chosen among better ones.
            chords = self._open_chords(min(max(2, len(self.values)), lines - len(self.values)))
            if not chords:
                break
            self.solve(
                # The weights normal to the chord. Dividing by both spans, which are powers of two, keeps them
                # near 1 and changes no bit of their digits.
                [(a[1] - b[1]) / self.span_t / self.span_m for a, b in chords],
                [(b[0] - a[0]) / self.span_m / self.span_t for a, b in chords],
            )
            self.done.update((*a, *b) for a, b in chords)
        return self._result()

    def repeat(self, hull: Hull) -> None:
        """Begin with the weightings of every second line of ``hull``, which was found for the same graph with
        more classes. They are solved in one call; later rounds may add the lines between."""
        if self._ends():
            self.solve(hull.weight_m[1:-1:2].tolist(), hull.weight_t[1:-1:2].tolist())

    @property
    def complete(self) -> bool:
        """Whether every vertex of the hull is known."""
        return bool(self.values) and not self._open_chords(1)

    def _ends(self) -> bool:
        largest_m, largest_t = (_power_of_two(float(costs.max())) for costs in self.flat.leaves[1:])
        ends = self.solve([1 / largest_m, 0.0], [0.0, 1 / largest_t])
        if not ends:
            return False
        self.span_m = span_m = _power_of_two(abs(ends[1][0] - ends[0][0]))
        self.span_t = span_t = _power_of_two(abs(ends[1][1] - ends[0][1]))
        # An assumption: small enough to usually leave the ends where they are, large enough to count in a
        # float64.
        tiny = 2.0**-24
        # nearly lexicographic ends: the leanest strategy that is fast, the fastest that is lean
        self.solve([1 / span_m, tiny / span_m], [tiny / span_t, 1 / span_t])
        return True

    def _open_chords(self, wanted: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        hull = lower_hull(sorted(self.points))
        chords = [(a, b) for a, b in pairwise(hull) if (*a, *b) not in self.done]
        # a chord matters by the product of its shares of memory and of time
        chords.sort(
            key=lambda c: -((c[1][0] / max(c[0][0], 1e-300) - 1) * (c[0][1] / max(c[1][1], 1e-300) - 1))
        )
        return chords[:wanted]

    def _result(self) -> Hull:
        wm, wt, values = (np.array(x) for x in (self.weight_m, self.weight_t, self.values))
        with np.errstate(divide="ignore"):
            # By slope and not by a weight, because lines are scaled differently and kernels rely on the order
            # of slopes.
            order = np.lexsort((values, wt / wm))
        points = sorted(self.points)
        self.order = order
        memory, time = np.array([p[0] for p in points]), np.array([p[1] for p in points])
        picks = tuple(self.points[p] for p in points)
        return Hull(wm[order], wt[order], values[order], memory, time, picks)

    def tightened(self, hull: Hull, table: Floats) -> HullSearch:
        """Return a copy of the search whose lines are those of ``hull``, with better bounds for the same
        weights. ``table`` (entries, W) are the least weighted costs of table entries, from which they
        follow."""
        other = copy(self)
        other.order, other._messages = np.arange(len(hull.value)), None
        other.tables = [(other.order, table)]
        return other

    def messages(self) -> tuple[Floats, Floats]:
        """Return the least weighted costs inside and outside of table entries, each (entries, lines), with
        lines in the hull's order."""
        if self._messages is not None:
            return self._messages
        f = self.flat
        place = np.argsort(self.order)
        value = np.empty((f.entries, len(self.order)))
        for lines, table in self.tables:
            value[:, place[lines]] = table
        # The rounds' own tables are released; otherwise their memory would be needed twice.
        self.tables = [(self.order, value)]
        outside = np.full(value.shape, np.inf)
        outside[self.root] = 0.0

        def part(first: int, last: int) -> None:
            _pass_down(*f.index, value, outside, first, last)

        in_parts(part, value.shape[1], self.threads, _LINES_PER_THREAD)
        self._messages = value, outside
        return self._messages
