"""Pipelines of models of which a part is not trained, on ranks beside the whole model: what they compute, and
what they keep."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import PlanError
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.random_strategies import random_pipeline
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.pipeline.test_evaluate import evaluated

EQUAL, NEAR = 1e-6, 0.05
"""By how much a result may differ, relative to its largest value, and a peak from what is predicted."""
OPTIONS = CheckOptions(timed_steps=0)


def compare(pool: RankPool, name: str, drawn: list[PipelinedStrategy]) -> None:
    spec = ModelSpec(f"tests.pipeline.models:{name}")
    plans = [strategy.to_data() for strategy in drawn]
    for strategy, found in zip(
        drawn, verify_strategies(spec, plans, pool=pool, options=OPTIONS), strict=True
    ):
        shape = strategy.schedule, strategy.cuts
        assert not found.error, shape
        assert found.numerics_ok, (shape, found.differences, found.worst_gradient)
        assert found.differences.loss < EQUAL, shape
        assert found.differences.gradient < EQUAL, (shape, found.worst_gradient)
        predicted = evaluated(strategy).memory.sum(axis=1)
        for rank, peak in enumerate(found.memory_tracked_of_ranks):
            # The first rank of a place has the largest shards.
            if rank % strategy.devices_per_place == 0:
                place = rank // strategy.devices_per_place
                assert peak == pytest.approx(predicted[place], rel=NEAR), (rank, shape)


def pipelines(
    name: str, mesh: tuple[int, ...], schedule: str, count: int, *, behind: bool = False
) -> list[PipelinedStrategy]:
    """Some whose first stages have nothing to train; ``behind``: and one behind trained ones has not."""
    graph, rng = load_model(ModelSpec(f"tests.pipeline.models:{name}")).graph, random.Random(1)
    found: list[PipelinedStrategy] = []
    while len(found) < count:
        drawn = random_pipeline(graph, mesh, schedule, rng, 0.3)
        trains = [any(t.requires_grad for t in s.graph.atoms.graph.parameters) for s in drawn.parts]
        wanted = not behind or not all(trains[drawn.forward_only :])
        found += [drawn] if drawn.forward_only and wanted else []
    return found


@pytest.mark.sweep(quick=2)
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_on_two_ranks(ranks: RankPool, schedule: str) -> None:
    compare(ranks, "frozen", pipelines("frozen", (4, 2), schedule, 2))


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["adapted", "frozen_but_the_last", pytest.param("frozen_encoder", marks=pytest.mark.slow)]
)
def test_other_models_on_two_ranks(ranks: RankPool, name: str) -> None:
    drawn = [one for schedule in ("1f1b", "zero_bubble") for one in pipelines(name, (4, 2), schedule, 1)]
    compare(ranks, name, drawn)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "behind"), [((4, 4), True), ((4, 2, 2), False)])
def test_on_four_ranks(four_ranks: RankPool, mesh: tuple[int, ...], behind: bool) -> None:
    """Four places, a frozen stage behind trained ones among them; two of two ranks."""
    schedules = ("gpipe", "1f1b", "zero_bubble")[: 3 if behind else 2]
    drawn = [pipelines("frozen", mesh, schedule, 1, behind=behind)[0] for schedule in schedules]
    compare(four_ranks, "frozen", drawn)


@pytest.mark.slow
@pytest.mark.distributed
def test_collectives_in_forward_where_backward_is_taken_apart(four_ranks: RankPool) -> None:
    """A stage without a backward may pass them."""
    name, rng, found = "frozen_but_the_last", random.Random(0), list[PipelinedStrategy]()
    graph = load_model(ModelSpec(f"tests.pipeline.models:{name}")).graph
    while not found:
        drawn = random_pipeline(graph, (4, 2, 2), "1f1b", rng)
        moves = any(any(drawn.stages[0].steps(edge)) for edge in drawn.stages[0].edges())
        try:
            apart = replace(drawn, schedule="zero_bubble")
        except PlanError:
            continue
        found += [apart] if moves and apart.forward_only == 1 else []
    compare(four_ranks, name, found)
