"""Random legal pipelines of a model: random cuts, schedules, and a random strategy for every stage."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tensoropt.cluster import Cluster, Mesh
from tensoropt.engine.models import CapturedModel
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.ops.layouts import Layout
from tensoropt.pipeline.meshes import degrees_of, job_meshes
from tensoropt.pipeline.schedules import SCHEDULES, check_schedule
from tensoropt.pipeline.stages import Cutter, Stage, arriving_group, departing_group
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.session.meshes import MAX_AXES
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy

AGAIN = 0.6
"""How often a stage remakes a tensor that it could receive: an assumption."""
TRIES = 200
"""The most pipelines that are drawn until one is legal."""


def draw_pipelines(
    loaded: CapturedModel,
    cluster: Cluster,
    degrees: Sequence[int],
    counts: Sequence[int],
    count: int,
    seed: int,
    recompute: float,
) -> list[tuple[PipelinedStrategy, Mesh]]:
    """Return random pipelines of a model on a cluster, each with the mesh of its job.

    Args:
        degrees: the numbers of places from which one is drawn; the devices of the cluster that each place
            gets compute a stage together.
        counts: the micro-batch counts from which one is drawn.
        recompute: how often a repeated block is recomputed.

    Raises:
        TensorOptError: the cluster or the model cannot be cut so.
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
    """Return a random pipeline with one of some schedules that the model can have.

    Raises:
        TensorOptError: no schedule accepts the model.
    """
    left = list(ways)
    while True:
        way = rng.choice(left)
        schedule, taken = way
        try:
            return random_pipeline(graph, (rng.choice(taken), *axes), schedule, rng, recompute)
        except TensorOptError:
            # For example, a parameter at both ends of the model rules out a schedule that comes back.
            left.remove(way)
            if not left:
                raise


def pipeline_degrees(graph: GroupGraph, cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of places that pipelines of a model can have on a cluster."""
    return tuple(p for p in degrees_of(cluster) if p <= len(Cutter(graph).cuts) + 1)


def random_pipeline(
    graph: GroupGraph,
    mesh: Sequence[int],
    schedule: str,
    rng: random.Random,
    recompute: float = 0.0,
) -> PipelinedStrategy:
    """Return any legal pipeline: random cuts, a random strategy for every stage, some crossing tensors made
    again.

    Args:
        mesh: micro-batches, places, then the axes of a place.
        schedule: one of :data:`~tensoropt.pipeline.schedules.SCHEDULES`.
        recompute: how often a repeated block is recomputed.

    Raises:
        TensorOptError: the graph has no such pipeline.
    """
    micro_batches, places, *axes = mesh
    cutter, apart = Cutter(graph), SCHEDULES[schedule].apart
    whole = micro_strategies(graph, micro_batches)
    stages = places * _per_place(schedule)
    error: PlanError | None = None
    for _ in range(TRIES if len(cutter.cuts) >= stages - 1 else 0):
        cuts = tuple(sorted(rng.sample(cutter.cuts, stages - 1)))
        again = frozenset(name for name in sorted(cutter.can_be_made_again) if rng.random() < AGAIN)
        try:
            strategies: list[Strategy] = []
            stored: dict[str, Layout] = {}
            for part in cutter.stages(cuts, again):
                given = _entering(strategies[-1], part) if strategies else {}
                often = 0.0 if apart else recompute
                strategies.append(
                    random_strategy(
                        part.graph, (micro_batches, *axes), part.micro(whole), rng, often, given, stored
                    )
                )
                stored.update(strategies[-1].stored)
            return PipelinedStrategy(graph, cuts, again, tuple(strategies), schedule, places)
        except PlanError as refused:  # a stage that does not learn, copies of a tied parameter at one place
            error = refused
    why = error or f"the model can be cut at {len(cutter.cuts)} places"
    raise TensorOptError(f"no pipeline of {stages} stages was found: {why}")


def _per_place(schedule: str) -> int:
    return 2 if SCHEDULES[schedule].several else 1


def _ways(places: int, axes: Sequence[int], counts: Sequence[int], cuts: int) -> list[tuple[str, list[int]]]:
    """Return the schedules that a pipeline can have, each with the numbers of micro-batches that it
    accepts."""
    found = []
    for name, schedule in SCHEDULES.items():
        # A backward that is taken apart must not pass collectives.
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
            found.append((name, taken))
    if not found:
        raise TensorOptError(
            f"the model can be cut at {cuts} places and run in {list(counts)} micro-batches, which no "
            f"schedule of {places} places takes"
        )
    return found


def _entering(before: Strategy, part: Stage) -> dict[str, Configuration]:
    """Return configurations in which what arrives has the layout in which it departed."""
    found = {}
    for name in part.arriving:
        group = part.graph.group_of[arriving_group(name)]
        labels = [s.label for s in before.configurations[departing_group(name)].strategies]
        of = {s.label: s for s in group.strategies}
        found[group.name] = Configuration(group, tuple(of[label] for label in labels))
    return found
