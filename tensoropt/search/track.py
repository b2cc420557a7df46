"""The entry point of the search: it checks settings, searches, and returns the frontier with its bounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.frontier import merge
from tensoropt.frontier.kernels import thin
from tensoropt.frontier.tools import Points
from tensoropt.search.bounds import Highest, Staircase
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.paper import BandSearch, distinct, search_bands
from tensoropt.search.reduced_graph import impossible, reduce_graph
from tensoropt.search.result import SAME, ChosenStrategies, TrackedFrontier
from tensoropt.search.shared import SearchSettings
from tensoropt.types import Floats, Indices

_METHODS = ("auto", "ldp", "elimination")


class NoStrategyError(ValueError):
    """No strategy is possible; the message says where."""


def track_frontier(
    graph: CostGraph,
    *,
    epsilon: float = 0.0,
    method: str = "auto",
    max_points: int | None = None,
    threads: int | None = None,
    rivals: Points | None = None,
    thorough: bool = True,
) -> TrackedFrontier:
    """Return the cost frontier of ``graph``: every trade-off of memory and time that no other strategy beats.

    Args:
        epsilon: the allowed gap; 0 searches until nothing is missing. With 0.001, strategies may be missing
            that are up to 0.1 % faster than those returned for some memory budget. Time and memory of the
            search are then bounded, and so is the number of points (about ``log(slowest / fastest) /
            epsilon``). If the gap could not be proven everywhere, ``notes`` say so.
        method: "auto" (ours), "ldp" or "elimination" (the paper's).
        max_points: the points kept per table entry and in the result. If points are left out, the result is
            not exact, but each of its points is still a strategy.
        threads: by default one per core; the result does not depend on their number.
        rivals: points of other graphs. Strategies that they beat need not be returned, and bounds treat them
            as known.
        thorough: with an ``epsilon``, prove the gap even if that takes seconds; otherwise only if it takes
            less.

    Raises ``ValueError`` for bad settings and for costs whose sums are too large, :class:`NoStrategyError` if
    no strategy is possible, and :class:`~tensoropt.search.TableTooLargeError` if a method without pruning
    outgrows the memory.
    """
    _check_settings(epsilon, method, max_points, threads)
    return _track(graph, method, SearchSettings(epsilon, max_points, threads, rivals, thorough))


def outline_frontier(graph: CostGraph, *, threads: int | None = None) -> TrackedFrontier:
    """Return a first look at the frontier of ``graph``: some vertices of its lower convex hull, strategies
    between them, and the hull as the bound; for small graphs, the frontier itself.

    It takes as long as minimising a few weighted sums, and raises the same errors as :func:`track_frontier`.
    """
    # Any gap is allowed, so only what bounds the frontier is computed.
    return _track(graph, "auto", SearchSettings(np.inf, None, threads))


def _track(graph: CostGraph, method: str, settings: SearchSettings) -> TrackedFrontier:
    if not len(graph):
        nothing, chosen = np.zeros(1), ChosenStrategies.of(graph, *(np.zeros((1, 0), np.int64),) * 3)
        return TrackedFrontier(nothing, nothing, True, (), chosen.at, Staircase(nothing, nothing).bounds)
    tables = FlatTables.of(graph)
    tables.check_sums()
    culprit = tables.blocked()
    if culprit is None:
        reduced = reduce_graph(tables)
        if bands := search_bands(reduced, method, settings):
            return _result(bands, settings)
        culprit = impossible(reduced)
    raise NoStrategyError(
        f"no strategy is possible: {culprit}; make some of these costs finite or add configurations"
    )


def _check_settings(epsilon: float, method: str, max_points: int | None, threads: int | None) -> None:
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(_METHODS)}")
    if not (0.0 <= epsilon < np.inf):
        raise ValueError(
            f"epsilon is {epsilon}; it must be a finite relative gap of at least 0, such as 0.001"
        )
    if max_points is not None and max_points < 2:
        raise ValueError(f"max_points is {max_points}; a frontier needs at least its 2 ends, or None for all")
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1, or None for one per core")


def _result(bands: list[BandSearch], settings: SearchSettings) -> TrackedFrontier:
    everything = merge(bands)
    exact = all(band.result.exact for band in bands)
    tolerance = np.array([band.reduced.memory_tolerance for band in bands])[everything.origin[:, 0]]
    # The budget from which a bound has to count a point as fitting: its memory minus the most that rounding
    # may have added. It is made ascending from the right, because searchsorted requires it.
    reached = np.minimum.accumulate((everything.memory - tolerance)[::-1])[::-1]
    # If everything is exact, the frontier is its own bound, which no hull improves.
    own = Staircase(reached, everything.time)
    bounds = own.bounds if exact else Highest([band.bound for band in bands]).bounds
    kept = distinct(everything, bands)
    memory, time, origin = everything.memory[kept], everything.time[kept], everything.origin[kept]
    if 0 < settings.epsilon < np.inf and not exact:
        chosen = _enough_within(memory, time, bounds, settings.epsilon)
        memory, time, origin = memory[chosen], time[chosen], origin[chosen]
    most = settings.max_points
    # Tables were thinned one by one; the result may still have more points, because it merges several
    # sources.
    if most is not None and len(memory) > most:
        scratch = np.empty((2, len(memory)), np.int64)
        chosen = scratch[0, : thin(memory, time, len(memory), most, scratch[0], scratch[1])]
        memory, time, origin = memory[chosen], time[chosen], origin[chosen]
        exact = False

    def unroll(indices: Indices) -> ChosenStrategies:
        return _rebuilt(bands, origin[indices].astype(np.int64))

    notes = tuple(dict.fromkeys(note for band in bands for note in band.result.notes))
    return TrackedFrontier(memory, time, exact, notes, unroll, bounds)


def _rebuilt(bands: list[BandSearch], origin: Indices) -> ChosenStrategies:
    parts: list[ChosenStrategies] = []
    order: list[Indices] = []
    # Points of one source are rebuilt in one call.
    for which in np.unique(origin[:, 0]).tolist():
        band = bands[which]
        own = np.flatnonzero(origin[:, 0] == which)
        inner = band.result.frontier.origin[band.first + origin[own, 1]]
        for source in np.unique(inner[:, 0]).tolist():
            mine = inner[:, 0] == source
            parts.append(band.result.sources[source].rebuild(inner[mine, 1]))
            order.append(own[mine])
    back = np.argsort(np.concatenate(order))
    columns = (
        np.concatenate([getattr(part, name) for part in parts])[back]
        for name in ("configurations", "options", "edge_options")
    )
    return ChosenStrategies.of(bands[0].reduced.graph, *columns)


def _enough_within(
    memory: Floats, time: Floats, bounds: Callable[[Floats], Floats], epsilon: float
) -> Indices:
    """Return indices of a few points of a staircase with which the gap at any memory budget is at most
    ``epsilon``. Where the whole staircase has a wider gap, only points are left out that are at most
    ``epsilon / 2`` faster than a chosen point of less memory.

    Points are taken in order of memory. A point is left out if the last chosen point still is within the
    allowed gap at any budget below the next point's memory.
    """
    lower = bounds(np.append(memory[1:] * (1.0 - SAME), np.inf))
    # A millionth of the gap is reserved for the rounding of the division that computes it.
    proven = lower * (1.0 + epsilon * (1.0 - 1e-6))
    # A kept point with at most this time can replace one that is left out.
    serves = np.where(time <= proven, proven, time * (1.0 + epsilon / 2))
    kept, last = [], np.inf
    for i, (own, most) in enumerate(zip(time.tolist(), serves.tolist(), strict=True)):
        if last > most or i == len(time) - 1:
            kept.append(i)
            last = own
    return np.array(kept, np.int64)
