"""The cost tables that planners read, and masks of the configurations that a method allows.

A strategy chooses a value for each variable, such as the configuration of an operator group: which of the
group's dims each mesh axis splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable
from tensoropt.plan.space import Space
from tensoropt.sharding.regions import region_of


@dataclass(frozen=True)
class TableSpace:
    """The cost tables of one mesh and micro-batch count, and the names of their configurations.

    Published methods save gathered activations for backward as they are, so the tables contain no options
    that gather them again in backward.
    """

    mesh: Mesh
    tables: CostTables
    names: Space

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", self.tables.without_moves)


Scheme = Callable[[CostTables, VariableTable, int], np.ndarray | None]
"""The choices that a method allows: (tables, variable, index of a configuration) -> mask over the options of
the configuration, or None for all (:meth:`~tensoropt.costs.cost_graph.CostGraph.restricted`)."""


def computed_otherwise(tables: CostTables, variable: VariableTable, index: int, recomputing: bool) -> bool:
    """Return whether a configuration recomputes though ``recomputing`` is false, or is that of a group in a
    recomputable block and does not recompute though ``recomputing`` is true."""
    if not variable.again:
        return False
    if recomputing and variable.key.kind == "group":
        in_block = variable.key in region_of(tables.regions)
        return in_block and not variable.again[index]
    return variable.again[index] and not recomputing


def in_a_form(
    allowed: Scheme, recomputing: bool, tables: CostTables, variable: VariableTable, index: int
) -> np.ndarray | None:
    """Return the mask of a scheme, restricted to recomputing all blocks or, unless ``recomputing``, none."""
    if computed_otherwise(tables, variable, index, recomputing):
        return NO_OPTION
    return allowed(tables, variable, index)


def following_the_batch(batch: Callable[[CostTables, Variable], str], stored: Scheme) -> Scheme:
    """Return the scheme that splits every group along its batch dim on every axis.

    Args:
        batch: (tables, operator group) -> the label of the group's split along its batch dim.
        stored: the scheme for how parameters are stored, as a mask over options.
    """

    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
        if variable.key.kind != "group":
            return stored(tables, variable, index) if variable.key.kind == "parameter" else None
        own = batch(tables, variable.key)
        if any(label != own for label in tables.labels(variable.key, index)):
            return NO_OPTION
        return stored(tables, variable, index)

    return allowed


def whole(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray:
    """Return a mask of the options that store parameters as they are used, without sharding."""
    # Codes from the second on: the first is the micro-batch axis, on which nothing is sharded.
    if variable.key.kind == "parameter":
        return np.array([all(code < 0 for code in variable.layouts[index][1:])])
    return np.arange(len(variable.memory[index])) == 0
