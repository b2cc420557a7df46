"""Cost tables as planners read them: what configurations split, and which of them a method allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from tensoropt.cluster import Mesh
from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.plan.plan import MeshInfo
from tensoropt.plan.space import Space


@dataclass(frozen=True)
class TableSpace:
    """Tables of one mesh and micro-batch count, and the names of what can be chosen in them."""

    mesh: Mesh
    tables: CostTables
    names: Space

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step of this space."""
        return self.tables.mesh[0]

    def restricted(self, allowed: Allowed) -> CostTables:
        """Return the tables with everything else marked impossible."""
        return self.tables.restricted(partial(allowed, self))


def labels_of(space: TableSpace, name: str, index: int) -> tuple[str, ...]:
    """Return what a group's configuration splits on each mesh axis (without the micro-batches)."""
    return tuple(space.names.labels(name, index))


Allowed = Callable[[TableSpace, VariableTable, int], np.ndarray | None]
"""(space, variable, configuration) -> mask over its options, or None for all of them."""


def names_of(tables: CostTables) -> Space:
    """Describe, in words, what configurations of a stage's groups split."""
    groups: dict[str, Mapping[str, object]] = {}
    for group in tables.graph.groups:
        labels = [str(s.label) for s in group.strategies]
        choices = tables.templates[group.name].choices
        groups[group.name] = {"configurations": [[labels[i] for i in choice] for choice in choices]}
    return Space(
        mesh=MeshInfo(shape=tables.mesh[1:], names=tuple(f"axis{n}" for n in range(len(tables.mesh) - 1))),
        micro_batches=tables.mesh[0],
        groups=groups,
        hubs={},
        shared={},
        keys={},
    )
