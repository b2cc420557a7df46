"""Stages whose devices each take a share of the batch, as in pipelines without sharded parameters."""

from __future__ import annotations

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.planners.sharded.common.restricted import whole
from tensoropt.planners.tables import Scheme, computed_otherwise


def flat(mesh: Mesh) -> bool:
    """Return whether a stage's mesh has at most one axis."""
    return len(mesh.shape) <= 2


def following_the_batch(*, recomputing: bool | None = False) -> Scheme:
    """Return the scheme that splits every group of a stage along its batch dim only, with whole
    parameters.

    Args:
        recomputing: whether blocks are recomputed in backward; None leaves this open.
    """

    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
        if computed_otherwise(tables, variable, index, recomputing):
            return NO_OPTION
        if variable.key.kind == "parameter":
            return whole(tables, variable, index)
        if variable.key.kind != "group":
            return None
        batch = str(tables.micro[variable.key].label)
        if any(label != batch for label in tables.labels(variable.key, index)):
            return NO_OPTION
        return whole(tables, variable, index)

    return allowed
