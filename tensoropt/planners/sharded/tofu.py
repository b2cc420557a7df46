"""Tofu: recursive partitioning with the least communication, every tensor split at every step.

M. Wang, C. Huang, J. Li, *Supporting Very Large Models using Automatic Dataflow Graph Partitioning*, EuroSys
2019, section 5. The devices are divided step by step (by two where their number is a power of two). Each step
splits every operator and every tensor once, by a dynamic program for the least communication (section 5.2),
and the next step splits the halves (theorem 1: the steps' costs do not grow). The paper first coarsens the
graph to a chain (section 5.1). Here this is not needed, as forward and backward are one graph and operator
groups contain most element-wise operators. A step is a mesh axis, outermost first. An operator or parameter
that cannot be split on an axis stays whole there, and the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
_Labels = tuple[str, ...]
_MOST_NAMED = 6
"""The most unsplit operators that the notes name."""


def _partition(space: TableSpace) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Return (configurations, options, notes) of the strategy that results from splitting axis after axis."""
    tables = space.tables
    labels = {
        g.name: [tables.labels(g.name, i) for i in range(len(tables.of[g.name].memory))]
        for g in tables.graph.groups
    }
    chosen: dict[str, _Labels] = dict.fromkeys(labels, ())
    for axis in range(max(len(space.names.mesh.shape), 1)):
        allowed = {v.key: _allowed(v, labels.get(v.key), chosen.get(v.key), axis) for v in tables.variables}
        choice, notes = _step(tables, allowed)
        chosen = {name: rows[choice[name]][: axis + 1] for name, rows in labels.items()}
    options: dict[str, int] = {v.key: int(v.memory[choice[v.key]].argmin()) for v in tables.variables}
    left = sorted(name for name, rows in chosen.items() if set(rows) & _WHOLE)
    more = f" and {len(left) - _MOST_NAMED} more" if left[_MOST_NAMED:] else ""
    shown = ", ".join(left[:_MOST_NAMED]) + more
    return choice, options, (*notes, f"operators not split on every axis: {shown}") if left else notes


def _allowed(
    variable: VariableTable, labels: Sequence[_Labels] | None, before: _Labels | None, axis: int
) -> np.ndarray:
    """Return a mask of a variable's configurations: they do not recompute, and their ``labels`` (splits by
    axis) are as ``before`` on earlier axes, split ``axis`` if possible, and split no later axis. If
    ``labels`` is None, only the first condition holds.
    """
    # Recomputing is not part of the method.
    plain = ~np.array(variable.again, dtype=bool) if variable.again else np.full(len(variable.memory), True)
    if labels is None:
        return plain
    possible = plain & np.array([row[:axis] == before and set(row[axis + 1 :]) <= {"none"} for row in labels])
    # Tofu splits every operator in every step; where that is impossible it stays whole (see the module).
    split: np.ndarray = possible & np.array([not row or row[axis] not in _WHOLE for row in labels])
    return split if split.any() else possible


def _step(tables: CostTables, allowed: Mapping[str, np.ndarray]) -> tuple[dict[str, int], tuple[str, ...]]:
    kept = {name: np.flatnonzero(mask) for name, mask in allowed.items()}
    if not all(map(len, kept.values())):
        raise NoStrategyError("no split on this axis is compatible with those already chosen")
    nodes: dict[str, np.ndarray] = {}
    for v in tables.variables:
        memory = np.array([float(m.min()) for m in v.memory])
        sent = np.array([float(n[m.argmin()]) for n, m in zip(v.communication, v.memory, strict=True)])
        # Costs of whole configurations, so that a step sees what earlier axes cost together with its own.
        nodes[v.key] = (sent + memory * _TIE_S_PER_BYTE)[kept[v.key]]
    edges = []
    for e in tables.edges:
        costs = e.table[:, :, 1] + e.table[:, :, 0] * _TIE_S_PER_BYTE
        edges.append((e.a, e.b, costs[np.ix_(e.rows[kept[e.a]], e.cols[kept[e.b]])]))
    choice, notes = cheapest(nodes, edges)
    return {name: int(kept[name][index]) for name, index in choice.items()}, notes


_TIE_S_PER_BYTE = 1e-18
"""The weight of memory relative to communication, which only decides ties: a GiB counts as a nanosecond."""


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return one strategy per mesh and micro-batch count, on the meshes with most axes that allow any.

    Raises:
        UnsuitableError: no mesh allows a strategy.
    """
    for axes in sorted({len(space.names.mesh.shape) for space in task.spaces}, reverse=True):
        selections = []
        for number, space in enumerate(task.spaces):
            if len(space.names.mesh.shape) != axes:
                continue
            try:
                selections.append(Selection(number, *_partition(space)))
            # This mesh divides none of the model's sizes, or was searched with a part of its splits alone.
            # Another mesh may have a strategy.
            except NoStrategyError:
                continue
        if selections:
            return selections
    why = "tofu splits every tensor, and no mesh of this cluster divides this model's sizes"
    raise UnsuitableError(why_none(task, why))
