"""The paper's two methods, and what both they and ours do when an operator has to be fixed.

Cai et al., "TensorOpt" (arXiv 2004.10856): FT-Elimination and FT-LDP, section 4. No pruning here.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from tensoropt.frontier import merge
from tensoropt.search.auto import (
    LINES,
    Found,
    Settings,
    build_program,
    hopeful,
    lines_that_fit,
    track_auto,
)
from tensoropt.search.engine import Engine
from tensoropt.search.fixing import Split, candidates, condition, split
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.order import Order, greedy_order, paper_order
from tensoropt.search.problem import Problem, restrict
from tensoropt.search.program import Program
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import PassSource, Source, VertexSource

log = logging.getLogger(__name__)

Solver = Callable[[Problem, Order], Found | None]
Relaxation = tuple[Program, HullSearch, Hull]

ASSIGNMENTS = 12
LARGEST_PROGRAM = 16_000_000
LARGEST_WORK = 4_000_000_000
FEASIBILITY_CHECKS = 200
LEANEST_CHECKS = 400
LEANEST_WORK = 200_000_000
FINE_POINTS = 1024


def solve(problem: Problem, method: str, settings: Settings) -> Found | None:
    """The frontier by any method; None when no strategy is possible."""
    if method == "auto":
        return _auto(problem, settings, rounds=3)

    def plain(p: Problem, order: Order) -> Found | None:
        return _unpruned(p, order, settings)

    order = paper_order(problem, method == "ldp")
    return _with_fixed(problem, order, plain) if order.fixed else plain(problem, order)


def _auto(problem: Problem, settings: Settings, rounds: int) -> Found | None:
    order = _affordable_order(problem)
    if not order.fixed:
        return track_auto(problem, order, settings)

    def conditioned(p: Problem, order: Order) -> Found | None:
        return track_auto(p, order, settings)

    def coarse(p: Problem, order: Order) -> Found | None:
        return track_auto(p, order, replace(settings, epsilon=math.inf, max_points=None))

    if rounds > 0:  # the relaxation may rule out enough classes to make the rest exact
        relaxed = split(problem, order)
        search = _hull(relaxed)
        if search is None:
            return None
        first = _with_fixed(problem, order, coarse, search)
        if first is not None:
            program, hull_search, hull = search
            kept = hopeful(program, hull_search, hull, first.frontier)
            masks = {v: kept[v].copy() for v in range(len(problem.domains))}
            for f, twins in relaxed.twins.items():
                for t in twins:
                    masks[f] &= kept[t]
            narrowed = restrict(problem, masks)
            if sum(narrowed.domains) < 0.9 * sum(problem.domains):
                return _auto(narrowed, settings, rounds - 1)
    return _with_fixed(problem, order, conditioned)


def _affordable_order(problem: Problem) -> Order:
    """An order whose tables together fit; operators are fixed until they do."""
    order = greedy_order(problem, 0.1)
    while True:
        if order.total <= LARGEST_PROGRAM:
            return order
        relaxed = split(problem, order)
        program = build_program(relaxed.problem, relaxed.order)  # equal tables count once
        if program.entries <= LARGEST_PROGRAM and program.work <= LARGEST_WORK:
            return order
        log.info("%d table entries are too many; fixing an operator", program.entries)
        order = greedy_order(problem, 0.1, max(order.largest // 2, 1))


def _hull(relaxed: Split) -> Relaxation | None:
    program = build_program(relaxed.problem, relaxed.order)
    search = HullSearch(program, flatten(program))
    hull = search.run(lines_that_fit(program, LINES))
    return None if hull is None else (program, search, hull)


def _unpruned(problem: Problem, order: Order, settings: Settings) -> Found | None:
    program = build_program(problem, order)
    hull = HullSearch(program, flatten(program)).run(lines_that_fit(program, LINES))
    if hull is None:
        return None
    thin = settings.max_points or (FINE_POINTS if settings.epsilon > 0 else 0)
    result = Engine(program, settings.threads).run(None, thin)
    source = PassSource(program, result)
    return Found((source,), merge([source]), hull, not result.thinned)


def _with_fixed(
    problem: Problem, order: Order, solver: Solver, search: Relaxation | None = None
) -> Found | None:
    """Try assignments of the fixed operators; bound all strategies by the relaxation."""
    relaxed = split(problem, order)
    search = search or _hull(relaxed)
    if search is None:
        return None
    hull = search[2]
    total = math.prod(problem.domains[f] for f in order.fixed)
    complete = total <= ASSIGNMENTS
    if complete:
        ranges = [range(problem.domains[f]) for f in order.fixed]
        tried = [dict(zip(order.fixed, c, strict=True)) for c in itertools.product(*ranges)]
    else:
        tried = candidates(relaxed, hull.picks, ASSIGNMENTS)
    sources: list[Source] = []
    exact = complete
    for classes in tried:
        found = solver(condition(relaxed, classes), relaxed.order)
        if found is not None:
            sources += found.sources
            exact = exact and found.exact
    if not sources:
        if complete:
            return None
        some = _possible(relaxed)
        if some is None:
            return None
        found = solver(condition(relaxed, some), relaxed.order)
        assert found is not None, "the scalar problem found a strategy here"
        sources += found.sources
    if exact:
        return Found(tuple(sources), merge(sources), hull, True)
    hull = _unsplit_hull(problem, order) or _with_least_memory(relaxed, hull, sources)
    frontier = merge(sources)
    names = ", ".join(repr(problem.graph.names[f]) for f in order.fixed[:5])
    more = f" and {len(order.fixed) - 5} more" if len(order.fixed) > 5 else ""
    note = f"heuristic elimination: tried {len(tried)} of {total:.3g} assignments of {names}{more}"
    return Found(tuple(sources), frontier, hull, False, (note,))


def _unsplit_hull(problem: Problem, fixed: Order) -> Hull | None:
    """The hull of the problem itself, where another order spares its scalar problems the fixed operators."""
    order = greedy_order(problem, 0.1)
    if order.fixed or order.total > max(LARGEST_PROGRAM, fixed.total):
        return None
    program = build_program(problem, order)
    return HullSearch(program, flatten(program)).run(lines_that_fit(program, LINES))


def _with_least_memory(relaxed: Split, hull: Hull, sources: list[Source]) -> Hull:
    """The hull with its first line at the least memory of any strategy, by branch and bound.

    Branches on the class of one fixed operator after the other; the relaxation bounds. A leaner strategy
    than ``sources`` have is added to them. After ``LEANEST_CHECKS`` problems, or ``LEANEST_WORK`` pairs of
    entries, the least bound still open is taken, which may lie below the least memory.
    """
    fixed = sorted(relaxed.twins)
    least = min(float(s.memory.min(initial=math.inf)) for s in sources)
    root = float(hull.value[0] / hull.weight_m[0])
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(root, 0, ())]
    checks = work = 0
    while waiting and waiting[0][0] < least and checks < LEANEST_CHECKS and work < LEANEST_WORK:
        _, _, chosen = heapq.heappop(waiting)
        f = fixed[len(chosen)]
        for c in range(relaxed.problem.domains[f]):
            classes = {**dict(zip(fixed, chosen, strict=False)), f: c}
            problem = condition(relaxed, classes)
            program = build_program(problem, relaxed.order)
            search = HullSearch(program, flatten(program))
            checks, work = checks + 1, work + program.work
            found = search.solve([1.0], [0.0])
            if not found or found[0][0] >= least:
                continue
            if len(classes) < len(fixed):
                # deepest first among equals: a strategy ends the search
                heapq.heappush(waiting, (found[0][0], -len(classes), (*chosen, c)))
            else:
                least = found[0][0]
                vertices = search.run(1)
                assert vertices is not None, "the scalar problem found a strategy here"
                sources.append(VertexSource(problem, vertices))
    if waiting:
        least = min(least, waiting[0][0])
    value = hull.value.copy()
    value[0] = hull.weight_m[0] * least
    return replace(hull, value=value)


def _possible(relaxed: Split) -> dict[int, int] | None:
    """Depth first, some assignment with which a strategy exists; None when there is none."""
    fixed = sorted(relaxed.twins)
    checks = 0

    def search(depth: int, classes: dict[int, int]) -> dict[int, int] | None:
        nonlocal checks
        if depth == len(fixed):
            return classes
        f = fixed[depth]
        for c in range(relaxed.problem.domains[f]):
            checks += 1
            if checks > FEASIBILITY_CHECKS:
                return None
            attempt = {**classes, f: c}
            problem = condition(relaxed, attempt)
            program = build_program(problem, relaxed.order)
            if HullSearch(program, flatten(program)).run(2) is not None:
                found = search(depth + 1, attempt)
                if found is not None:
                    return found
        return None

    found = search(0, {})
    if found is None and checks > FEASIBILITY_CHECKS:
        names = ", ".join(repr(relaxed.problem.graph.names[f]) for f in fixed[:5])
        raise ValueError(
            f"no possible strategy was found in {FEASIBILITY_CHECKS} attempts: around {names} the graph "
            "is too entangled for an exact search and has too many inf entries; give these operators fewer "
            "configurations"
        )
    return found
