"""The search of graphs that are too entangled for exact elimination, so that some operators have to be fixed.

If tables would be too large otherwise, operators are *fixed* (:mod:`tensoropt.search.order`): each gets one
configuration at a time, and the rest of the graph is searched exactly. A relaxation (``relaxation.py``) gives
bounds and rules out configurations, after which the search is often exact. To find strategies, so many
operators are fixed that searching one assignment of their configurations takes milliseconds. The assignments
tried come from graphs in which operators that look alike choose alike (``fixing.py``), and from the
relaxation. All known strategies prune each search.
"""

from __future__ import annotations

import math

import numpy as np

from tensoropt.frontier import merge
from tensoropt.search import shared
from tensoropt.search.entangled import relaxation
from tensoropt.search.entangled.fixing import colourings, preferred_classes, tie
from tensoropt.search.hull import HullSearch
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.reduced_graph import ReducedGraph, restrict
from tensoropt.search.sources import Source
from tensoropt.search.within import track_auto

# Assumptions, made with recurrent networks in mind, whose steps share two dozen operators: guessing should
# take seconds. None of them affects what a result claims.
_FINE_TABLE = 2_000
"""The most entries of a table once the fixed operators are set: such a search takes milliseconds."""
_LARGEST_TIED = 1_000_000
"""The most entries of all tables of a graph in which look-alikes choose alike."""
_FEW_ASSIGNMENTS = 12
"""The number of assignments of the fixed operators up to which all are searched, so that the result is
exact."""
_ASSIGNMENTS = 72
"""The most assignments that are guessed."""
_WORTH_ANOTHER_ROUND = 0.9
"""The graph is searched anew if at most this share of its classes is left."""


def track_entangled(reduced: ReducedGraph, settings: shared.SearchSettings) -> shared.SearchResult | None:
    """Return the frontier of any reduced graph by the method "auto"; None if no strategy is possible.

    If operators have to be fixed, classes of configurations that cannot be in a better strategy than the
    known ones are removed, until the search is exact or too few can be removed.
    """
    sources: list[Source] = []
    tried = 0

    def pruned(p: ReducedGraph, order: Order) -> shared.SearchResult | None:
        return track_auto(p, order, settings.after(sources))

    while True:
        # Every round leaves at most WORTH_ANOTHER_ROUND of the classes, so the loop ends.
        order = relaxation.affordable_order(reduced)
        if not order.fixed:
            return _together(sources, pruned(reduced, order))
        bounded = relaxation.relax(reduced, order)
        if bounded is None:
            return _together(sources, None)
        total = math.prod(reduced.domains[f] for f in order.fixed)
        if total <= _FEW_ASSIGNMENTS:
            every, exact = relaxation.every_assignment(bounded.split, pruned)
            sources += every
            if exact:
                return _together(sources, None)
            return relaxation.heuristic(reduced, order, bounded, sources, total)
        fixed = tuple(sorted({*greedy_order(reduced, 0.1, _FINE_TABLE).fixed, *order.fixed}))
        for classes in _guesses(reduced, bounded, fixed):
            inner = restrict(reduced, {f: np.arange(reduced.domains[f]) == c for f, c in classes.items()})
            if (cheap := greedy_order(inner, 0.1)).fixed:
                continue
            result = pruned(inner, cheap)
            sources = sources if result is None else _unbeaten([*sources, *result.sources])
            tried += 1
        # All guesses may be impossible; a depth-first search then gives some assignment, or reports that it
        # cannot.
        sources = sources or list(relaxation.any_strategy(bounded.split, pruned))
        if sources:
            bounded = relaxation.tighten(bounded, merge(sources))
        narrowed = _narrowed(reduced, bounded, settings, sources)
        if narrowed is None or (narrowed is reduced and not sources):
            return _together(sources, None)
        if narrowed is reduced:
            return relaxation.heuristic(reduced, order, bounded, sources, tried)
        reduced = narrowed


def _together(sources: list[Source], rest: shared.SearchResult | None) -> shared.SearchResult | None:
    if rest is None:
        return shared.SearchResult(tuple(sources), merge(sources), None, True) if sources else None
    everything = (*sources, *rest.sources)
    return shared.SearchResult(everything, merge(everything), rest.bound, rest.exact, rest.notes)


def _unbeaten(sources: list[Source]) -> list[Source]:
    return [sources[i] for i in np.unique(merge(sources).origin[:, 0]).tolist()]


def _guesses(
    reduced: ReducedGraph, bounded: relaxation.Relaxation, fixed: tuple[int, ...]
) -> list[dict[int, int]]:
    """Return assignments of classes to the ``fixed`` operators, in the order in which to try them.

    The first are strategies of smaller graphs, in which operators that look alike are merged; the least
    merged graph comes first. The last are the choices of copies in the relaxation.
    """
    guesses: list[dict[int, int]] = []
    for colour in colourings(reduced):
        tied = tie(reduced, colour)
        order = greedy_order(tied, 0.1, _LARGEST_TIED)
        if order.fixed or order.total > _LARGEST_TIED:
            break
        program = shared.build_program(tied, order)
        hull = HullSearch(program).find_hull(shared.lines_that_fit(program, shared.LINES))
        if hull is not None:
            # Colourings come from coarse to fine, and guesses are tried from the front.
            guesses = [{f: int(pick[colour[f], 0]) for f in fixed} for pick in hull.picks] + guesses
    guesses += preferred_classes(bounded.split, fixed, bounded.hull.picks)
    return list({tuple(classes.values()): classes for classes in guesses}.values())[:_ASSIGNMENTS]


def _narrowed(
    reduced: ReducedGraph,
    bounded: relaxation.Relaxation,
    settings: shared.SearchSettings,
    sources: list[Source],
) -> ReducedGraph | None:
    """Return the graph without the classes that cannot be in a strategy of the frontier. If such classes are
    too few to matter, return the same graph; if an operator has only such classes, None."""
    incumbents = settings.with_rivals(sources)
    if not len(incumbents):
        return reduced
    kept = shared.useful_classes(bounded.program, bounded.search, bounded.hull, incumbents)
    masks = {v: kept[v].copy() for v in range(len(reduced.domains))}
    for f, same in bounded.split.copies.items():
        for t in same:
            # All copies stand for one operator, so a class that one of them cannot use is useless.
            masks[f] &= kept[t]
    if not all(mask.any() for mask in masks.values()):
        return None
    left = sum(int(mask.sum()) for mask in masks.values())
    return restrict(reduced, masks) if left < _WORTH_ANOTHER_ROUND * sum(reduced.domains) else reduced
