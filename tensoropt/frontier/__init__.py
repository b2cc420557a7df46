"""The Pareto algebra on (memory, time) points; it knows nothing about models."""

from tensoropt.frontier.tools import (
    Frontier,
    distance,
    dominated_area,
    hypervolume,
    knee,
    merge,
    product,
    reduce,
    representatives,
    union,
)

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
