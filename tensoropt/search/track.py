"""The entry of the search: checked settings, one search in bands, the result with its certificate."""

from __future__ import annotations

import numpy as np

from tensoropt.frontier import merge
from tensoropt.frontier.kernels import thin
from tensoropt.search.auto import SearchSettings
from tensoropt.search.bands import Band, distinct, search_bands
from tensoropt.search.costgraph import CostGraph
from tensoropt.search.reduced_graph import impossible, reduce_graph
from tensoropt.search.result import ChosenStrategy, TrackedFrontier
from tensoropt.types import Floats

METHODS = ("auto", "ldp", "elimination")


class NoStrategyError(ValueError):
    """Nothing is possible; the message names where."""


def track_frontier(
    graph: CostGraph,
    *,
    epsilon: float = 0.0,
    method: str = "auto",
    max_points: int | None = None,
    threads: int | None = None,
) -> TrackedFrontier:
    """The cost frontier of ``graph``: every trade-off of memory and time that no other strategy beats.

    ``epsilon``: allowed gap; 0 searches until nothing is missing, 0.001 may stop as soon as it is proven
    that no strategy is more than 0.1 % faster within any memory budget. ``method``: "auto" (ours), "ldp" or
    "elimination" (the paper's). ``max_points``: points kept per table entry and in the result; trimming
    costs exactness, never achievability. ``threads``: default one per core; the result does not depend on it.

    Raises ``ValueError`` for bad settings and for costs whose sums are too large, :class:`NoStrategyError`
    where nothing is possible, and :class:`~tensoropt.search.TableTooLargeError` when an unpruned method
    outgrows the memory.
    """
    settings = check_settings(epsilon, method, max_points, threads)
    return track(graph, method, settings)


def track(graph: CostGraph, method: str, settings: SearchSettings) -> TrackedFrontier:
    """One search with checked settings; with rivals, complete only where they leave room."""
    if not len(graph):
        return TrackedFrontier(
            np.zeros(1),
            np.zeros(1),
            True,
            (),
            lambda _: ChosenStrategy({}, {}),
            lambda m: np.where(m >= 0, 0.0, np.inf),
        )
    graph.check_sums()
    culprit = graph.blocked()
    bands: list[Band] = []
    if culprit is None:
        reduced = reduce_graph(graph)
        bands = search_bands(reduced, method, settings)
        if not bands:
            culprit = impossible(reduced)
    if culprit is not None:
        raise NoStrategyError(
            f"no strategy is possible: {culprit}; make some of these entries finite or add configurations"
        )
    return _result(bands, settings.max_points)


def check_settings(
    epsilon: float, method: str, max_points: int | None, threads: int | None
) -> SearchSettings:
    """The settings, or ``ValueError`` with the rule, the value and the remedy."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if not (0.0 <= epsilon < np.inf):
        raise ValueError(
            f"epsilon is {epsilon}; it must be a finite relative gap of at least 0, such as 0.001"
        )
    if max_points is not None and max_points < 2:
        raise ValueError(f"max_points is {max_points}; a frontier needs at least its 2 ends, or None for all")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1, or None for one per core")
    return SearchSettings(epsilon, max_points, threads)


def _result(bands: list[Band], max_points: int | None) -> TrackedFrontier:
    everything = merge(bands)
    exact = all(band.found.exact for band in bands)
    tolerance = np.array([band.reduced.memory_tolerance for band in bands])[everything.origin[:, 0]]
    # The budget from which on a bound has to count a point as fitting: its memory less what rounding may have
    # added. Made ascending from the right, as searchsorted needs it.
    reached = np.minimum.accumulate((everything.memory - tolerance)[::-1])[::-1]
    least_time = np.append(np.inf, everything.time)
    kept = distinct(everything, bands)
    memory, time, origin = everything.memory[kept], everything.time[kept], everything.origin[kept]
    # Tables were thinned one by one; the result may still have more points, as it merges several sources.
    if max_points is not None and len(memory) > max_points:
        scratch = np.empty((2, len(memory)), np.int64)
        chosen = scratch[0, : thin(memory, time, len(memory), max_points, scratch[0], scratch[1])]
        memory, time, origin = memory[chosen], time[chosen], origin[chosen]
        exact = False

    def unroll(index: int) -> ChosenStrategy:
        which, point = origin[index].tolist()
        band = bands[which]
        which, point = band.found.frontier.origin[band.first + point].tolist()
        return band.found.sources[which].rebuild(point)

    def bounds(budgets: Floats) -> Floats:
        # Where all is exact the frontier is its own bound, which no hull betters.
        if not all(band.found.exact for band in bands):
            return np.max([band.bounds(budgets) for band in bands], axis=0)
        return least_time[np.searchsorted(reached, budgets, side="right")]

    notes = tuple(dict.fromkeys(note for band in bands for note in band.found.notes))
    return TrackedFrontier(memory, time, exact, notes, unroll, bounds)
