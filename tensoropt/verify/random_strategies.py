"""Random legal strategies, pipelines and placements, to find mistakes in sharding, lowering and costs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import networkx as nx

from tensoropt.cluster import Cluster, Mesh
from tensoropt.engine.models import CapturedModel
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE, Layout, chunk
from tensoropt.pipeline.costs import degrees_of, job_meshes
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, departing_group
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy, check_schedule
from tensoropt.placement import Placement
from tensoropt.placement.graph import PlacedGraph, split_choices
from tensoropt.session.refining import MAX_AXES
from tensoropt.sharding.configurations import (
    AxisSizes,
    Configuration,
    batch_strategies,
    enumerate_configurations,
    fits,
    micro_batch_strategies,
)
from tensoropt.sharding.groups import AxisStrategy, GroupGraph, canonical
from tensoropt.sharding.regions import Region, find_regions, fitting_once
from tensoropt.sharding.sequence import sequence_strategies
from tensoropt.sharding.storage import Gather, Reduce, Storage, stored_layout
from tensoropt.sharding.strategy import Strategy

# Assumptions: most strategies have each of these choices somewhere, and not everywhere.
_SHARD_CHANCE = 0.4
"""The probability that a parameter that is replicated along a mesh axis is stored in shards (ZeRO)."""
_UNSHARDED_CHANCE = 0.4
"""The probability that a stored parameter is gathered once per step (ZeRO-1 and 2)."""
_UNEVEN_CHANCE = 0.3
"""The probability that a stored parameter may be sharded unevenly."""
_AHEAD_CHANCE = 0.5
"""The probability that a parameter gathered for each use is prefetched."""
_OTHER_REDUCTION_CHANCE = 0.2
"""The probability that a whole parameter's gradient is reduced in backward instead of in a bucket."""

_FOLLOW_CHANCE = 0.8
"""The probability that a group of operators splits the batch or sequence on the axes drawn for that."""

_WHOLE_CHANCE = 0.4
"""The probability that a recomputed block is recomputed as a whole."""
_ONCE_CHANCE = 0.5
"""The probability that a group of operators in a partly recomputed block is not recomputed."""
_GATHERED_AGAIN_CHANCE = 0.5
"""The probability that backward gathers an activation again instead of saving the gathered copy."""


def micro_strategies(graph: GroupGraph, count: int) -> Mapping[str, AxisStrategy]:
    """Return group -> its split by micro-batches; MicroBatchRefused if the model cannot run in them."""
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
    """Return a legal strategy with random splits of operators and layouts of parameters.

    Hubs (tensors with several readers) also get random layouts.

    Args:
        mesh: the number of micro-batches, then the sizes of the mesh axes.
        micro: the result of :func:`micro_strategies`.
        rng: the only source of randomness.
        recompute: the probability that a repeated block is recomputed.
        given: the configurations of groups for which none is drawn.
        stored_so: the stored layouts of parameters for which none is drawn.
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
        or _random_stored(graph, tensor.name, rng.choice(uses[tensor.name]), mesh, rng)
        for tensor in graph.atoms.graph.parameters
    }
    regions = find_regions(graph)
    recomputed = tuple(r for r in regions if rng.random() < recompute)
    once = frozenset[str]().union(*(_random_once(graph, region, rng) for region in recomputed))
    drawn = Strategy(graph, mesh, configurations, hubs, stored, recomputed, once)
    gathered = (name for name in sorted(drawn.gatherable) if rng.random() < _GATHERED_AGAIN_CHANCE)
    return replace(drawn, gathered_again=frozenset(gathered))


def random_following(
    graph: GroupGraph, mesh: AxisSizes, micro: Mapping[str, AxisStrategy], rng: random.Random
) -> dict[str, Configuration]:
    """Return configurations of most groups. Each mesh axis splits the batch in all of them, or the sequence
    in all of them, or a random dim of each."""
    along = {"batch": batch_strategies(graph, everywhere=False), "sequence": sequence_strategies(graph)}
    themes = [rng.choice(("batch", "sequence", "")) for _ in mesh[1:]]
    drawn = {}
    for group in graph.groups:
        strategies = (
            micro[group.name],
            *(along[t][group.name] if t else rng.choice(group.strategies) for t in themes),
        )
        if rng.random() < _FOLLOW_CHANCE and fits(graph.atoms, group, strategies, mesh):
            drawn[group.name] = Configuration(group, strategies)
    return drawn


def _random_once(graph: GroupGraph, region: Region, rng: random.Random) -> frozenset[str]:
    if rng.random() < _WHOLE_CHANCE:
        return frozenset()
    drawn = [name for name in region.groups if rng.random() < _ONCE_CHANCE]
    once = fitting_once(graph, region, drawn)
    return once if len(once) < len(region.groups) else frozenset()


def _fitting(
    sizes: tuple[int, ...], mesh: AxisSizes, layout: list[int], axis: int
) -> tuple[list[int], list[int]]:
    """Return the atoms (factors of dims) that ``axis`` can split evenly, then those it can split unevenly."""
    even, uneven = [], []
    for atom, size in enumerate(sizes):
        cutting = [mesh[a] for a, code in enumerate(layout) if code == atom]
        if size % (mesh[axis] * prod(cutting)) == 0:
            even.append(atom)
        elif not cutting and chunk(size, mesh[axis], mesh[axis] - 1)[1] > 0:
            uneven.append(atom)
    return even, uneven


def _random_stored(graph: GroupGraph, name: str, use: Layout, mesh: AxisSizes, rng: random.Random) -> Layout:
    """Return a random legal layout for storing a parameter, from the layout ``use`` in which it is read."""
    tensor, sizes = graph.atoms.graph.tensors[name], graph.atoms.atom_sizes(name)
    layout = list(stored_layout(tensor, use))
    # Axis 0 has its own code (`Storage`), which is drawn last.
    for axis in range(1, len(mesh)):
        if layout[axis] not in (REPLICATE, PARTIAL_GRAD):
            continue
        if rng.random() < _SHARD_CHANCE:
            fitting, uneven = _fitting(sizes, mesh, layout, axis)
            if uneven and rng.random() < _UNEVEN_CHANCE:
                fitting += uneven
            if fitting:
                layout[axis] = rng.choice(fitting)
        elif rng.random() < _OTHER_REDUCTION_CHANCE:
            # Whole, with the gradient reduced in backward instead of in the bucket, or the other way round.
            layout[axis] = canonical(tensor, rng.choice((REPLICATE, PARTIAL_GRAD)))
    if graph.atoms.graph.training and tensor.requires_grad and rng.random() < _UNSHARDED_CHANCE:
        each, last = Reduce.EACH_MICRO_BATCH, Reduce.LAST_MICRO_BATCH
        return Storage(tuple(layout), Gather.ONCE, rng.choice((each, last))).stored
    sharded = any(code >= 0 for code in layout)
    if graph.atoms.graph.training and sharded and rng.random() < _AHEAD_CHANCE:
        return Storage(tuple(layout), Gather.AHEAD).stored
    return tuple(layout)


_AGAIN = 0.6
"""The probability that a pipeline stage recomputes a tensor that it could receive; an assumption."""
_TRIES = 200
"""The maximum number of pipelines drawn until one is legal."""


def draw_pipelines(
    loaded: CapturedModel,
    cluster: Cluster,
    degrees: Sequence[int],
    counts: Sequence[int],
    count: int,
    seed: int,
    recompute: float,
) -> list[tuple[PipelinedStrategy, Mesh]]:
    """Return random pipelines of a model on a cluster, each with its mesh (pipeline axis first).

    Args:
        degrees: the pipeline degrees to draw from.
        counts: the numbers of micro-batches to draw from.
        recompute: the probability that a repeated block is recomputed.

    Raises:
        TensorOptError: the cluster or the model allows no such pipeline.
    """
    rng, cuts = random.Random(seed), len(Cutter(loaded.graph).cuts)
    drawn = []
    for _ in range(count):
        mesh = rng.choice(job_meshes(cluster, rng.choice(degrees), MAX_AXES))
        ways = _ways(mesh.shape[0], mesh.shape[1:], counts, cuts)
        drawn.append((_any_way(loaded.graph, mesh.shape, ways, rng, recompute), mesh))
    return drawn


def _any_way(
    graph: GroupGraph,
    axes: Sequence[int],
    ways: Sequence[tuple[str, list[int]]],
    rng: random.Random,
    recompute: float,
) -> PipelinedStrategy:
    """Return a random pipeline that the model allows; ``ways``: schedules with their micro-batch counts."""
    left = list(ways)
    while True:
        way = rng.choice(left)
        schedule, taken = way
        try:
            return random_pipeline(graph, (rng.choice(taken), *axes), schedule, rng, recompute)
        except TensorOptError:
            # For example, a parameter at both ends of the model rules out some schedules.
            left.remove(way)
            if not left:
                raise


def pipeline_degrees(graph: GroupGraph, cluster: Cluster) -> tuple[int, ...]:
    """Return the pipeline degrees that a cluster and the number of a model's possible cuts allow."""
    return tuple(p for p in degrees_of(cluster) if p <= len(Cutter(graph).cuts) + 1)


def random_pipeline(
    graph: GroupGraph, mesh: Sequence[int], schedule: str, rng: random.Random, recompute: float = 0.0
) -> PipelinedStrategy:
    """Return a legal pipeline with random cuts and stage strategies.

    Stages recompute some tensors, drawn at random, instead of receiving them.

    Args:
        mesh: the number of micro-batches, the pipeline degree, then the axis sizes within a stage.
        schedule: one of :data:`~tensoropt.pipeline.strategy.SCHEDULES`.
        recompute: the probability that a repeated block is recomputed.

    Raises:
        TensorOptError: the graph has no such pipeline.
    """
    micro_batches, places, *axes = mesh
    cutter, apart = Cutter(graph), SCHEDULES[schedule].apart
    whole = micro_strategies(graph, micro_batches)
    stages = places * _per_place(schedule)
    error: PlanError | None = None
    for _ in range(_TRIES if len(cutter.cuts) >= stages - 1 else 0):
        cuts = tuple(sorted(rng.sample(cutter.cuts, stages - 1)))
        remade = frozenset(name for name in sorted(cutter.duplicable) if rng.random() < _AGAIN)
        try:
            strategies: list[Strategy] = []
            stored: dict[str, Layout] = {}
            for part in cutter.stages(cuts, remade):
                given = _entering(strategies[-1], part) if strategies else {}
                often = 0.0 if apart else recompute
                strategies.append(
                    random_strategy(
                        part.graph, (micro_batches, *axes), part.micro(whole), rng, often, given, stored
                    )
                )
                stored.update(strategies[-1].stored)
            return PipelinedStrategy(graph, cuts, remade, tuple(strategies), schedule, places)
        except PlanError as refused:  # a stage without parameters, copies of a tied parameter at one place
            error = refused
    why = error or f"the model has {len(cutter.cuts)} possible cuts"
    raise TensorOptError(f"no pipeline of {stages} stages was found: {why}")


def _per_place(schedule: str) -> int:
    return 2 if SCHEDULES[schedule].several else 1


def _ways(places: int, axes: Sequence[int], counts: Sequence[int], cuts: int) -> list[tuple[str, list[int]]]:
    ways = []
    for name, schedule in SCHEDULES.items():
        # Schedules that split backward cannot run stages with collectives.
        if (schedule.apart and axes) or places * _per_place(name) > cuts + 1:
            continue
        taken = []
        for micro_batches in counts:
            try:
                check_schedule(name, places, _per_place(name), micro_batches)
            except PlanError:
                continue
            taken.append(micro_batches)
        if taken:
            ways.append((name, taken))
    if not ways:
        raise TensorOptError(
            f"no pipeline schedule for {places} pipeline ranks runs a model with {cuts} possible cuts in "
            f"{list(counts)} micro-batches; use fewer pipeline ranks, or another batch"
        )
    return ways


def _entering(before: Strategy, part: Stage) -> dict[str, Configuration]:
    """Return configurations with which a stage receives tensors in the layouts that ``before`` sends."""
    configurations = {}
    for name in part.arriving:
        group = part.graph.group_of[arriving_group(name)]
        labels = [s.label for s in before.configurations[departing_group(name)].strategies]
        of = {s.label: s for s in group.strategies}
        configurations[group.name] = Configuration(group, tuple(of[label] for label in labels))
    return configurations


def random_splits(
    groups: GroupGraph, devices: int, rng: random.Random, share: float = 0.3
) -> Mapping[str, tuple[str, int]]:
    """Return random splits (dim, pieces) of groups, each of which is split with probability ``share``."""
    splits = {}
    for group in groups.groups:
        if rng.random() < share and (choices := split_choices(groups, group, devices)):
            splits[group.name] = rng.choice(choices)
    return splits


def random_placement(graph: PlacedGraph, devices: int, rng: random.Random) -> Placement:
    """Return a random device for each operator, and random legal orders of forward and backward."""
    device = [rng.randrange(devices) for _ in graph.operators]
    reads = graph_of_reads(graph)
    # Backward drawn anew rather than forward reversed: the executor has to handle this as well.
    forward, backward = (
        list(nx.lexicographical_topological_sort(way, key=lambda _: rng.random()))
        for way in (reads, reads.reverse())
    )
    return Placement.in_order(device, devices, forward, backward)


def graph_of_reads(graph: PlacedGraph) -> nx.DiGraph:
    """Return the graph of dependencies between operators; its nodes are indices in ``graph.operators``."""
    makers = {v: i for i, op in enumerate(graph.operators) for v in op.writes}
    found = nx.DiGraph()
    found.add_nodes_from(range(len(graph.operators)))
    found.add_edges_from(sorted((makers[v], i) for i, op in enumerate(graph.operators) for v in op.reads))
    return found
