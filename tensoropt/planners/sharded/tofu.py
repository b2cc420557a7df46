"""Tofu: recursive partitioning with the least communication, every tensor split at every step.

M. Wang, C. Huang, J. Li, *Supporting Very Large Models using Automatic Dataflow Graph Partitioning*, EuroSys
2019, section 5: the devices are divided step by step (by two where their number is a power of two); each step
splits every operator and every tensor once, by the dynamic program that needs the least communication for it
(section 5.2), and the next step starts from the halves (theorem 1: the steps' costs do not grow). The paper
coarsens the graph to a chain before that (section 5.1): forward and backward are one here anyway,
element-wise operators mostly belong to a group, and no chain is needed. Here a step is a mesh axis, outermost
first. An operator or parameter that cannot be split on an axis stays whole there; the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.sharded.common.cheapest import cheapest
from tensoropt.planners.sharded.common.restricted import why_none
from tensoropt.planners.tables import TableSpace
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.search import NoStrategyError

_WHOLE = frozenset({"none", "partial", "partial_grad"})
_MOST_NAMED = 6
"""The most operators left whole that the notes name."""


class _Recursion:
    def __init__(self, space: TableSpace):
        self.space = space
        self.tables: CostTables = space.tables
        self.labels = {
            g.name: [self.tables.labels(g.name, i) for i in range(len(self.tables.of[g.name].memory))]
            for g in self.tables.graph.groups
        }
        self.notes: tuple[str, ...] = ()

    def partition(self) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
        chosen: dict[str, tuple[str, ...]] = dict.fromkeys(self.labels, ())
        choice: dict[str, int] = {}
        axes = len(self.space.names.mesh.shape)
        for axis in range(max(axes, 1)):
            allowed: dict[str, np.ndarray] = {
                v.key: self._allowed(v, chosen.get(v.key), axis) for v in self.tables.variables
            }
            choice = self._step(allowed)
            chosen = {name: labels[choice[name]][: axis + 1] for name, labels in self.labels.items()}
        options: dict[str, int] = {
            v.key: int(v.memory[choice[v.key]].argmin()) for v in self.tables.variables
        }
        left = sorted(name for name, labels in chosen.items() if set(labels) & _WHOLE)
        more = f" and {len(left) - _MOST_NAMED} more" if left[_MOST_NAMED:] else ""
        shown = ", ".join(left[:_MOST_NAMED]) + more
        notes = (f"not split on every axis: {shown}",) if left else ()
        return choice, options, (*self.notes, *notes)

    def _allowed(self, variable: VariableTable, before: tuple[str, ...] | None, axis: int) -> np.ndarray:
        """Return the choices that a step may make: earlier axes as they were, later ones whole, this one
        split if possible.
        """
        # Recomputing is not part of the method.
        plain = ~np.array(variable.again, dtype=bool) if variable.again else True
        if before is None:
            return np.full(len(variable.memory), True) & plain
        labels = self.labels[variable.key]
        possible = (
            np.array([row[:axis] == before and set(row[axis + 1 :]) <= {"none"} for row in labels]) & plain
        )
        # Tofu splits every operator in every step; where that is impossible it stays whole (see the module).
        split = possible & np.array([not row or row[axis] not in _WHOLE for row in labels])
        return split if split.any() else possible

    def _step(self, allowed: Mapping[str, np.ndarray]) -> dict[str, int]:
        kept = {name: np.flatnonzero(mask) for name, mask in allowed.items()}
        if not all(map(len, kept.values())):
            raise NoStrategyError("no split on this axis is compatible with those already chosen")
        nodes: dict[str, np.ndarray] = {}
        for v in self.tables.variables:
            memory = np.array([float(m.min()) for m in v.memory])
            sent = np.array([float(n[m.argmin()]) for n, m in zip(v.communication, v.memory, strict=True)])
            # Costs of whole configurations, so that a step sees what earlier axes cost together with its own.
            nodes[v.key] = (sent + memory * _TIE_S_PER_BYTE)[kept[v.key]]
        edges = []
        for e in self.tables.edges:
            costs = e.table[:, :, 1] + e.table[:, :, 0] * _TIE_S_PER_BYTE
            edges.append((e.a, e.b, costs[np.ix_(e.rows[kept[e.a]], e.cols[kept[e.b]])]))
        choice, self.notes = cheapest(nodes, edges)
        return {name: int(kept[name][index]) for name, index in choice.items()}


_TIE_S_PER_BYTE = 1e-18
"""The weight of memory relative to communication: a GiB counts as much as a nanosecond, so it only decides
ties.
"""


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return one strategy for each space with as many axes as allow any strategy: the finest recursion.

    Raises:
        UnsuitableError: the graph is not reducible, or nothing can be split.
    """
    for axes in sorted({len(space.names.mesh.shape) for space in task.spaces}, reverse=True):
        selections = []
        for number, space in enumerate(task.spaces):
            if len(space.names.mesh.shape) != axes:
                continue
            try:
                choice, options, notes = _Recursion(space).partition()
            # Nothing of this mesh divides the model's sizes, or it was searched with a part of its splits
            # alone; another may do.
            except NoStrategyError:
                continue
            selections.append(Selection(number, choice, options, notes))
        if selections:
            return selections
    why = "tofu splits every tensor, and no mesh here divides this model's sizes"
    raise UnsuitableError(why_none(task, why))
