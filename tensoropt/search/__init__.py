"""Cost graph -> frontier: elimination, linear dynamic programming, unroll, bounds."""

from tensoropt.search.costgraph import CostGraph
from tensoropt.search.result import TrackedFrontier
from tensoropt.search.track import track_frontier

__all__ = ["CostGraph", "TrackedFrontier", "track_frontier"]
