"""Functions that find the memory-time frontier of a cost graph by eliminating one operator after another."""

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.search.bounds import Staircase
from tensoropt.search.program import TableTooLargeError
from tensoropt.search.result import ChosenStrategies, TrackedFrontier, certify
from tensoropt.search.track import NoStrategyError, outline_frontier, track_frontier
from tensoropt.search.within import TOO_LARGE

__all__ = [
    "TOO_LARGE",
    "ChosenStrategies",
    "CostGraph",
    "NoStrategyError",
    "Staircase",
    "TableTooLargeError",
    "TrackedFrontier",
    "certify",
    "outline_frontier",
    "track_frontier",
]
