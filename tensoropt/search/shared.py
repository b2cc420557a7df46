"""Code that all search methods share: settings, results, first strategies, the classes worth searching."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensoropt.frontier import Frontier, merge
from tensoropt.frontier.tools import Points
from tensoropt.search.bounds import Bound, relative_gap
from tensoropt.search.engine import ProgramRunner, corners_of, reachable_entries
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.order import Order
from tensoropt.search.program import Program, ProgramBuilder
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.sources import Source, mix_source, pass_source, vertex_source

# How much is spent on bounds before frontiers. A number without a reason next to it is an assumption; the
# numbers decide how long a search takes, never what an exact search returns or what any search claims.
_FEW_SUMS = 300_000
"""The most sums of points of an unpruned pass for which bounds would take longer than the pass."""
_MORE_SUMS = 100 * _FEW_SUMS
"""The sums of points after which an unpruned pass is given up for bounds, as they were only estimated."""
FEW_LINES, LINES = 16, 32
"""The numbers of hull lines, for a first narrowing of large graphs and for search passes."""
CORNERS = 2048
"""The number of the known staircase's corners that prune a pass; more are merged, which stays exact."""
MORE_LINES = 96
"""The number of hull lines if many pairs of table entries remain: 32 lines miss half of the vertices of a
steep frontier, and leave wide corners."""
_MESSAGE_BYTES = 1 << 30
"""The memory in bytes for all lines' least weighted costs inside and outside of table entries."""


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of a search: the allowed relative gap, the points per table entry, and the threads.

    ``rivals`` are points of other graphs; strategies that they beat need not be returned. ``thorough`` says
    whether an allowed gap is to be proven even if that takes seconds.
    """

    epsilon: float = 0.0
    max_points: int | None = None
    threads: int | None = None
    rivals: Points | None = None
    thorough: bool = True

    def with_rivals(self, sources: list[Source]) -> Frontier:
        """Return the frontier of all points of ``sources`` and of the rivals."""
        return merge([*sources, *([] if self.rivals is None else [self.rivals])])

    def after(self, sources: list[Source]) -> SearchSettings:
        """Return the settings of a further search, which may leave out strategies that ``sources`` beat."""
        return replace(self, rivals=self.with_rivals(sources)) if sources else self


@dataclass(frozen=True, eq=False, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        sources: sets of found strategies; each has their costs, and returns the strategies of chosen indices.
        frontier: the points (memory, time) of the best strategies in ``sources``.
        bound: a lower bound on the time of any strategy; None only if ``exact``, as the frontier then is one.
        exact: whether no strategy is better than the frontier.
    """

    sources: tuple[Source, ...]
    frontier: Frontier
    bound: Bound | None
    exact: bool
    notes: tuple[str, ...] = ()


def build_program(reduced: ReducedGraph, order: Order) -> Program:
    """Return the elimination program that removes the operators of ``order`` one after another."""
    builder = ProgramBuilder(reduced)
    for v in order.removed:
        builder.eliminate(v)
    return builder.finish()


def lines_that_fit(program: Program, wanted: int) -> int:
    """Return how many hull lines, at most ``wanted`` and at least 4, fit in ``_MESSAGE_BYTES`` of memory with
    their bounds on all table entries."""
    # 16 bytes: an inside and an outside message, each a float64, for every entry and line. HullSearch makes
    # at least four lines: the two ends, and the two next to them.
    return max(4, min(wanted, _MESSAGE_BYTES // (16 * max(program.entries, 1))))


def seeds(reduced: ReducedGraph, hull: Hull) -> list[Source]:
    """Return the strategies that a hull gives without a search: its vertices and mixes of neighbours."""
    return [vertex_source(reduced, hull), mix_source(reduced, hull)]


def useful_classes(
    program: Program, search: HullSearch, hull: Hull, incumbents: Points
) -> dict[int, NDArray[np.bool_]]:
    """Return for each operator a mask of the classes of configurations through which a strategy may beat
    ``incumbents`` or equal them."""
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


def few_sums(program: Program) -> bool:
    """Return whether a pass without pruning is estimated to cost less than the bounds that would prune it."""
    leaves = program.reduced.leaves
    options = np.concatenate([np.diff(leaf.offsets) for leaf in leaves])
    mean = max(float(options.mean()), 1.0)
    # Only an estimate: points per entry are assumed to grow with the number of operators and of their
    # options; the square is for a single entry with many options, which a mean hides. It decides whether
    # bounds are computed, never the result.
    return program.work * len(program.reduced.domains) * mean + int(options.max()) ** 2 <= _FEW_SUMS


def unpruned(program: Program, settings: SearchSettings) -> SearchResult | None:
    """Return the frontier of a small graph, by one pass without pruning; None if no strategy is possible.

    Raises :class:`~tensoropt.search.engine.TooManySumsError` if the graph was not small after all: costs
    without any pattern leave far more points than are estimated.
    """
    latest = pass_source(program, ProgramRunner(program, settings.threads).run_pass(None, 0, _MORE_SUMS))
    if not len(latest.memory):
        return None
    return SearchResult((latest,), merge([latest]), None, True)


def gaps(incumbents: Points, bound: Bound) -> tuple[float, float]:
    """Return the mean and the worst relative gap between known strategies and a lower bound on time, over all
    memory budgets; inf if a leaner strategy may exist.

    A worst gap of 0 proves that nothing is missing: no strategy within a budget is faster than a known one.
    """
    leanest = incumbents.memory[:1]
    if np.isfinite(bound.bounds(np.where(leanest > 0, np.nextafter(leanest, 0), -1.0))).any():
        return np.inf, np.inf  # a leaner strategy may exist
    # The gap of a point is widest just below the memory of the next one, which does not fit yet.
    budgets = np.append(np.nextafter(incumbents.memory[1:], 0), np.inf)
    shares = relative_gap(incumbents.time, bound.bounds(budgets))
    return float(shares.mean()), float(shares.max(initial=0.0))
