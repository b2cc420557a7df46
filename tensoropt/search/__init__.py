"""Cost graph -> frontier: elimination, linear dynamic programming, unroll, bounds."""

from tensoropt.search.costgraph import CostGraph
from tensoropt.search.memory import TableTooLargeError
from tensoropt.search.result import TrackedFrontier
from tensoropt.search.track import NoStrategyError, track_frontier
from tensoropt.search.union import UnionFrontier, certify, track_union

__all__ = [
    "CostGraph",
    "NoStrategyError",
    "TableTooLargeError",
    "TrackedFrontier",
    "UnionFrontier",
    "certify",
    "track_frontier",
    "track_union",
]
