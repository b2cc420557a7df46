"""Index-space rules, one module per family; importing this package registers them all."""

from tensoropt.sharding.rules import (
    attention,
    experts,
    generators,
    indexing,
    lookup,
    matrix,
    normalise,
    pointwise,
    recurrent,
    views,
    writes,
)
from tensoropt.sharding.rules.registry import (
    Builder,
    Opaque,
    has_rule,
    index_space,
    registered_targets,
    rule,
)

__all__ = [
    "Builder",
    "Opaque",
    "attention",
    "experts",
    "generators",
    "has_rule",
    "index_space",
    "indexing",
    "lookup",
    "matrix",
    "normalise",
    "pointwise",
    "recurrent",
    "registered_targets",
    "rule",
    "views",
    "writes",
]
