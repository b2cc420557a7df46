"""The lower convex hull of the frontier: supporting lines (bounds) and vertices (strategies).

It is found chord by chord (dichotomic search; Aneja and Nair 1979): between two neighbouring vertices, the
weights normal to their chord either prove that nothing lies below it or give a new vertex between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tensoropt.search.program import Program
from tensoropt.search.scalar import Flat, descend, leaf_values, pass_down, pass_up
from tensoropt.search.threads import in_parts, thread_count
from tensoropt.types import Floats, Indices

SLACK = 2e-12
"""Bounds are lowered by this share of themselves. A weighted sum over n tables rounds by at most n ulps
(1.1e-16 each), so this covers sums over 18,000 tables."""


@dataclass(frozen=True, eq=False, slots=True)
class Hull:
    """All that scalar problems alone show about the frontier.

    Lines, sorted by weight of time: every strategy has ``weight_m * memory + weight_t * time >= value`` (W,).
    The first line has weight_t == 0 (least memory), the last weight_m == 0 (least time); both are exact
    because the scales are powers of two. Vertices: ``memory``, ``time`` (V,) of real strategies; ``picks``
    has one (operators + edges, 2) per vertex: the entry and point of every operator and edge.
    """

    weight_m: Floats
    weight_t: Floats
    value: Floats
    memory: Floats
    time: Floats
    picks: tuple[Indices, ...]

    def bound(self, memory: float) -> float:
        """A time that no strategy within ``memory`` can beat; inf below the least memory."""
        return float(self.bounds(np.array([memory]))[0])

    def bounds(self, memory: Floats) -> Floats:
        """(n,) :meth:`bound` for many budgets."""
        with np.errstate(invalid="ignore", divide="ignore"):
            # The ends are exact and need no slack; the lines between them do.
            slack = SLACK * np.abs(self.value[1:-1])
            lines = (self.value[1:-1] - slack - self.weight_m[1:-1] * memory[:, None]) / self.weight_t[1:-1]
            lines = np.where(np.isnan(lines), -np.inf, lines)
        last = self.value[-1] / self.weight_t[-1]  # a power of two: exact
        lower = np.maximum(lines.max(axis=1, initial=-np.inf), last)
        return np.where(self.weight_m[0] * memory < self.value[0], np.inf, lower)


def power_of_two(value: float) -> float:
    """A power of two above ``value`` and at most twice as large; 1 for 0."""
    return 2.0 ** math.frexp(value)[1] if value > 0 else 1.0


LINES_PER_THREAD = 4
"""Fewest lines that are worth a separate thread: one pass serves several lines at nearly the cost of one."""


Solution = tuple[Floats, Floats, Indices, Indices]
"""The return value of :func:`~tensoropt.search.scalar.descend`."""


class HullSearch:
    """A search for lines and vertices, in rounds of a few weights each."""

    def __init__(self, program: Program, flat: Flat, threads: int | None = None) -> None:
        self.program, self.flat, self.threads = program, flat, thread_count(threads)
        self.weight_m: list[float] = []
        self.weight_t: list[float] = []
        self.values: list[float] = []
        self.tables: list[tuple[Indices, Floats]] = []  # lines, and the least cost of every entry for them
        self.points: dict[tuple[float, float], Indices] = {}
        self.done: set[tuple[float, ...]] = set()
        self.span_m = self.span_t = 1.0
        self._messages: tuple[Floats, Floats] | None = None

    def solve(self, weight_m: list[float], weight_t: list[float]) -> list[tuple[float, float]]:
        """Run one pass for some weights; return the strategies' costs, in the order of the weights."""
        f = self.flat
        wm, wt = np.array(weight_m), np.array(weight_t)
        index = (f.meta, f.left_out, f.left_k, f.right_out, f.right_k)
        leaf = (f.leaf_offsets, f.leaf_memory, f.leaf_time)
        root = int(self.program.base[self.program.logical[self.program.root].table])

        def part(first: int, last: int) -> tuple[Floats, Solution | None]:
            weights = wm[first:last], wt[first:last]
            table = leaf_values(*leaf, *weights, f.entries)
            pass_up(*index, table)
            # Anything impossible under one weight is impossible under all.
            if not np.isfinite(table[root]).all():
                return table, None
            return table, descend(*index, *leaf, f.tree, self.program.root, table, *weights)

        found: list[tuple[float, float]] = []
        n = self.program.inputs
        for table, solution in in_parts(part, len(wm), self.threads, LINES_PER_THREAD):
            if solution is None:
                return []
            memory, time, entry, choice = solution
            points = list(zip(memory.tolist(), time.tolist(), strict=True))
            at = len(self.values)
            self.tables.append((np.arange(at, at + len(points)), table))
            self.values += table[root].tolist()
            for w, point in enumerate(points):
                # Of strategies with equal costs the first one stays, whatever is solved later.
                self.points.setdefault(point, np.stack([entry[:n, w], choice[:n, w]], axis=1))
            found += points
        self.weight_m += weight_m
        self.weight_t += weight_t
        self._messages = None
        return found

    def find_hull(self, lines: int) -> Hull | None:
        """Hull from about ``lines`` lines, those of earlier calls included; None if there is no strategy."""
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
        """Solve every other line of a larger graph's hull at once, which leaves chords between them to choose
        from."""
        if self._ends():
            self.solve(hull.weight_m[1:-1:2].tolist(), hull.weight_t[1:-1:2].tolist())

    @property
    def complete(self) -> bool:
        """Whether every vertex of the hull is known."""
        return bool(self.values) and not self._open_chords(1)

    def _ends(self) -> bool:
        """Find both ends of the hull; return False if no strategy is possible."""
        largest_m = power_of_two(float(self.flat.leaf_memory.max()))
        largest_t = power_of_two(float(self.flat.leaf_time.max()))
        ends = self.solve([1 / largest_m, 0.0], [0.0, 1 / largest_t])
        if not ends:
            return False
        self.span_m = span_m = power_of_two(abs(ends[1][0] - ends[0][0])) or 1.0
        self.span_t = span_t = power_of_two(abs(ends[1][1] - ends[0][1])) or 1.0
        # An assumption: small enough to usually leave the ends where they are, large enough to count in a
        # float64.
        tiny = 2.0**-24
        # nearly lexicographic ends: the leanest strategy that is fast, the fastest that is lean
        self.solve([1 / span_m, tiny / span_m], [tiny / span_t, 1 / span_t])
        return True

    def _vertices(self) -> list[tuple[float, float]]:
        """The lower convex hull of the known strategies, memory ascending."""
        hull: list[tuple[float, float]] = []
        for p in sorted(self.points):
            if hull and p[1] >= hull[-1][1]:
                continue
            while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (p[1] - hull[-2][1]) <= (
                hull[-1][1] - hull[-2][1]
            ) * (p[0] - hull[-2][0]):
                hull.pop()
            hull.append(p)
        return hull

    def _open_chords(self, wanted: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        hull = self._vertices()
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
        """A search whose lines are those of ``hull``; ``table`` (entries, W) holds their least costs."""
        other = HullSearch(self.program, self.flat)
        other.order = np.arange(len(hull.value))
        other.tables = [(other.order, table)]
        return other

    def messages(self) -> tuple[Floats, Floats]:
        """(entries, W) the least weighted cost inside and outside every entry, for the sorted lines."""
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
        outside[int(self.program.base[self.program.logical[self.program.root].table])] = 0.0
        index = (f.meta, f.left_out, f.left_k, f.right_out, f.right_k)

        def part(first: int, last: int) -> None:
            pass_down(*index, value, outside, first, last)

        in_parts(part, value.shape[1], self.threads, LINES_PER_THREAD)
        self._messages = value, outside
        return self._messages
