"""Random legal strategies: the broadest search for mistakes in rules, lowering and prices."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import prod

from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout, chunk
from tensoropt.sharding.configurations import (
    AxisSizes,
    Configuration,
    enumerate_configurations,
    micro_batch_strategies,
)
from tensoropt.sharding.groups import AxisStrategy, GroupGraph, canonical
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.storage import Gather, Reduce, Storage, stored_layout
from tensoropt.sharding.strategy import Strategy

# Assumptions: often enough for most strategies to have each of them somewhere, and not everywhere.
SHARD_CHANCE = 0.4
"""How often a replicated axis of a stored parameter is sharded (ZeRO)."""
UNSHARDED_CHANCE = 0.4
"""How often a stored parameter is gathered once per step (ZeRO, stages 1 and 2)."""
UNEVEN_CHANCE = 0.3
"""How often a stored parameter may be cut into shards with a smaller last one."""
AHEAD_CHANCE = 0.5
"""How often a stored parameter that is gathered for each use is gathered ahead of it."""
OTHER_REDUCTION_CHANCE = 0.2
"""How often the gradient of a whole parameter is reduced at the other time."""


def micro_strategies(graph: GroupGraph, count: int) -> Mapping[str, AxisStrategy]:
    """Return what each group does on the micro-batch axis: follow the batch, or nothing for one micro-batch.

    Raises:
        MicroBatchRefused: the model cannot be run in ``count`` > 1 pieces.
    """
    if count > 1:
        return micro_batch_strategies(graph)
    return {g.name: g.unsplit for g in graph.groups}


def random_strategy(
    graph: GroupGraph,
    mesh: AxisSizes,
    micro: Mapping[str, AxisStrategy],
    rng: random.Random,
    recompute: float = 0.0,
    given: Mapping[str, Configuration] | None = None,
    stored_so: Mapping[str, Layout] | None = None,
) -> Strategy:
    """Return any legal strategy: a random configuration per group, random materialised placements of hubs
    among what their producer and readers use, random stored placements, as used or sharded further.

    Args:
        mesh: micro-batches, then axis sizes.
        micro: the result of :func:`micro_strategies`.
        rng: the source of randomness; the result depends on nothing else.
        recompute: how often a repeated block is recomputed, between 0 and 1.
        given: the configurations of groups that are not drawn.
        stored_so: the stored layouts of parameters that are not drawn.
    """
    given, stored_so = given or {}, stored_so or {}
    configurations = {
        g.name: given.get(g.name) or rng.choice(enumerate_configurations(graph.atoms, g, mesh, micro[g.name]))
        for g in graph.groups
    }
    made = {
        name: configurations[g.name].layout(name)
        for g in graph.groups
        for op in g.operators
        for name in op.outputs
    }
    hubs = {
        hub: rng.choice(
            [made[hub], *(configurations[g.name].layout(hub) for g in graph.groups if hub in g.reads)]
        )
        for hub in graph.hubs
    }
    uses: dict[str, list[Layout]] = {}
    for g in graph.groups:
        for name in (*g.parameters, *g.shared):
            uses.setdefault(name, []).append(configurations[g.name].layout(name))
    stored = {
        tensor.name: stored_so.get(tensor.name)
        or random_stored(graph, tensor.name, rng.choice(uses[tensor.name]), mesh, rng)
        for tensor in graph.atoms.graph.parameters
    }
    recomputed = tuple(r for r in find_regions(graph) if rng.random() < recompute)
    return Strategy(graph, mesh, configurations, hubs, stored, recomputed)


def _fitting(
    sizes: tuple[int, ...], mesh: AxisSizes, layout: list[int], axis: int
) -> tuple[list[int], list[int]]:
    """Return the atoms that one more axis may cut, and those that it alone may cut unevenly, with no piece
    empty."""
    even, uneven = [], []
    for atom, size in enumerate(sizes):
        cutting = [mesh[a] for a, code in enumerate(layout) if code == atom]
        if size % (mesh[axis] * prod(cutting)) == 0:
            even.append(atom)
        elif not cutting and chunk(size, mesh[axis], mesh[axis] - 1)[1] > 0:
            uneven.append(atom)
    return even, uneven


def random_stored(graph: GroupGraph, name: str, use: Layout, mesh: AxisSizes, rng: random.Random) -> Layout:
    """Return a legal stored placement near a use: axes on which it is whole may shard any atom that divides,
    and one of them an atom that does not.

    In training, it may be gathered once per step, and its gradient reduced last.
    """
    tensor, sizes = graph.atoms.graph.tensors[name], graph.atoms.atom_sizes(name)
    layout = list(stored_layout(tensor, use))
    # Axis 0 has its own code (`Storage`), which is drawn last.
    for axis in range(1, len(mesh)):
        if layout[axis] not in (REPLICATE, PARTIAL_GRAD):
            continue
        if rng.random() < SHARD_CHANCE:
            fitting, uneven = _fitting(sizes, mesh, layout, axis)
            if uneven and rng.random() < UNEVEN_CHANCE:
                fitting += uneven
            if fitting:
                layout[axis] = rng.choice(fitting)
        elif rng.random() < OTHER_REDUCTION_CHANCE:
            # Whole, with the gradient reduced in backward instead of in the bucket, or the other way round.
            layout[axis] = canonical(tensor, rng.choice((REPLICATE, PARTIAL_GRAD)))
    if graph.atoms.graph.training and tensor.requires_grad and rng.random() < UNSHARDED_CHANCE:
        each, last = Reduce.EACH_MICRO_BATCH, Reduce.LAST_MICRO_BATCH
        return Storage(tuple(layout), Gather.ONCE, rng.choice((each, last))).stored
    sharded = any(code >= 0 for code in layout)
    if graph.atoms.graph.training and sharded and rng.random() < AHEAD_CHANCE:
        return Storage(tuple(layout), Gather.AHEAD).stored
    return tuple(layout)
