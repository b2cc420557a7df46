"""The paper's two methods: FT-Elimination and FT-LDP.

Cai et al., "TensorOpt" (arXiv 2004.10856), section 4. No pruning here.
"""

from __future__ import annotations

import math

from tensoropt.frontier import merge
from tensoropt.search.auto import LINES, Found, Settings, build_program, lines_that_fit
from tensoropt.search.engine import Engine
from tensoropt.search.entangled.fixing import candidates, condition
from tensoropt.search.entangled.relaxation import Solver, every_assignment, heuristic, possible, relax
from tensoropt.search.hull import HullSearch
from tensoropt.search.order import Order, paper_order
from tensoropt.search.problem import Problem
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import PassSource, Source

ASSIGNMENTS = 12
FINE_POINTS = 1024


def track_paper(problem: Problem, linear: bool, settings: Settings) -> Found | None:
    """The frontier by FT-LDP (``linear``) or FT-Elimination; None when no strategy is possible."""

    def plain(p: Problem, order: Order) -> Found | None:
        return _unpruned(p, order, settings)

    order = paper_order(problem, linear)
    return _with_fixed(problem, order, plain) if order.fixed else plain(problem, order)


def _unpruned(problem: Problem, order: Order, settings: Settings) -> Found | None:
    program = build_program(problem, order)
    hull = HullSearch(program, flatten(program)).run(lines_that_fit(program, LINES))
    if hull is None:
        return None
    thin = settings.max_points or (FINE_POINTS if settings.epsilon > 0 else 0)
    result = Engine(program, settings.threads).run(None, thin)
    source = PassSource(program, result)
    return Found((source,), merge([source]), hull, not result.thinned)


def _with_fixed(problem: Problem, order: Order, solver: Solver) -> Found | None:
    """Heuristic elimination (section 4.2): try assignments of the operators that no elimination removes."""
    bounded = relax(problem, order)
    if bounded is None:
        return None
    relaxed = bounded.split
    total = math.prod(problem.domains[f] for f in order.fixed)
    if total <= ASSIGNMENTS:
        every, exact = every_assignment(relaxed, solver)
        if not every:
            return None
        found = Found(tuple(every), merge(every), bounded.hull, exact)
        return found if exact else heuristic(problem, order, bounded, every, total)
    sources: list[Source] = []
    tried = candidates(relaxed, order.fixed, bounded.hull.picks)[:ASSIGNMENTS]
    for classes in tried:
        part = solver(condition(relaxed.problem, relaxed.twins, classes), relaxed.order)
        sources += [] if part is None else part.sources
    if not sources:
        some = possible(relaxed)
        if some is None:
            return None
        part = solver(condition(relaxed.problem, relaxed.twins, some), relaxed.order)
        assert part is not None, "the scalar problem found a strategy here"
        sources += part.sources
    return heuristic(problem, order, bounded, sources, len(tried))
