"""Lower bounds on the memory and time of strategies, for graphs too large for an exact search.

In such graphs some operators are fixed: the search may try only some of their configurations, as its tables
would be too large otherwise (:mod:`tensoropt.search.order`). The bounds come from a relaxation, in which each
edge of a fixed operator has a copy of the operator (``fixing.py``), and copies may choose differently. A
bound is a line, the least value of one weighted sum of memory and time; all lines together are the lower
convex hull of the relaxation's frontier.

Lagrange multipliers, which penalise copies that disagree, tighten the bounds. Each copy t of a fixed operator
f pays its share of f's cost plus a multiplier u(t, c), if it chooses class c (configurations that neighbours
cannot distinguish). The multipliers of all copies of f sum to zero, so they do not change the cost of a
strategy whose copies agree, and any multipliers give a bound. Subgradient steps with Polyak's length improve
the multipliers (Lagrangian decomposition: Guignard and Kim 1987; Held, Wolfe and Crowder 1974). Each line has
its own multipliers; one pass through the tables makes a step for all lines.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.frontier import merge
from tensoropt.frontier.tools import Points
from tensoropt.search.entangled.fixing import SplitGraph, condition, split
from tensoropt.search.hull import SLACK, Hull, HullSearch, descend, leaf_values, pass_up
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.program import Program
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.shared import LINES, SearchResult, build_program, lines_that_fit
from tensoropt.search.sources import Source, vertex_source
from tensoropt.types import Floats, Indices

Solver = Callable[[ReducedGraph, Order], SearchResult | None]

# Assumptions, made for a search of seconds to a minute on a few cores; none of them affects what a result
# claims, only how much is tried before it says "heuristic".
_LARGEST_PROGRAM = 16_000_000
"""The most table entries of an exact search: 1.5 GB at ``program._BYTES_PER_ENTRY``."""
_LARGEST_RELAXED = 300_000
"""The most table entries of a relaxation, which only gives bounds: small tables give nearly as good ones."""
_LARGEST_WORK = 4_000_000_000
"""The most pairs of entries that one pass may visit."""
_FEASIBILITY_CHECKS = 200
"""The number of partial assignments examined before the search for any possible strategy gives up."""
_CLOSE = 1e-4
"""The relative distance from the known strategies below which proving the least memory gets only a hundredth
of :data:`_LEANEST_WORK`."""
_LEANEST_CHECKS = 400
_LEANEST_WORK = 200_000_000
"""The scalar problems, and pairs of entries, spent on proving the least memory of any strategy."""


@dataclass(frozen=True, eq=False, slots=True)
class Relaxation:
    """A graph in which each edge of a fixed operator has its own copy of the operator, and the graph's lower
    hull. Copies may choose different configurations, so the hull bounds all strategies from below."""

    split: SplitGraph
    program: Program
    search: HullSearch
    hull: Hull


def relax(reduced: ReducedGraph, order: Order) -> Relaxation | None:
    """Return the relaxation in which each edge of an operator that ``order`` fixes has its own choice of that
    operator's class. None if not even the relaxation has a strategy."""
    relaxed = split(reduced, order)
    program = build_program(relaxed.shared, relaxed.order)
    search = HullSearch(program)
    hull = search.find_hull(lines_that_fit(program, LINES))
    return None if hull is None else Relaxation(relaxed, program, search, hull)


def affordable_order(reduced: ReducedGraph) -> Order:
    """Return an order of removal whose tables fit in memory together; operators are fixed until they do.

    With fixed operators the tables only give bounds, for which smaller ones are nearly as good.
    """
    # The growth of 0.1 is an assumption: tables that have absorbed ten others count double. It decides the
    # order and thus the work, never what a result claims.
    order = greedy_order(reduced, 0.1)
    while True:
        most = _LARGEST_RELAXED if order.fixed else _LARGEST_PROGRAM
        if order.total <= most:
            return order
        relaxed = split(reduced, order)
        program = build_program(relaxed.shared, relaxed.order)  # equal tables count once
        if program.entries <= most and program.work <= _LARGEST_WORK:
            return order
        order = greedy_order(reduced, 0.1, max(order.largest // 2, 1))


def _unsplit_hull(reduced: ReducedGraph, fixed: Order) -> Hull | None:
    """Return the hull of the graph without split operators; None if its tables would be too large."""
    order = greedy_order(reduced, 0.1)
    if order.fixed or order.total > max(_LARGEST_PROGRAM, fixed.total):
        return None
    program = build_program(reduced, order)
    return HullSearch(program).find_hull(lines_that_fit(program, LINES))


def _with_least_memory(relaxed: SplitGraph, hull: Hull, sources: list[Source]) -> Hull:
    """Return the hull with its first line raised to the least memory of any strategy, by branch and bound.

    Branches set the class of one fixed operator after another; the relaxation gives the bounds. A strategy
    that needs less memory than those of ``sources`` is added to them. The least bound of all open branches is
    used after ``_LEANEST_CHECKS`` checked branches or ``_LEANEST_WORK`` visited pairs of table entries (a
    hundredth of these if the bound is within ``_CLOSE`` of the least known memory).
    """
    fixed = sorted(relaxed.copies)
    least = min(float(s.memory.min(initial=math.inf)) for s in sources)
    unit = _unit([leaf.memory for leaf in relaxed.reduced.leaves], relaxed.reduced.memory_grid)
    # The memory of any strategy is a multiple of the unit, so a bound may be rounded up to one.
    root = math.ceil(float(hull.value[0] / hull.weight_m[0]) / unit) * unit
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(root, 0, ())]
    checks = work = 0
    budget = _LEANEST_WORK if root < least * (1.0 - _CLOSE) else _LEANEST_WORK // 100
    while waiting and waiting[0][0] < least and checks < _LEANEST_CHECKS and work < budget:
        bound, _, chosen = heapq.heappop(waiting)
        f = fixed[len(chosen)]
        for c in range(relaxed.reduced.domains[f]):
            classes = {**dict(zip(fixed, chosen, strict=False)), f: c}
            complete = len(classes) == len(fixed)
            # Once all operators are set, the copies agree and costs are real; before that, the shared costs
            # give better bounds.
            reduced = condition(relaxed.reduced if complete else relaxed.shared, relaxed.copies, classes)
            program = build_program(reduced, relaxed.order)
            search = HullSearch(program)
            checks, work = checks + 1, work + program.work
            solutions = search.solve([1.0], [0.0])
            if not solutions or solutions[0][0] >= least:
                continue
            if not complete:
                # deepest first among equals: a strategy ends the search
                heapq.heappush(waiting, (max(bound, solutions[0][0]), -len(classes), (*chosen, c)))
            else:
                least = solutions[0][0]
                vertices = search.find_hull(1)
                assert vertices is not None, "the scalar problem found a strategy here"
                sources.append(vertex_source(reduced, vertices))
    if waiting:
        least = min(least, waiting[0][0])
    value = hull.value.copy()
    value[0] = hull.weight_m[0] * least
    return replace(hull, value=value)


def _unit(costs: list[Floats], grid: float) -> float:
    """Return the largest power of two, at least ``grid``, of which all ``costs`` are multiples."""
    units = np.concatenate(costs) / grid
    # The lowest set bit of all costs together, in steps of the grid.
    whole = np.bitwise_or.reduce(units[units > 0].astype(np.int64), initial=0)
    return grid * float(whole & -whole) if whole else grid


def any_strategy(relaxed: SplitGraph, solver: Solver) -> tuple[Source, ...]:
    """Search depth first for classes of the fixed operators that allow a strategy; return those found.

    Raises ``ValueError`` if ``_FEASIBILITY_CHECKS`` partial assignments do not decide whether there are any.
    """
    fixed = sorted(relaxed.copies)
    checks = 0

    def search(classes: dict[int, int]) -> tuple[Source, ...]:
        nonlocal checks
        if len(classes) == len(fixed):
            result = solver(condition(relaxed.reduced, relaxed.copies, classes), relaxed.order)
            assert result is not None, "the scalar problem found a strategy here"
            return result.sources
        f = fixed[len(classes)]
        for c in range(relaxed.reduced.domains[f]):
            checks += 1
            if checks > _FEASIBILITY_CHECKS:
                names = ", ".join(repr(relaxed.reduced.graph.names[f]) for f in fixed[:5])
                raise ValueError(
                    f"no possible strategy was found in {_FEASIBILITY_CHECKS} attempts: around {names} the "
                    "graph is too entangled for an exact search and has too many impossible (inf) costs; "
                    "give these operators fewer configurations"
                )
            attempt = {**classes, f: c}
            program = build_program(condition(relaxed.reduced, relaxed.copies, attempt), relaxed.order)
            if HullSearch(program).find_hull(2) is not None and (found := search(attempt)):
                return found
        return ()

    return search({})


def every_assignment(relaxed: SplitGraph, solver: Solver) -> tuple[list[Source], bool]:
    """Search every assignment of classes to the fixed operators; return (strategies, whether exact)."""
    fixed = sorted(relaxed.copies)
    sources: list[Source] = []
    exact = True
    for classes in itertools.product(*(range(relaxed.reduced.domains[f]) for f in fixed)):
        given = dict(zip(fixed, classes, strict=True))
        result = solver(condition(relaxed.reduced, relaxed.copies, given), relaxed.order)
        if result is not None:
            sources += result.sources
            exact = exact and result.exact
    return sources, exact


def heuristic(
    reduced: ReducedGraph, order: Order, bounded: Relaxation, sources: list[Source], tried: int
) -> SearchResult:
    """Return the strategies found in ``tried`` assignments of the fixed operators, with bounds and a note."""
    hull = _unsplit_hull(reduced, order) or _with_least_memory(bounded.split, bounded.hull, sources)
    names = ", ".join(repr(reduced.graph.names[f]) for f in order.fixed[:5])
    more = f" and {len(order.fixed) - 5} more" if len(order.fixed) > 5 else ""
    total = math.prod(reduced.domains[f] for f in order.fixed)
    note = (
        f"heuristic elimination: tried {tried} of {total:.3g} assignments of configurations to {names}{more}"
    )
    return SearchResult(tuple(sources), merge(sources), hull, False, (note,))


_STEPS = 120
"""The number of subgradient steps; an assumption."""
_STALE_STEPS = 8
"""The number of steps without a better bound after which a line's step length is halved (as in Held, Wolfe
and Crowder 1974); an assumption."""


def tighten(bounded: Relaxation, incumbents: Points) -> Relaxation:
    """Return the relaxation with tighter bounds, by subgradient steps on the multipliers; the known
    strategies ``incumbents`` set the length of the steps."""
    weight_m, weight_t = bounded.hull.weight_m, bounded.hull.weight_t
    flat, root = bounded.search.flat, bounded.search.root
    least = (weight_m[:, None] * incumbents.memory + weight_t[:, None] * incumbents.time).min(axis=1)
    free = leaf_values(*flat.leaves, weight_m, weight_t, flat.entries)
    where = _Copies(bounded)
    multiplier = np.zeros((where.entries, len(weight_m)))
    best, best_multiplier = np.full(len(weight_m), -np.inf), multiplier.copy()
    pace, stale = np.ones(len(weight_m)), np.zeros(len(weight_m), int)
    for _ in range(_STEPS):
        table = free.copy()
        table[where.rows] += multiplier
        pass_up(*flat.index, table)
        better = table[root] > best
        best_multiplier[:, better] = multiplier[:, better]
        best = np.maximum(best, table[root])
        stale = np.where(better, 0, stale + 1)
        pace = np.where(stale >= _STALE_STEPS, pace / 2, pace)
        stale[stale >= _STALE_STEPS] = 0
        tables = *flat.index, *flat.leaves, flat.tree
        entry = descend(*tables, bounded.program.root, table, weight_m, weight_t)[2]
        # A subgradient of the bound. It sums to zero over the copies of an operator, and so do the
        # multipliers.
        slope = where.disagreement(entry)
        length = (slope**2).sum(axis=0)
        # Polyak's step: the distance to the best known value over the squared length of the subgradient.
        room = np.maximum(least - table[root], 0.0)
        # Every line is tight: its copies agree, or the bound has met a known strategy.
        if not (length * room).any():
            break
        multiplier = multiplier + np.where(length > 0, pace * room / np.maximum(length, 1e-300), 0.0) * slope
    table = free
    table[where.rows] += best_multiplier
    pass_up(*flat.index, table)
    # Multipliers are not on a grid, so sums with them round; the slack accounts for them as well.
    value = table[root] - SLACK * (np.abs(table[root]) + np.abs(best_multiplier).sum(axis=0))
    hull = replace(bounded.hull, value=value)
    return replace(bounded, search=bounded.search.tightened(hull, table), hull=hull)


class _Copies:
    """The copies of all fixed operators; ``rows`` are their classes' table entries, among all tables'."""

    def __init__(self, bounded: Relaxation) -> None:
        reduced, program = bounded.program.reduced, bounded.program
        groups = [same for same in bounded.split.copies.values() if len(same) > 1]
        rows, self.groups, at = [], [], 0
        for same in groups:
            size = reduced.domains[same[0]]
            for t in same:
                first = int(program.base[reduced.node_leaf[t]])
                rows.append(np.arange(first, first + size))
            self.groups.append((np.array(same), at, size))
            at += size * len(same)
        self.rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        self.entries = at

    def disagreement(self, entry: Indices) -> Floats:
        """Return a subgradient of the bound, (rows, W): for each copy and class, 1 if the copy chose it (by
        ``entry``) or 0 if not, minus the share of the operator's copies that chose it."""
        out = np.zeros((self.entries, entry.shape[1]))
        for same, at, size in self.groups:
            chosen = entry[same][:, None, :] == np.arange(size)[None, :, None]  # (copies, classes, W)
            out[at : at + size * len(same)] = (chosen - chosen.mean(axis=0)).reshape(-1, entry.shape[1])
        return out
