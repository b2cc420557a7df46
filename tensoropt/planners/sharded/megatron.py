"""Megatron-LM's tensor parallelism inside, data parallelism outside.

M. Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3. A matrix that reads a whole activation is split
by columns (an MLP's first matrix; the query, key and value projections with their heads). A matrix that reads
a split activation is split by rows (the MLP's second matrix, the output projection), which leaves a partial
sum that is reduced once. The embedding and the loss are split over the vocabulary (section 3, last
paragraphs). The residual stream is whole. In layers of experts each expert is such a pair of matrices, and
the router is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.ops.families.routed_experts import EXPERTS
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.sharded.common import restricted
from tensoropt.planners.tables import whole
from tensoropt.planners.task import PlanningTask, Selection
from tensoropt.sharding.groups import Group, GroupGraph, Label

_COLUMNS, _ROWS, _HEADS, _VOCABULARY = "out_features", "in_features", "heads", ("vocabulary", "classes")
_FEATURES = "features"


def _dims(group: Group) -> set[str]:
    return {s.label.loop for s in group.strategies}


def _summed(group: Group, loop: str) -> set[str]:
    labels = [s.label for s in group.strategies if s.label.loop == loop]
    # A resolution to a shard would leave the residual stream split.
    return {str(label) for label in labels if label.resolve is None or label.resolve < 0}


def _following_labels(group: Group, dims: set[str], batch: str) -> set[str]:
    """Return the labels (split loops) of a group that reads a split tensor. It splits its heads, vocabulary
    or classes if ``dims`` (its loops) contain them, otherwise any loop but ``batch``.
    """
    for named in (_HEADS, *_VOCABULARY):
        if named in dims:
            return {str(s.label) for s in group.strategies if s.label == Label(named, s.label.atom)}
    labels = {str(s.label) for s in group.strategies if s.label.resolve is None}
    return labels - {"none", "partial", batch}


def inner_labels(graph: GroupGraph, batch: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return the splits (labels) that each group may have on the tensor-parallel axis.

    A tensor is *split* if a matrix split by columns makes it, or a group that follows one. A group that reads
    a split tensor follows it: by rows if it is a matrix, which makes a whole tensor. A group that reads only
    whole tensors splits by columns if it is a matrix, over the vocabulary if it looks that up, and otherwise
    stays whole. Experts split their features, and their routers stay whole.
    """
    split: set[str] = set()
    labels: dict[str, frozenset[str]] = {}
    experts = (layer for layer in graph.groups if layer.anchor.target == EXPERTS)
    routes = (ref.name for layer in experts for ref in layer.anchor.args[1:3])
    routers = makers_of(graph, routes, lambda group: _COLUMNS in _dims(group))
    for group in graph.groups:
        dims = _dims(group)
        along = any(name in split for name in group.reads)
        if group.name in routers:
            chosen = {"none"}
        elif _FEATURES in dims:
            chosen = _summed(group, _FEATURES)
        elif along and _ROWS in dims:
            chosen = _summed(group, _ROWS)
        elif along:
            chosen = _following_labels(group, dims, batch[group.name])
        elif _COLUMNS in dims:
            chosen = {str(s.label) for s in group.strategies if s.label.loop == _COLUMNS}
        elif "vocabulary" in dims and batch[group.name] != "partial_grad":
            chosen = _summed(group, "vocabulary")
        else:
            chosen = {"none"}
        labels[group.name] = frozenset(chosen) or frozenset({"none"})
        # The results of row splits, of experts and of the vocabulary's lookup are sums over the inner axis,
        # which is whole again once reduced.
        sums = (along and _ROWS in dims) or _FEATURES in dims or "vocabulary" in dims
        if labels[group.name] != {"none"} and not sums:
            split.update(group.writes)
    return labels


def makers_of(graph: GroupGraph, tensors: Iterable[str], ends: Callable[[Group], bool]) -> frozenset[str]:
    """Return the groups from which tensors are computed, back to those for which ``ends`` is true."""
    waiting, found = list(tensors), set[str]()
    while waiting:
        maker = graph.atoms.graph.producer.get(waiting.pop())
        group = graph.group_of[maker.name] if maker is not None else None
        if group is not None and group.name not in found:
            found.add(group.name)
            waiting += () if ends(group) else group.reads
    return frozenset(found)


def select(task: PlanningTask, memory_limit_bytes: float | None, seed: int) -> list[Selection]:
    """Return strategies for meshes of one axis (tensor parallelism) or two (the outer for data parallelism).

    Raises:
        UnsuitableError: the model has no attention, or no mesh of one or two axes allows a strategy.
    """
    graph = task.prepared.graph
    if not any(_HEADS in _dims(group) for group in graph.groups):
        raise UnsuitableError(
            "megatron splits attention heads and the matrices around them, and this model has no "
            "scaled_dot_product_attention; use data_parallel, zero or optcnn"
        )
    # All outer axes are data parallel.
    batch = restricted.batch_labels(graph)
    inner = inner_labels(graph, batch)

    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
        # -3 is the code of a partial sum (ops/layouts.py). A tensor with several readers is whole on the
        # inner axis, unless its maker splits something there: then the frontier decides how it lies.
        if variable.key.kind == "hub":
            whole_inside = variable.layouts[index][-1] < 0 and variable.layouts[index][-1] != -3
            maker = graph.group_of[graph.atoms.graph.producer[variable.key.name].name]
            return None if whole_inside or inner[maker.name] != {"none"} else NO_OPTION
        if variable.key.kind == "parameter":
            return None
        *outer, last = tables.labels(variable.key, index)
        if last not in inner[variable.key] or any(label != batch[variable.key] for label in outer):
            return NO_OPTION
        return whole(tables, variable, index)

    return restricted.at_least_one(
        task,
        restricted.frontiers(task, allowed, lambda s: 1 <= len(s.names.mesh.shape) <= 2),
        "no mesh of this cluster splits both the attention heads and the batch; megatron needs an inner axis "
        "that splits the heads (the key heads, if several query heads share one) into non-empty parts",
    )
