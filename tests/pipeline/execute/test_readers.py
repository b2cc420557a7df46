"""Pipelines of models whose parameters have several readers, or parts no gradient, on ranks beside the whole
model."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import TensorOptError
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.random_strategies import random_pipeline
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies

SITUATIONS = Path(__file__).parents[2] / "situations" / "readers.py"
NUMBERS = CheckOptions(memory=False, timed_steps=0)


def check(pool: RankPool, build: str, count: int, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> int:
    """Compare random pipelines of each schedule that the model can have; how many there were."""
    spec = ModelSpec(f"{SITUATIONS}:{build}")
    graph, drawn = load_model(spec).graph, list[PipelinedStrategy]()
    for schedule in schedules:
        rng, found = random.Random(schedule), list[PipelinedStrategy]()
        for _ in range(4 * count):
            with contextlib.suppress(TensorOptError):
                found.append(random_pipeline(graph, (4, 2), schedule, rng))
        drawn += found[:count]
    plans = [strategy.to_data() for strategy in drawn]
    for strategy, found in zip(
        drawn, verify_strategies(spec, plans, pool=pool, options=NUMBERS), strict=True
    ):
        assert not found.error
        assert found.numerics_ok, (strategy.schedule, strategy.cuts, found.differences, found.worst_gradient)
    return len(drawn)


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize("build", ["build_momentum_target", "build_detached_later"])
def test_branches_without_gradient_are_cut(ranks: RankPool, build: str) -> None:
    assert check(ranks, build, 1) == len(SCHEDULES)


@pytest.mark.slow
@pytest.mark.distributed
def test_what_takes_backward_apart_is_right_or_refused(ranks: RankPool) -> None:
    apart = tuple(name for name, one in SCHEDULES.items() if one.apart)
    assert check(ranks, "build_weight_read_twice_in_each_block", 1, apart)
    assert not check(ranks, "build_bounded_early", 1, apart)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "build",
    [
        "build_momentum_target", "build_detached_later", "build_target_without_gradient",
        "build_siamese_three", "build_gradient_inside_no_grad", "build_split_weights",
        "build_merged_adapters",
        "build_normed_weights", "build_fused_projections", "build_weight_read_twice_in_each_block",
    ],
)  # fmt: skip
def test_all_schedules_are_right_or_refused(ranks: RankPool, build: str) -> None:
    assert check(ranks, build, 3)
