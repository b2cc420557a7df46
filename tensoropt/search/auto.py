"""Our method if no operator has to be fixed: the whole frontier, or one within the allowed gap."""

from __future__ import annotations

from tensoropt.search.exact import SearchResult, SearchSettings, track_exactly
from tensoropt.search.order import Order
from tensoropt.search.reduced_graph import ReducedGraph
from tensoropt.search.within import track_within


def track_auto(reduced: ReducedGraph, order: Order, settings: SearchSettings) -> SearchResult | None:
    """The frontier of a graph whose ``order`` fixes nothing; None if no strategy is possible."""
    track = track_within if settings.epsilon > 0 else track_exactly
    return track(reduced, order, settings)
