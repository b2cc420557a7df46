"""The paper's two methods: FT-Elimination and FT-LDP.

Cai et al., "TensorOpt" (arXiv 2004.10856), section 4. These methods do not prune.
"""

from __future__ import annotations

import math

from tensoropt.frontier import merge
from tensoropt.search.engine import ProgramRunner
from tensoropt.search.entangled.fixing import condition, preferred_classes
from tensoropt.search.entangled.relaxation import Solver, every_assignment, heuristic, possible, relax
from tensoropt.search.exact import LINES, SearchResult, SearchSettings, build_program, lines_that_fit
from tensoropt.search.hull import HullSearch
from tensoropt.search.order import Order, paper_order
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.scalar import flatten
from tensoropt.search.sources import PassSource, Source

ASSIGNMENTS = 12
"""The number of assignments of the fixed operators that are tried; the paper leaves it open (section 4.2)."""
FINE_POINTS = 1024
"""The points kept per table entry if a gap is allowed; an assumption: fewer are faster, with a wider gap."""


def track_paper(reduced: ReducedGraph, linear: bool, settings: SearchSettings) -> SearchResult | None:
    """The frontier by FT-LDP (``linear``) or FT-Elimination; None if no strategy is possible."""

    def plain(p: ReducedGraph, order: Order) -> SearchResult | None:
        return _unpruned(p, order, settings)

    order = paper_order(reduced, linear)
    return _with_fixed(reduced, order, plain) if order.fixed else plain(reduced, order)


def _unpruned(reduced: ReducedGraph, order: Order, settings: SearchSettings) -> SearchResult | None:
    program = build_program(reduced, order)
    # The hull prunes nothing here. It shows whether any strategy exists, and certifies the result of a
    # thinned pass.
    hull = HullSearch(program, flatten(program)).find_hull(lines_that_fit(program, LINES))
    if hull is None:
        return None
    thin = settings.max_points or (FINE_POINTS if settings.epsilon > 0 else 0)
    result = ProgramRunner(program, settings.threads).run_pass(None, thin)
    source = PassSource(program, result)
    return SearchResult((source,), merge([source]), hull, not result.thinned)


def _with_fixed(reduced: ReducedGraph, order: Order, solver: Solver) -> SearchResult | None:
    """Heuristic elimination (section 4.2): try assignments of the operators that no elimination removes."""
    bounded = relax(reduced, order)
    if bounded is None:
        return None
    relaxed = bounded.split
    total = math.prod(reduced.domains[f] for f in order.fixed)
    if total <= ASSIGNMENTS:
        every, exact = every_assignment(relaxed, solver)
        if not every:
            return None
        found = SearchResult(tuple(every), merge(every), bounded.hull, exact)
        return found if exact else heuristic(reduced, order, bounded, every, total)
    sources: list[Source] = []
    tried = preferred_classes(relaxed, order.fixed, bounded.hull.picks)[:ASSIGNMENTS]
    for classes in tried:
        part = solver(condition(relaxed.reduced, relaxed.copies, classes), relaxed.order)
        sources += [] if part is None else part.sources
    if not sources:
        some = possible(relaxed)
        if some is None:
            return None
        part = solver(condition(relaxed.reduced, relaxed.copies, some), relaxed.order)
        assert part is not None, "the scalar problem found a strategy here"
        sources += part.sources
    return heuristic(reduced, order, bounded, sources, len(tried))
