"""The strategies that people set by hand, priced before anything is searched.

Data parallelism, ZeRO's stages, FSDP and Megatron's tensor parallelism use few of the ways in which an
operator can be split. Tables of these alone take a fraction of the seconds of all of them.
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.planners.sharded.megatron import inner_labels
from tensoropt.session.refining import Offered
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies
from tensoropt.sharding.groups import GroupGraph

MAX_AXES = 2
"""The most axes of a mesh of usual strategies: samples outside, tensors inside."""

USUAL_NOTE = (
    "usual strategies alone were priced: DDP, ZeRO, FSDP, tensor parallelism; nothing else was searched"
)


def usual_spaces(offered: Offered, graph: GroupGraph) -> Offered:
    """Return the spaces with up to two axes, in which each group is whole or split as data or tensor
    parallelism split it; all spaces unchanged if the batch cannot be split."""
    try:
        batch = batch_strategies(graph)
    except MicroBatchRefused:
        return offered
    inner = inner_labels(graph, {name: str(strategy.label) for name, strategy in batch.items()})
    combined = {
        group.name: tuple(
            position
            for position, strategy in enumerate(group.strategies)
            if strategy.label == batch[group.name].label or str(strategy.label) in inner[group.name]
        )
        for group in graph.groups
    }
    return {
        (mesh, count): replace(limit, combined=combined)
        for (mesh, count), limit in offered.items()
        if mesh.axis_count <= MAX_AXES
    }
