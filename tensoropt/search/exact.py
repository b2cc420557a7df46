"""Exact frontiers: bounds first, then frontiers pruned by them, then better bounds from better strategies."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensoropt.frontier import Frontier, merge
from tensoropt.frontier.tools import Points
from tensoropt.search.bounds import Bound, looseness, pruning_target
from tensoropt.search.engine import Messages, ProgramRunner, corners_of, reachable_entries
from tensoropt.search.hull import Hull, HullSearch, flatten
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.program import Program, ProgramBuilder, TableTooLargeError
from tensoropt.search.reduced_graph import ReducedGraph, restrict
from tensoropt.search.sources import MixSource, PassSource, Source, VertexSource, mix_neighbours

log = logging.getLogger(__name__)

# How much is spent on bounds before frontiers. A number without a reason next to it is an assumption; the
# numbers decide how long a search takes, never what an exact one returns or what any claims.
FEW_SUMS = 300_000
"""A graph whose unpruned pass makes at most this many sums is searched without bounds, which would take
longer."""
FEW_LINES, LINES = 16, 32
"""The number of hull lines: for a first narrowing of large graphs, and for passes."""
CORNERS = 2048
"""The number of corners of the known strategies that prune a pass; more are coarsened, which stays exact."""
COARSE_POINTS = 256
"""The number of points kept per table entry in a thinned pass."""
TIGHT = 0.01
"""Mean gap below which known strategies prune the exact pass well enough without a preceding thinned pass."""
WORTH_NARROWING = 20_000
"""The number of table entries from which classes that cannot reach the frontier are left out first."""
MORE_LINES = 96
"""The number of lines if many pairs remain: 32 miss half of the vertices of a steep frontier, and no corner
is then narrow.
"""
FEW_PAIRS = 20_000
"""The number of pairs of table entries up to which the exact pass costs no more than a thinned one."""
_MANY_PAIRS = 400_000
"""Number of pairs of table entries from which more lines pay off, and the most that a target may leave."""
_CLOSENESS = 0.25, 0.0625, 0.0039, 0.00024
"""Distances of pruning targets above the hull, as shares of that of the known strategies; the first one that
leaves little enough work is used."""
_MESSAGE_BYTES = 1 << 30
"""The memory for the inside and outside messages of all lines."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The settings that the caller passed: allowed gap, points per table entry, threads.

    ``rivals``: points of other graphs; strategies that they beat need not be returned. ``thorough``: whether
    an allowed gap is to be proven if that takes seconds.
    """

    epsilon: float = 0.0
    max_points: int | None = None
    threads: int | None = None
    rivals: Points | None = None
    thorough: bool = True

    def with_rivals(self, sources: list[Source]) -> Frontier:
        """Return the frontier over ``sources`` and the rivals."""
        return merge([*sources, *([] if self.rivals is None else [self.rivals])])

    def after(self, sources: list[Source]) -> SearchSettings:
        """Return the settings of a search that need not return what ``sources`` beat."""
        return replace(self, rivals=self.with_rivals(sources)) if sources else self


@dataclass(frozen=True, eq=False, slots=True)
class SearchResult:
    """Strategies, the frontier over all of them with origins, their bound, and whether the result is
    complete.

    ``bound`` is None only if the frontier is exact and is its own bound.
    """

    sources: tuple[Source, ...]
    frontier: Frontier
    bound: Bound | None
    exact: bool
    notes: tuple[str, ...] = ()


def build_program(reduced: ReducedGraph, order: Order) -> Program:
    """Remove the operators of ``order`` one after another."""
    builder = ProgramBuilder(reduced)
    for v in order.removed:
        builder.eliminate(v)
    return builder.finish()


def lines_that_fit(program: Program, wanted: int) -> int:
    """Return the number of lines for which the messages of a program fit in their share of memory."""
    # 16 bytes: an inside and an outside message, each a float64, for every entry and line. HullSearch makes
    # at least four lines: the two ends, and the two next to them.
    return max(4, min(wanted, _MESSAGE_BYTES // (16 * max(program.entries, 1))))


def seeds(reduced: ReducedGraph, hull: Hull) -> list[Source]:
    """Return strategies that follow directly from the scalar problems: hull vertices and the mixes between
    them."""
    return [VertexSource(reduced, hull), MixSource(reduced, hull, mix_neighbours(reduced, hull.picks))]


def useful_classes(
    program: Program, search: HullSearch, hull: Hull, incumbents: Points
) -> dict[int, NDArray[np.bool_]]:
    """Return the classes, by operator, through which some strategy can still reach the frontier."""
    inside, outside = search.messages()
    corners = corners_of(hull, incumbents.memory, incumbents.time, CORNERS)
    roof, of_leaf = corners.roof, {}
    # Operators that are alike share a leaf, whose outside message is the least over its uses: a class is left
    # out only if it is useless to all of them.
    for leaf in set(program.reduced.node_leaf):
        first = int(program.base[leaf])
        span = slice(first, first + int(program.sizes[leaf]))
        of_leaf[leaf] = reachable_entries(inside[span], outside[span], corners.height, roof)
    return {v: of_leaf[leaf] for v, leaf in enumerate(program.reduced.node_leaf)}


def track_exactly(reduced: ReducedGraph, order: Order, settings: SearchSettings) -> SearchResult | None:
    """Return the whole frontier of a graph whose ``order`` fixes nothing, except what ``max_points`` leaves
    out; None if no strategy is possible."""
    program = build_program(reduced, order)
    # Bounds take a scalar pass per line, which does not pay off for small graphs.
    if few_sums(program):
        return unpruned(program, settings)
    sources: list[Source] = []
    if program.entries > WORTH_NARROWING:
        search = HullSearch(program, flatten(program), settings.threads)
        hull = search.find_hull(lines_that_fit(program, FEW_LINES))
        if hull is None:
            return None
        sources = seeds(reduced, hull)
        classes = useful_classes(program, search, hull, settings.with_rivals(sources))
        if not all(mask.any() for mask in classes.values()):  # the rivals beat everything here
            return SearchResult(tuple(sources), merge(sources), hull, True)
        if gaps(settings.with_rivals(sources), hull)[1] == 0.0:
            return SearchResult(tuple(sources), merge(sources), hull, True)
        reduced = restrict(reduced, classes)
        log.debug("%d entries before narrowing", program.entries)
        # With fewer classes another order may be cheaper, but it could also fix operators; the given one
        # fixes none and stays possible.
        reordered = greedy_order(reduced, 0.1)
        program = build_program(reduced, order if reordered.fixed else reordered)
    search = HullSearch(program, flatten(program), settings.threads)
    hull = search.find_hull(lines_that_fit(program, LINES))
    if hull is None:
        return None
    log.debug("%d entries, %d lines", program.entries, len(hull.value))
    sources += seeds(reduced, hull)
    return _passes(program, search, hull, sources, settings)


def few_sums(program: Program) -> bool:
    """Return whether a pass without pruning makes so few sums that bounds would take longer."""
    leaves = program.reduced.leaves
    options = np.concatenate([np.diff(leaf.offsets) for leaf in leaves])
    mean = max(float(options.mean()), 1.0)
    # Only an estimate: points per entry are assumed to grow with the number of operators and of their
    # options; the square is for a single entry with many options, which a mean hides. It decides whether
    # bounds are computed, never the result.
    return program.work * len(program.reduced.domains) * mean + int(options.max()) ** 2 <= FEW_SUMS


def unpruned(program: Program, settings: SearchSettings) -> SearchResult | None:
    """Return the frontier of a small graph, which is cheaper to compute than bounds to prune it by."""
    latest = PassSource(program, ProgramRunner(program, settings.threads).run_pass(None, 0))
    if not len(latest.memory):
        return None
    return SearchResult((latest,), merge([latest]), None, True)


def _passes(
    program: Program, search: HullSearch, hull: Hull, sources: list[Source], settings: SearchSettings
) -> SearchResult:
    """Run passes, each pruned by all strategies known before it, until nothing is missing."""
    inside, outside = search.messages()
    engine = ProgramRunner(program, settings.threads)
    incumbents = settings.with_rivals(sources)

    def below(goal: Points) -> Messages:
        corners = corners_of(hull, goal.memory, goal.time, CORNERS)
        return Messages.of(inside, outside, corners, settings.threads)

    # Many pairs remain if the frontier is steep: so few lines then miss half of its vertices, and no corner
    # is narrow. More vertices cost less than a pass over those pairs.
    if not search.complete and below(incumbents).pairs(program) > _MANY_PAIRS:
        more = search.find_hull(lines_that_fit(program, MORE_LINES))
        assert more is not None, "the hull had lines before"
        hull = more
        inside, outside = search.messages()
        sources = [*seeds(program.reduced, hull), *sources]
        incumbents = settings.with_rivals(sources)
    log.debug("seeds leave a gap of %.2g in the mean, %.2g at worst", *gaps(incumbents, hull))
    for points in _sizes(settings):
        if gaps(incumbents, hull)[1] == 0.0:
            break
        messages, is_targeted = below(incumbents), False
        # All passes except the last only look for strategies to prune by, so they may be skipped, thinned, or
        # pruned by a target. The last may not, or it would prove nothing.
        if points != (settings.max_points or 0):
            pairs = messages.pairs(program)
            if pairs <= FEW_PAIRS:
                continue
            targeted, most = messages, pairs // 2  # a target must halve the work to be worth a pass
            for share in _CLOSENESS:  # as far above the hull as is affordable
                targeted = below(pruning_target(incumbents, share * looseness(incumbents)))
                if targeted.pairs(program) <= min(most, _MANY_PAIRS):
                    break
            is_targeted = targeted.pairs(program) <= most
            if is_targeted:
                messages = targeted
            elif gaps(incumbents, hull)[0] <= TIGHT:
                continue  # known strategies are tight enough to prune by
        log.debug("%d pairs of entries to look at", messages.pairs(program))
        try:
            result = engine.run_pass(messages, points)
        except TableTooLargeError as error:
            note = f"not searched to the end: {error}"
            log.warning(note)
            return SearchResult(tuple(sources), merge(sources), hull, False, (note,))
        latest = PassSource(program, result)
        size = f"{result.points} points, {len(latest.time)} at the root"
        log.debug("%s pass, %d points per entry: %s", "targeted" if is_targeted else "plain", points, size)
        # Only points that known strategies beat were dropped, and the known strategies lie within their own
        # corners and survive: this pass alone has the whole frontier, and earlier sources add nothing.
        if not (is_targeted or result.thinned):
            return SearchResult((latest,), merge([latest]), hull, True)
        sources = [latest, *sources]
        incumbents = settings.with_rivals(sources)
    return SearchResult(tuple(sources), merge(sources), hull, gaps(incumbents, hull)[1] == 0.0)


def _sizes(settings: SearchSettings) -> list[int]:
    """Return the points per table entry of the coming passes, 0 for all: a small pass often closes a gap."""
    most = settings.max_points
    return [*((COARSE_POINTS,) if most is None or most > COARSE_POINTS else ()), most or 0]


def gaps(incumbents: Points, bound: Bound) -> tuple[float, float]:
    """Return (mean, worst) over budgets: how much faster, at most, another strategy could be (relative).

    A worst gap of 0 proves that nothing is missing: whatever fits a budget is no faster than what is known.
    """
    leanest = incumbents.memory[:1]
    if np.isfinite(bound.bounds(np.where(leanest > 0, np.nextafter(leanest, 0), -1.0))).any():
        return np.inf, np.inf  # a leaner strategy may exist
    # The gap of a point is widest just below the memory of the next one, which does not fit yet.
    budgets = np.append(np.nextafter(incumbents.memory[1:], 0), np.inf)
    lower = bound.bounds(budgets)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(incumbents.time <= lower, 0.0, incumbents.time / lower - 1.0)
    return float(shares.mean()), float(shares.max(initial=0.0))
