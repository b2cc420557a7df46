"""Our method if operators have to be fixed: bound, then search around one assignment after another.

The relaxation (``relaxation.py``) gives bounds and rules out configurations, after which the search is often
exact. To find strategies, the graph is cut finely, so that one assignment of the fixed operators takes
milliseconds: first the assignments that look-alikes (``fixing.py``) and the relaxation choose, then large
neighbourhoods of the known strategies (Shaw, CP 1998), in which some of the fixed operators are freed and the
others stay as in a point of the frontier. Every search is pruned by all that is known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensoropt.frontier import merge
from tensoropt.search.entangled.fixing import colourings, condition, preferred_classes, tie
from tensoropt.search.entangled.relaxation import (
    Relaxation,
    affordable_order,
    every_assignment,
    heuristic,
    possible,
    relax,
    tighten,
)
from tensoropt.search.hull import HullSearch, flatten
from tensoropt.search.order import Order, greedy_order
from tensoropt.search.reduced_graph import ReducedGraph, restrict
from tensoropt.search.shared import (
    LINES,
    SearchResult,
    SearchSettings,
    build_program,
    lines_that_fit,
    useful_classes,
)
from tensoropt.search.sources import Source
from tensoropt.search.within import track_auto

log = logging.getLogger(__name__)

# Assumptions, made with recurrent networks in mind, whose steps share two dozen operators: guessing and
# improving should take seconds. None of them affects what a result claims.
_FINE_TABLE = 2_000
"""Entries of the largest table once the fixed operators are set: such a search takes milliseconds."""
_LARGEST_TIED = 1_000_000
"""Entries of all tables of a graph whose look-alikes are tied."""
_LARGEST_AROUND = 300_000
"""Entries of all tables of a search in which some fixed operators have been freed."""
_FEW_ASSIGNMENTS = 12
"""Up to this number, all assignments of the fixed operators are searched, which makes the result exact."""
_ASSIGNMENTS = 24
"""The most assignments that are guessed."""
_WORTH_ANOTHER_ROUND = 0.9
"""The graph is searched anew if at most this share of its classes is left."""
_BASES = 6
"""The number of frontier points around which neighbourhoods are searched."""
_NEIGHBOURS = 6
"""The number of operators in a neighbourhood that is a run of operators."""
_SEARCHES = 48
"""The most neighbourhoods that are searched."""

_Classes = dict[int, int]


@dataclass(eq=False)
class _Conditioned:
    """Strategies for fixed values of some operators; ``tried``: the number of assignments, complete or
    partial."""

    reduced: ReducedGraph
    settings: SearchSettings
    fixed: tuple[int, ...]
    sources: list[Source] = field(default_factory=list)
    tried: int = 0

    def search(self, classes: _Classes, free: Sequence[int] = ()) -> bool:
        masks = {f: np.arange(self.reduced.domains[f]) == c for f, c in classes.items() if f not in free}
        inner = restrict(self.reduced, masks)
        # The growth of 0.1 per absorbed table is that of all our orders, see affordable_order.
        order = greedy_order(inner, 0.1, _LARGEST_AROUND)
        if order.fixed or (free and order.total > _LARGEST_AROUND):
            return False
        self.tried += 1
        # Strategies that are already known need not turn up, so each search is pruned by all earlier ones.
        result = track_auto(inner, order, self.settings.after(self.sources))
        return result is not None and self._add(result.sources)

    def _add(self, sources: Sequence[Source]) -> bool:
        everything = [*self.sources, *sources]
        used = np.unique(merge(everything).origin[:, 0]).tolist()
        new = any(i >= len(self.sources) for i in used)
        self.sources = [everything[i] for i in used]
        return new

    def guess(self, bounded: Relaxation) -> None:
        guesses = [
            *_alike(self.reduced, self.fixed),
            *preferred_classes(bounded.split, self.fixed, bounded.hull.picks),
        ]
        distinct = {tuple(classes.values()): classes for classes in guesses}
        for classes in list(distinct.values())[:_ASSIGNMENTS]:
            self.search(classes)
        # All guesses may be impossible; a depth-first search then gives some assignment, or reports that it
        # cannot.
        if not self.sources and (some := possible(bounded.split)) is not None:
            relaxed = bounded.split
            inner = condition(relaxed.reduced, relaxed.copies, some)
            result = track_auto(inner, relaxed.order, self.settings)
            assert result is not None, "the scalar problem found a strategy here"
            self._add(result.sources)
        log.debug("%d assignments tried, %d sources kept", self.tried, len(self.sources))

    def improve(self) -> None:
        """Free groups of fixed operators around points of the frontier, as long as that helps and the budget
        lasts.
        """
        if not self.sources:
            return
        groups = _groups(self.reduced, self.fixed)
        budget = self.tried + _SEARCHES
        done: set[tuple[object, ...]] = set()
        improved = True
        while improved:
            improved = False
            for base in list(self._bases()):
                for group in groups:
                    # For this search, only the base's operators outside the group matter.
                    key = (group, tuple(c for f, c in base.items() if f not in group))
                    if key in done:
                        continue
                    if self.tried >= budget:
                        return
                    done.add(key)
                    improved |= self.search(base, group)

    def _bases(self) -> Iterator[_Classes]:
        frontier = merge(self.sources)
        picked = np.unique(np.linspace(0, len(frontier) - 1, _BASES).round().astype(int))
        names = self.reduced.graph.names
        class_of = {f: self._class_of(f) for f in self.fixed}
        for which, point in frontier.origin[picked].tolist():
            strategy = self.sources[which].rebuild(np.array([point])).strategy(0)
            classes = {f: class_of[f].get(strategy[names[f]]) for f in self.fixed}
            if all(c is not None for c in classes.values()):
                yield {f: c for f, c in classes.items() if c is not None}

    def _class_of(self, v: int) -> dict[int, int]:
        leaf = self.reduced.leaves[self.reduced.node_leaf[v]]
        entry = np.repeat(np.arange(len(leaf.offsets) - 1), np.diff(leaf.offsets))
        return dict(zip(leaf.configuration.tolist(), entry.tolist(), strict=True))


def track_entangled(reduced: ReducedGraph, settings: SearchSettings) -> SearchResult | None:
    """Return the frontier of any reduced graph by our method; None if no strategy is possible.

    If operators have to be fixed, classes that the relaxation rules out are left out, until the search is
    exact or nothing more can be ruled out.
    """
    sources: list[Source] = []
    tried = 0

    def pruned(p: ReducedGraph, order: Order) -> SearchResult | None:
        return track_auto(p, order, settings.after(sources))

    while True:
        # Every round leaves at most WORTH_ANOTHER_ROUND of the classes, so the loop ends.
        order = affordable_order(reduced)
        if not order.fixed:
            return _together(sources, pruned(reduced, order))
        bounded = relax(reduced, order)
        if bounded is None:
            return _together(sources, None)
        total = math.prod(reduced.domains[f] for f in order.fixed)
        if total <= _FEW_ASSIGNMENTS:
            every, exact = every_assignment(bounded.split, pruned)
            sources += every
            if exact or not sources:
                return _together(sources, None)
            return heuristic(reduced, order, bounded, sources, total)
        around = _Conditioned(reduced, settings, _cutset(reduced, order), sources)
        around.guess(bounded)
        if around.sources:
            bounded = tighten(bounded, merge(around.sources))
        narrowed = _narrowed(reduced, bounded, around)
        if narrowed is reduced:
            around.improve()
            narrowed = _narrowed(reduced, bounded, around)
        sources, tried = around.sources, tried + around.tried
        if narrowed is None or (narrowed is reduced and not sources):
            return _together(sources, None)
        if narrowed is reduced:
            return heuristic(reduced, order, bounded, sources, tried)
        reduced = narrowed


def _together(sources: list[Source], rest: SearchResult | None) -> SearchResult | None:
    if rest is None:
        return SearchResult(tuple(sources), merge(sources), None, True) if sources else None
    everything = (*sources, *rest.sources)
    return SearchResult(everything, merge(everything), rest.bound, rest.exact, rest.notes)


def _narrowed(reduced: ReducedGraph, bounded: Relaxation, around: _Conditioned) -> ReducedGraph | None:
    """Return the graph without the classes that cannot reach the frontier; itself if they are too few to
    matter.

    None if no class can reach it.
    """
    incumbents = around.settings.with_rivals(around.sources)
    if not len(incumbents):
        return reduced
    kept = useful_classes(bounded.program, bounded.search, bounded.hull, incumbents)
    masks = {v: kept[v].copy() for v in range(len(reduced.domains))}
    for f, same in bounded.split.copies.items():
        for t in same:
            # All copies stand for one operator, so a class that one of them cannot use is useless.
            masks[f] &= kept[t]
    if not all(mask.any() for mask in masks.values()):
        return None
    left = sum(int(mask.sum()) for mask in masks.values())
    log.debug("%d of %d classes can reach the frontier", left, sum(reduced.domains))
    return restrict(reduced, masks) if left < _WORTH_ANOTHER_ROUND * sum(reduced.domains) else reduced


def _cutset(reduced: ReducedGraph, order: Order) -> tuple[int, ...]:
    return tuple(sorted({*greedy_order(reduced, 0.1, _FINE_TABLE).fixed, *order.fixed}))


def _alike(reduced: ReducedGraph, fixed: tuple[int, ...]) -> list[_Classes]:
    """Return classes that the hull vertices of the tied graphs choose, starting with the finest affordable
    graph."""
    guesses: list[_Classes] = []
    for colour in colourings(reduced):
        tied = tie(reduced, colour)
        order = greedy_order(tied, 0.1, _LARGEST_TIED)
        if order.fixed or order.total > _LARGEST_TIED:
            break
        program = build_program(tied, order)
        hull = HullSearch(program, flatten(program)).find_hull(lines_that_fit(program, LINES))
        if hull is not None:
            # Colourings come from coarse to fine, and guesses are tried from the front.
            guesses = [{f: int(pick[colour[f], 0]) for f in fixed} for pick in hull.picks] + guesses
    return guesses


def _groups(reduced: ReducedGraph, fixed: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return neighbourhoods: look-alikes at every degree of likeness, coarse ones first, followed by runs of
    operators."""
    groups: dict[tuple[int, ...], None] = {}
    for colour in colourings(reduced):
        for c in dict.fromkeys(colour[list(fixed)].tolist()):
            groups.setdefault(tuple(f for f in fixed if colour[f] == c))
    for first in range(0, len(fixed), _NEIGHBOURS // 2):
        groups.setdefault(fixed[first : first + _NEIGHBOURS])
    return list(groups)
