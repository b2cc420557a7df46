"""Random legal pipelines of a model: random cuts, schedules, and a random strategy for every stage."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tensoropt.cluster import Cluster, Mesh
from tensoropt.engine.models import CapturedModel
from tensoropt.errors import PlanError, TensorOptError
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
"""How often a stage makes a tensor again that it could be sent: an assumption."""
TRIES = 200
"""Pipelines that are drawn until one is legal."""


def draw_pipelines(
    loaded: CapturedModel,
    cluster: Cluster,
    degrees: Sequence[int],
    counts: Sequence[int],
    count: int,
    seed: int,
    recompute: float,
) -> list[tuple[PipelinedStrategy, Mesh]]:
    """Random pipelines of a model on a cluster, each with the mesh of its job.

    Args:
        degrees: numbers of places of which one is drawn; so many devices of the cluster as there are for each
            place compute a stage together.
        counts: of micro-batches, of which one is drawn.
        recompute: how often a repeated block is recomputed.

    Raises:
        TensorOptError: the cluster or the model cannot be cut so.
    """
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        places = rng.choice(degrees)
        mesh = rng.choice(job_meshes(cluster, places, MAX_AXES))
        drawer = _Drawer(loaded.graph, places, rng, recompute)
        drawn.append((drawer.draw(mesh.shape[1:], counts), mesh))
    return drawn


def pipeline_degrees(graph: GroupGraph, cluster: Cluster) -> tuple[int, ...]:
    """The numbers of places that pipelines of a model can have on a cluster."""
    return tuple(p for p in degrees_of(cluster) if p <= len(Cutter(graph).cuts) + 1)


class _Drawer:
    def __init__(self, graph: GroupGraph, places: int, rng: random.Random, recompute: float):
        self.graph, self.places, self.rng, self.recompute = graph, places, rng, recompute
        self.cutter = Cutter(graph)

    def draw(self, axes: Sequence[int], counts: Sequence[int]) -> PipelinedStrategy:
        """A pipeline whose places have these mesh axes."""
        error: PlanError | None = None
        for _ in range(TRIES):
            try:
                return self._once(axes, counts)
            except PlanError as refused:  # a stage that does not learn, copies of a tied parameter on one rank
                error = refused
        raise TensorOptError(f"no pipeline of {self.places} places was found: {error}")

    def _once(self, axes: Sequence[int], counts: Sequence[int]) -> PipelinedStrategy:
        schedule, micro_batches = self._schedule(axes, counts)
        stages = self.places * (2 if SCHEDULES[schedule].several else 1)
        cuts, again, parts = self._cut(stages)
        whole = micro_strategies(self.graph, micro_batches)
        mesh, apart = (micro_batches, *axes), SCHEDULES[schedule].apart
        strategies: list[Strategy] = []
        stored: dict[str, tuple[int, ...]] = {}
        for part in parts:
            given = self._entering(strategies[-1], part) if strategies else {}
            strategy = random_strategy(
                part.graph,
                mesh,
                part.micro(whole),
                self.rng,
                0.0 if apart else self.recompute,
                given,
                stored,
            )
            strategies.append(strategy)
            stored.update(strategy.stored)
        return PipelinedStrategy(self.graph, cuts, again, tuple(strategies), schedule, self.places)

    def _schedule(self, axes: Sequence[int], counts: Sequence[int]) -> tuple[str, int]:
        found = []
        for name, schedule in SCHEDULES.items():
            # A backward that is taken apart passes no collectives.
            if schedule.apart and axes:
                continue
            per_place = 2 if schedule.several else 1
            if self.places * per_place > len(self.cutter.cuts) + 1:
                continue
            for micro_batches in counts:
                try:
                    check_schedule(name, self.places, per_place, micro_batches)
                except PlanError:
                    continue
                found.append((name, micro_batches))
        if not found:
            raise TensorOptError(
                f"the model has {len(self.cutter.cuts)} places to cut it and can be run in {list(counts)} "
                f"micro-batches, which no schedule of {self.places} stages takes"
            )
        name = self.rng.choice(sorted({name for name, _ in found}))
        return name, self.rng.choice([m for other, m in found if other == name])

    def _cut(self, stages: int) -> tuple[tuple[int, ...], frozenset[str], tuple[Stage, ...]]:
        cuts = tuple(sorted(self.rng.sample(self.cutter.cuts, stages - 1)))
        again = frozenset(name for name in sorted(self.cutter.can_be_made_again) if self.rng.random() < AGAIN)
        return cuts, again, self.cutter.stages(cuts, again)

    @staticmethod
    def _entering(before: Strategy, part: Stage) -> dict[str, Configuration]:
        """What arrives comes as it departed."""
        found = {}
        for name in part.arriving:
            group = part.graph.group_of[arriving_group(name)]
            labels = [s.label for s in before.configurations[departing_group(name)].strategies]
            of = {s.label: s for s in group.strategies}
            found[group.name] = Configuration(group, tuple(of[label] for label in labels))
        return found
