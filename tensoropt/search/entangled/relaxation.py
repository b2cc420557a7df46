"""What splitting the fixed operators bounds: the relaxation's hull, and the least memory of any strategy."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.frontier import merge
from tensoropt.search.auto import LINES, Found, build_program, lines_that_fit
from tensoropt.search.costgraph import FloatArray
from tensoropt.search.entangled.fixing import Split, condition, split
from tensoropt.search.hull import Hull, HullSearch
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.problem import Problem
from tensoropt.search.program import Program
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import Source, VertexSource

log = logging.getLogger(__name__)

Solver = Callable[[Problem, Order], Found | None]

LARGEST_PROGRAM = 16_000_000
LARGEST_RELAXED = 300_000
LARGEST_WORK = 4_000_000_000
FEASIBILITY_CHECKS = 200
CLOSE = 1e-4
LEANEST_CHECKS = 400
LEANEST_WORK = 200_000_000


@dataclass(frozen=True, eq=False, slots=True)
class Relaxation:
    """A problem whose fixed operators are split, and its hull, which bounds every strategy."""

    split: Split
    program: Program
    search: HullSearch
    hull: Hull


def relax(problem: Problem, order: Order) -> Relaxation | None:
    """The relaxation in which every edge of an operator that ``order`` fixes chooses for itself.

    None when not even that leaves a strategy.
    """
    relaxed = split(problem, order)
    program = build_program(relaxed.shared, relaxed.order)
    search = HullSearch(program, flatten(program))
    hull = search.run(lines_that_fit(program, LINES))
    return None if hull is None else Relaxation(relaxed, program, search, hull)


def affordable_order(problem: Problem) -> Order:
    """An order whose tables together fit; operators are fixed until they do.

    Once operators have to be fixed the tables only bound, which smaller ones do nearly as well.
    """
    order = greedy_order(problem, 0.1)
    while True:
        most = LARGEST_RELAXED if order.fixed else LARGEST_PROGRAM
        if order.total <= most:
            return order
        relaxed = split(problem, order)
        program = build_program(relaxed.shared, relaxed.order)  # equal tables count once
        if program.entries <= most and program.work <= LARGEST_WORK:
            return order
        log.info("%d table entries are too many; fixing an operator", program.entries)
        order = greedy_order(problem, 0.1, max(order.largest // 2, 1))


def unsplit_hull(problem: Problem, fixed: Order) -> Hull | None:
    """The hull of the problem itself, where another order spares its scalar problems the fixed operators."""
    order = greedy_order(problem, 0.1)
    if order.fixed or order.total > max(LARGEST_PROGRAM, fixed.total):
        return None
    program = build_program(problem, order)
    return HullSearch(program, flatten(program)).run(lines_that_fit(program, LINES))


def with_least_memory(relaxed: Split, hull: Hull, sources: list[Source]) -> Hull:
    """The hull with its first line at the least memory of any strategy, by branch and bound.

    Branches on the class of one fixed operator after the other; the relaxation bounds. A leaner strategy
    than ``sources`` have is added to them. After ``LEANEST_CHECKS`` problems, or ``LEANEST_WORK`` pairs of
    entries (a hundredth where little is left to prove), the least bound still open is taken.
    """
    fixed = sorted(relaxed.twins)
    least = min(float(s.memory.min(initial=math.inf)) for s in sources)
    unit = _unit([leaf.memory for leaf in relaxed.problem.leaves], relaxed.problem.memory_grid)
    root = math.ceil(float(hull.value[0] / hull.weight_m[0]) / unit) * unit
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(root, 0, ())]
    checks = work = 0
    budget = LEANEST_WORK if root < least * (1.0 - CLOSE) else LEANEST_WORK // 100
    while waiting and waiting[0][0] < least and checks < LEANEST_CHECKS and work < budget:
        bound, _, chosen = heapq.heappop(waiting)
        f = fixed[len(chosen)]
        for c in range(relaxed.problem.domains[f]):
            classes = {**dict(zip(fixed, chosen, strict=False)), f: c}
            complete = len(classes) == len(fixed)
            problem = condition(relaxed.problem if complete else relaxed.shared, relaxed.twins, classes)
            program = build_program(problem, relaxed.order)
            search = HullSearch(program, flatten(program))
            checks, work = checks + 1, work + program.work
            found = search.solve([1.0], [0.0])
            if not found or found[0][0] >= least:
                continue
            if not complete:
                # deepest first among equals: a strategy ends the search
                heapq.heappush(waiting, (max(bound, found[0][0]), -len(classes), (*chosen, c)))
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


def _unit(costs: list[FloatArray], grid: float) -> float:
    """The largest power of two, at least ``grid``, of which all ``costs`` are multiples: one byte, say."""
    together = np.concatenate(costs) / grid
    whole = np.bitwise_or.reduce(together[together > 0].astype(np.int64), initial=0)
    return grid * float(whole & -whole) if whole else grid


def possible(relaxed: Split) -> dict[int, int] | None:
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
            problem = condition(relaxed.problem, relaxed.twins, attempt)
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


def every_assignment(relaxed: Split, solver: Solver) -> tuple[list[Source], bool]:
    """(strategies with the fixed operators at any of their classes, whether each search was exact)."""
    fixed = sorted(relaxed.twins)
    sources: list[Source] = []
    exact = True
    for classes in itertools.product(*(range(relaxed.problem.domains[f]) for f in fixed)):
        given = dict(zip(fixed, classes, strict=True))
        found = solver(condition(relaxed.problem, relaxed.twins, given), relaxed.order)
        if found is not None:
            sources += found.sources
            exact = exact and found.exact
    return sources, exact


def heuristic(
    problem: Problem, order: Order, bounded: Relaxation, sources: list[Source], tried: int
) -> Found:
    """What is known after ``tried`` assignments of the operators that ``order`` fixes, and what bounds it."""
    hull = unsplit_hull(problem, order) or with_least_memory(bounded.split, bounded.hull, sources)
    names = ", ".join(repr(problem.graph.names[f]) for f in order.fixed[:5])
    more = f" and {len(order.fixed) - 5} more" if len(order.fixed) > 5 else ""
    total = math.prod(problem.domains[f] for f in order.fixed)
    note = f"heuristic elimination: tried {tried} of {total:.3g} assignments of {names}{more}"
    return Found(tuple(sources), merge(sources), hull, False, (note,))
