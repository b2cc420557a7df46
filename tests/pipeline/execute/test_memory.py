"""What every rank of a pipeline has alive on real ranks is what is predicted of its place."""

from __future__ import annotations

import random

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.random_strategies import random_pipeline
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.pipeline.test_evaluate import evaluated

NEAR, APART = 0.03, 0.06
"""By how much a peak may differ from what is predicted; of a backward that is taken apart, in models of
200 KB, of which a message is some per cent."""


def compare(
    pool: RankPool, name: str, schedule: str, axes: tuple[int, ...], count: int, near: float = NEAR
) -> None:
    """Some random pipelines, rank by rank."""
    spec = ModelSpec(f"tests.pipeline.models:{name}")
    loaded, rng = load_model(spec), random.Random(7)
    drawn = [random_pipeline(loaded.graph, axes, schedule, rng, 0.3) for _ in range(count)]
    options = CheckOptions(numerics=False, timed_steps=0)
    plans = [strategy.to_data() for strategy in drawn]
    for strategy, found in zip(
        drawn, verify_strategies(spec, plans, pool=pool, options=options), strict=True
    ):
        assert not found.error
        predicted = evaluated(strategy).memory.sum(axis=1)
        for rank, peak in enumerate(found.memory_tracked_of_ranks):
            # The first rank of a place has the largest shards.
            if rank % strategy.devices_per_place == 0:
                place = rank // strategy.devices_per_place
                assert peak == pytest.approx(predicted[place], rel=near), (rank, strategy.cuts)


# A layer that is used three times may not be twice at one place.
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("encoder_decoder_dropout", "gpipe"),
        ("thrice", "1f1b"),
        ("deep", "interleaved_1f1b"),
        pytest.param("encoder_decoder", "gpipe", marks=pytest.mark.slow),
        pytest.param("encoder_decoder", "1f1b", marks=pytest.mark.slow),
        pytest.param("encoder_decoder", "interleaved_1f1b", marks=pytest.mark.slow),
        pytest.param("encoder_decoder_dropout", "1f1b", marks=pytest.mark.slow),
        pytest.param("thrice", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_schedules_without_a_split_backward(ranks: RankPool, name: str, schedule: str) -> None:
    compare(ranks, name, schedule, (4, 2), 2)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_schedules_that_take_backward_apart(ranks: RankPool, schedule: str) -> None:
    compare(ranks, "deep", schedule, (4, 2), 2, APART)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_two_ranks(four_ranks: RankPool, schedule: str) -> None:
    compare(four_ranks, "encoder_decoder", schedule, (4, 2, 2), 2)
