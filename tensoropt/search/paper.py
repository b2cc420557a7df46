"""The paper's two methods, FT-Elimination and FT-LDP, and searches of separate ranges of costs (bands).

Cai et al., "TensorOpt" (arXiv 2004.10856), section 4. These methods do not prune.

Costs are rounded to a grid, multiples of one unit, so that sums of 52 bits are exact. If costs have very
different sizes, the frontier is searched in bands, each on a grid fine enough for its points. If one operator
offers both 1 MB and 800 TB, a grid that holds the largest cost is too coarse for the smallest strategies: it
cannot distinguish them from zero, and a strategy of a nanosecond can hide another of a picosecond. As costs
are never negative, a strategy within a budget uses no table entry beyond the budget. So the strategies below
the least cost that a grid resolves are searched once more without the entries beyond that cost, on a finer
grid, and so on. Strategies of too little memory for a grid are searched separately from those of too little
time. One search is enough unless the costs span more than six decades.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensoropt.frontier import Frontier, merge, reduce
from tensoropt.search.bounds import Bound, Staircase
from tensoropt.search.engine import ProgramRunner
from tensoropt.search.entangled.conditioning import track_entangled
from tensoropt.search.entangled.fixing import condition, preferred_classes
from tensoropt.search.entangled.relaxation import Solver, any_strategy, every_assignment, heuristic, relax
from tensoropt.search.hull import HullSearch
from tensoropt.search.order import Order, paper_order
from tensoropt.search.reduced_graph import UNLIMITED, Caps, ReducedGraph, reduce_graph
from tensoropt.search.shared import LINES, SearchResult, SearchSettings, build_program, lines_that_fit
from tensoropt.search.sources import Source, pass_source
from tensoropt.types import Floats

_ASSIGNMENTS = 12
"""The number of assignments of the fixed operators that are tried; the paper leaves it open (section 4.2)."""
_FINE_POINTS = 1024
"""The points kept per table entry if a gap is allowed; an assumption: fewer are faster, with a wider gap."""


def _unpruned(reduced: ReducedGraph, order: Order, settings: SearchSettings) -> SearchResult | None:
    program = build_program(reduced, order)
    # The hull prunes nothing here. It shows whether any strategy exists, and certifies the result of a
    # thinned pass.
    hull = HullSearch(program).find_hull(lines_that_fit(program, LINES))
    if hull is None:
        return None
    thin = settings.max_points or (_FINE_POINTS if settings.epsilon > 0 else 0)
    result = ProgramRunner(program, settings.threads).run_pass(None, thin)
    source = pass_source(program, result)
    return SearchResult((source,), merge([source]), hull, not result.thinned)


def _with_fixed(reduced: ReducedGraph, order: Order, solver: Solver) -> SearchResult | None:
    """Search some assignments of the fixed operators, or all if few (heuristic elimination, section 4.2)."""
    bounded = relax(reduced, order)
    if bounded is None:
        return None
    relaxed = bounded.split
    total = math.prod(reduced.domains[f] for f in order.fixed)
    if total <= _ASSIGNMENTS:
        every, exact = every_assignment(relaxed, solver)
        if not every:
            return None
        result = SearchResult(tuple(every), merge(every), bounded.hull, exact)
        return result if exact else heuristic(reduced, order, bounded, every, total)
    sources: list[Source] = []
    tried = preferred_classes(relaxed, order.fixed, bounded.hull.picks)[:_ASSIGNMENTS]
    for classes in tried:
        part = solver(condition(relaxed.reduced, relaxed.copies, classes), relaxed.order)
        sources += [] if part is None else part.sources
    sources = sources or list(any_strategy(relaxed, solver))
    return heuristic(reduced, order, bounded, sources, len(tried)) if sources else None


_RESOLUTION = 4e-10
"""The most that rounding to the grid may move a point, relative to its own size. Of two points that move this
far, one can wrongly beat the other, so a frontier is accurate to twice this share."""


@dataclass(frozen=True, eq=False, slots=True)
class BandSearch:
    """The search of one range (band) of costs. Only its points ``first:last`` belong to the result; its
    bounds hold for costs up to ``caps``."""

    caps: Caps
    reduced: ReducedGraph
    result: SearchResult
    first: int
    last: int

    @property
    def memory(self) -> Floats:
        return self.result.frontier.memory[self.first : self.last]

    @property
    def time(self) -> Floats:
        return self.result.frontier.time[self.first : self.last]

    @property
    def bound(self) -> Bound:
        """A lower bound on the time of any strategy, from this band alone."""
        frontier = self.result.frontier
        proven = self.result.bound or Staircase(frontier.memory, frontier.time)
        return _BandBound(proven, self.caps, self.reduced.memory_tolerance, self.reduced.time_error)


@dataclass(frozen=True, eq=False, slots=True)
class _BandBound:
    """A bound on costs that were rounded to a grid, converted to the given costs.

    Attributes:
        proven: the bound on the rounded costs.
        caps: the costs up to which the bound holds.
        memory_tolerance, time_error: the most that rounding may have added, in bytes and seconds.
    """

    proven: Bound
    caps: Caps
    memory_tolerance: float
    time_error: float

    def bounds(self, memory: Floats) -> Floats:
        budgets = memory + self.memory_tolerance
        lower = np.maximum(self.proven.bounds(budgets) - self.time_error, 0.0)
        return np.where(budgets <= self.caps.memory, np.minimum(lower, self.caps.time), -np.inf)


def search_bands(
    reduced: ReducedGraph, method: str, settings: SearchSettings, caps: Caps = UNLIMITED
) -> list[BandSearch]:
    """Search a graph in one or more bands (ranges of costs), from the leanest to the fastest; empty if no
    strategy is possible within ``caps``."""
    result = _track(reduced, method, settings)
    if result is None:
        return []
    memory, time = result.frontier.memory, result.frontier.time
    # Times descend, but searchsorted needs ascending values.
    first = int(np.searchsorted(-time, -caps.time))
    last = int(np.searchsorted(memory, caps.memory, side="right"))
    if first >= last:
        return [BandSearch(caps, reduced, result, last, last)]
    # Rounding moves a point by up to the error, so a point below error / RESOLUTION may move by more than
    # RESOLUTION of itself. The least cost that the grid resolves decides, not the resulting points: one that
    # the grid rounds to zero can hide others.
    coarse = Caps(reduced.memory_error / _RESOLUTION, reduced.time_error / _RESOLUTION)
    lean = int(np.searchsorted(memory, coarse.memory, side="right"))
    fast = int(np.searchsorted(-time, -coarse.time))
    below, above = [], []
    if lean > first:
        # A strategy at the edge may be off by one error in either direction on both grids.
        inner = replace(caps, memory=min(caps.memory, coarse.memory + 2 * reduced.memory_error))
        below = _within(reduced, method, settings, result, inner)
        first = lean if below else first
    if fast < last:
        inner = replace(caps, time=min(caps.time, coarse.time + 2 * reduced.time_error))
        above = _within(reduced, method, settings, result, inner)
        last = fast if above else last
    return [*below, BandSearch(caps, reduced, result, first, max(first, last)), *above]


def _track(reduced: ReducedGraph, method: str, settings: SearchSettings) -> SearchResult | None:
    """Return the frontier by our method, FT-LDP or FT-Elimination; None if no strategy is possible."""
    if method == "auto":
        return track_entangled(reduced, settings)

    def plain(p: ReducedGraph, order: Order) -> SearchResult | None:
        return _unpruned(p, order, settings)

    order = paper_order(reduced, method == "ldp")
    return _with_fixed(reduced, order, plain) if order.fixed else plain(reduced, order)


def _within(
    reduced: ReducedGraph, method: str, settings: SearchSettings, result: SearchResult, caps: Caps
) -> list[BandSearch]:
    inner = reduce_graph(reduced.tables, caps)
    # Only a finer grid can resolve more, and without this check the recursion would not end.
    if inner.memory_grid >= reduced.memory_grid and inner.time_grid >= reduced.time_grid:
        return []
    memory, time = result.frontier.memory, result.frontier.time
    # One rival is as slow as the cap and leaner than any strategy, another as fast as any and as large as the
    # cap: together they beat everything outside the band, so the search prunes it.
    beyond_m = [max(memory[0] - 2 * reduced.memory_error, 0.0), caps.memory]
    beyond_t = [caps.time, max(time[-1] - 2 * reduced.time_error, 0.0)]
    beyond = reduce(beyond_m, beyond_t)  # everything that needs no search, as if another graph offered it
    rivals = beyond if settings.rivals is None else merge([settings.rivals, beyond])
    return search_bands(inner, method, replace(settings, rivals=rivals), caps)


def distinct(points: Frontier, bands: list[BandSearch]) -> NDArray[np.bool_]:
    """Return a mask of the points of ``merge(bands)`` that keeps one of points that differ only by rounding.

    A sum such as 0.1 + 0.2 differs from 0.3 by an ulp, and one strategy can appear on two grids. Of two
    points with indistinguishable memory the slower is removed, of two with indistinguishable time the larger.
    """
    which = points.origin[:, 0]
    memory_error = np.array([band.reduced.memory_tolerance for band in bands])[which]
    time_error = np.array([band.reduced.time_error for band in bands])[which]
    kept = np.ones(len(points), bool)
    close_m = np.diff(points.memory) <= memory_error[1:] + memory_error[:-1]
    close_t = -np.diff(points.time) <= time_error[1:] + time_error[:-1]
    if not (close_m.any() or close_t.any()):
        return kept
    last = len(points) - 1
    for i in range(last - 1, -1, -1):
        own = memory_error[i] if which[i] != which[last] else 0.0
        kept[i] = points.memory[last] - memory_error[last] > points.memory[i] + own
        last = i if kept[i] else last
    first, *others = np.flatnonzero(kept).tolist()
    for j in others:
        kept[j] = points.time[first] - points.time[j] > time_error[first] + time_error[j]
        first = j if kept[j] else first
    return kept
