"""The Pareto algebra on (memory, time) points; it knows nothing about models."""

from tensoropt.frontier.algebra import Frontier, product, reduce, union
from tensoropt.frontier.representatives import dominated_area, representatives
from tensoropt.frontier.tools import distance, hypervolume, knee, merge

__all__ = [
    "Frontier",
    "distance",
    "dominated_area",
    "hypervolume",
    "knee",
    "merge",
    "product",
    "reduce",
    "representatives",
    "union",
]
