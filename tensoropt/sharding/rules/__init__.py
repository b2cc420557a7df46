"""Index-space rules, one module per family; importing this package registers them all."""

from tensoropt.sharding.rules import attention, lookup, matrix, normalise, pointwise, views
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
    "has_rule",
    "index_space",
    "lookup",
    "matrix",
    "normalise",
    "pointwise",
    "registered_targets",
    "rule",
    "views",
]
