"""Cost tables as planners read them, and masks of the configurations that a method allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.plan.space import Space
from tensoropt.sharding.regions import region_of


@dataclass(frozen=True)
class TableSpace:
    """Tables of one mesh and micro-batch count, and the names of their configurations.

    Published methods keep gathered activations and read pairwise tables: edges have no options here.
    """

    mesh: Mesh
    tables: CostTables
    names: Space

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", self.tables.without_moves)


Scheme = Callable[[CostTables, VariableTable, int], np.ndarray | None]
"""The choices that a method allows: (tables, variable, configuration) -> mask over its options, or None for
all of them (:meth:`~tensoropt.costs.cost_graph.CostGraph.restricted`).
"""


def computed_otherwise(tables: CostTables, variable: VariableTable, index: int, recomputing: bool) -> bool:
    """Return whether a configuration recomputes although it should not, or does not although it should."""
    if not variable.again:
        return False
    if recomputing and variable.key.kind == "group":
        in_block = variable.key in region_of(tables.regions)
        return in_block and not variable.again[index]
    return variable.again[index] and not recomputing
