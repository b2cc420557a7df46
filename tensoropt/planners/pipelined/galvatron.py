"""Galvatron: data, sharded data or tensor parallelism for each layer, in stages of equally many layers.

X. Miao et al., *Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism*,
VLDB 2023. The pipeline's degree is a power of two and decided first (section 3.1). Inside a stage each layer
combines data parallelism, sharded data parallelism (ZeRO's third stage) and tensor parallelism on the axes of
a mesh (section 3.2), chosen by a dynamic programme over layers and a binned memory budget (section 3.3).
Layers are divided evenly among stages. Here the exact frontier of these choices replaces the bins within a
stage. When stages are composed to a pipeline, their memory is rounded up to whole bins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.tables import CostTables
from tensoropt.pipeline.compose import Composition, Offer, compose
from tensoropt.pipeline.composer import Crossings, Cut
from tensoropt.pipeline.stages import balanced, is_crossing
from tensoropt.planners.pipelined.common.task import PipelinedAnswer, PipelineTask
from tensoropt.planners.sharded.megatron import inner_labels
from tensoropt.planners.sharded.zero import sharded
from tensoropt.planners.tables import Scheme, computed_otherwise

_BINS = 64
"""The number of bins of the memory budget; an assumption: the paper says that few are enough."""


def pipelines(task: PipelineTask, memory_limit_bytes: float | None, seed: int) -> Iterator[PipelinedAnswer]:
    """Yield pipelines of every number of device groups that is a power of two."""
    graph = task.problem.graph
    tensor = inner_labels(graph, {name: str(strategy.label) for name, strategy in task.problem.micro.items()})
    allowed = _layer_scheme(tensor)
    for mesh, micro_batches in task.suiting(lambda mesh: mesh.shape[0] & (mesh.shape[0] - 1) == 0):
        stages = mesh.shape[0]
        where = task.positions(stages)
        layers = np.zeros(len(graph.groups))
        layers[[0, *where]] = 1.0
        cuts = balanced(layers, where, stages)
        if len(cuts) != stages - 1:
            continue
        yield from task.compose(
            mesh,
            micro_batches,
            allowed,
            [[cut] for cut in cuts],
            crossings=Crossings(("batch", "whole"), ("batch",), everywhere_alike=True),
            composing=_binned,
        )


def _layer_scheme(tensor: Mapping[str, frozenset[str]]) -> Scheme:
    def allowed(tables: CostTables, variable: VariableTable, index: int) -> np.ndarray | None:
        if computed_otherwise(tables, variable, index, recomputing=False):
            return NO_OPTION
        if variable.key.kind != "group" or is_crossing(tables.graph.group_of[variable.key]):
            return None
        batch = str(tables.micro[variable.key].label)
        ways = {batch, *tensor.get(variable.key, ())}
        if any(label not in ways for label in tables.labels(variable.key, index)):
            return NO_OPTION
        # The first option, which stores parameters as they are used, or the most sharded ones.
        shards = np.array([*map(sharded, variable.options[index])])
        mask: np.ndarray = shards == shards.max()
        mask[0] = True
        return mask

    return allowed


def _binned(
    offers: Sequence[Mapping[tuple[Cut, Cut], Offer]], micro_batches: int
) -> Iterator[Composition[Cut]]:
    most = max((float(offer.memory.max()) for of_stage in offers for offer in of_stage.values()), default=0.0)
    size = most / _BINS or 1.0
    binned = [
        {ends: replace(offer, memory=np.ceil(offer.memory / size) * size) for ends, offer in of_stage.items()}
        for of_stage in offers
    ]
    yield from compose(binned, micro_batches)
