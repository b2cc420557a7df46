"""Operations on Pareto frontiers of (memory, time) points, independent of models."""

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
