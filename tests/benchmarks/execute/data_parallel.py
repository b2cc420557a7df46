"""Data parallelism as a strategy of the executor: parameters whole, or in shards (ZeRO stage 3)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tensoropt.costs.restrictions import _sharded_layout
from tensoropt.ops.layouts import REPLICATE, Layout
from tensoropt.sharding.configurations import Configuration, MicroBatchRefused, batch_strategies, fits
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.storage import Gather, Storage, stored_layout
from tensoropt.sharding.strategy import Strategy


class IndivisibleError(Exception):
    """The batch of this model cannot be split over the ranks."""


def data_parallel(
    graph: GroupGraph, ranks: int, gather: Gather | None = None, once: Collection[str] = ()
) -> dict[str, Any]:
    """The strategy as data: every group splits the batch; parameters are whole, or stored in shards.

    What cannot be sharded is stored as it is used. One that several groups share is gathered ahead with each
    block that reads it; those of the first block are waited for, as there is none beside which they could
    come.

    Args:
        gather: how often parameters in shards are gathered; None for whole ones.
        once: state-dict keys of those that are gathered once per step all the same.

    Raises:
        IndivisibleError: says what cannot follow the batch.
    """
    mesh = (1, ranks)
    try:
        batch = batch_strategies(graph)
    except MicroBatchRefused as refusal:
        raise IndivisibleError(str(refusal)) from None
    chosen = {}
    for group in graph.groups:
        chosen[group.name] = Configuration(group, (group.unsplit, batch[group.name]))
        if not fits(graph.atoms, group, chosen[group.name].strategies, mesh):
            raise IndivisibleError(f"{group.name} ({group.anchor.target}) does not divide by {ranks}")
    made = {
        name: chosen[group.name].layout(name)
        for group in graph.groups
        for op in group.operators
        for name in op.outputs
    }
    uses: dict[str, Layout] = {}
    for group in graph.groups:
        for name in (*group.parameters, *group.shared):
            uses.setdefault(name, chosen[group.name].layout(name))
    stored = {}
    for tensor in graph.atoms.graph.parameters:
        used = stored_layout(tensor, uses[tensor.name])
        sharded = _sharded_layout(graph.atoms.atom_sizes(tensor.name), mesh, used, (1,))
        if gather is None or sharded is None:
            stored[tensor.name] = used
            continue
        often = Gather.ONCE if tensor.key in once else gather
        # The micro-batch axis then says how often, and the use whether gradients add up over it.
        layout = sharded if often is Gather.EACH_USE else (REPLICATE, *sharded[1:])
        stored[tensor.name] = Storage(layout, often).stored
    return Strategy(graph, mesh, chosen, {hub: made[hub] for hub in graph.hubs}, stored).to_data()
