"""The strategies that people set by hand, whose costs are found before anything is searched.

Data parallelism, ZeRO's stages, FSDP and Megatron's tensor parallelism use few of the possible splits of an
operator. Cost tables of only these splits are built in a fraction of the time of full tables.
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.errors import TensorOptError
from tensoropt.planners.sharded.megatron import inner_labels
from tensoropt.session.refining import Offered
from tensoropt.sharding.configurations import MicroBatchRefused, batch_strategies
from tensoropt.sharding.groups import GroupGraph

_MAX_AXES = 2
"""The most axes of a mesh of usual strategies: the outer one splits samples, the inner one tensors."""

USUAL_NOTE = "only usual strategies (DDP, ZeRO, FSDP, tensor parallelism) were simulated, without a search"


def usual_spaces(offered: Offered, graph: GroupGraph) -> Offered:
    """Return the spaces whose mesh has up to two axes, restricted to the splits of usual strategies.

    On two axes, the outer one splits groups as in data parallelism, the inner one as in tensor parallelism. A
    single axis may split in either way.

    Raises:
        TensorOptError: the batch cannot be split.
    """
    try:
        batch = batch_strategies(graph)
    except MicroBatchRefused as refusal:
        raise TensorOptError(
            f"usual strategies split the batch, which this model does not allow: {refusal}; leave out --first"
        ) from None
    inner = inner_labels(graph, {name: str(strategy.label) for name, strategy in batch.items()})
    of_batch, of_tensors = (
        {g.name: tuple(i for i, s in enumerate(g.strategies) if chosen(g.name, s)) for g in graph.groups}
        for chosen in (
            lambda name, strategy: strategy.label == batch[name].label,
            lambda name, strategy: str(strategy.label) in inner[name],
        )
    )
    either = {name: (*of_batch[name], *of_tensors[name]) for name in of_batch}
    return {
        (mesh, count): replace(
            limit, combined=either if mesh.axis_count < _MAX_AXES else of_tensors, outer=of_batch
        )
        for (mesh, count), limit in offered.items()
        if mesh.axis_count <= _MAX_AXES
    }
