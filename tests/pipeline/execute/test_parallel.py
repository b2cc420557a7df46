"""parallelize with a pipelined plan: the user's own training script keeps working."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tensoropt.engine.models import open_model
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.ranks.pool import RankPool
from tensoropt.verify.fake_ranks import step_on
from tensoropt.verify.random_strategies import random_pipeline
from tests.execute import jobs

ROUNDING = 2e-4
PLAIN = ("1f1b", 2, 2)
SPLIT = ("1f1b", 2, 2, 2)


@pytest.mark.sweep(quick=2)
@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [PLAIN, ("gpipe", 1, 2), ("interleaved_1f1b", 2, 2), ("zero_bubble", 4, 2)])
def test_usual_loop(ranks: RankPool, mesh: tuple[Any, ...]) -> None:
    """Losses, gradients, their norm over all stages, clipped steps, evaluation."""
    for found in ranks.run(jobs.train_alike, "transformer", mesh, 3):
        assert all(value < ROUNDING for value in found.values()), found


@pytest.mark.distributed
def test_accumulation(ranks: RankPool) -> None:
    for found in ranks.run(jobs.accumulate, "transformer", PLAIN, 5):
        assert all(value < ROUNDING for value in found.values()), found


@pytest.mark.distributed
def test_running_statistics(ranks: RankPool) -> None:
    """Of a batch norm, which only one micro-batch has; in the state dict of every rank."""
    for found in ranks.run(jobs.train_alike, "vgg_norm_plain", ("gpipe", 1, 2), 3):
        assert all(value < ROUNDING for value in found.values()), found
    for found in ranks.run(jobs.evaluated, "vgg_norm", ("gpipe", 1, 2)):
        assert max(found) < 1e-5


@pytest.mark.distributed
def test_evaluation_where_stages_that_follow_one_another_share_a_place(ranks: RankPool) -> None:
    for found in ranks.run(jobs.evaluated, "vgg_dropout", ("zbv", 4, 2)):
        assert max(found) < 1e-5


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, (1, 2)),
        ((2, 2), PLAIN),
        pytest.param(PLAIN, (), marks=pytest.mark.slow),
        pytest.param(PLAIN, ("gpipe", 1, 2), marks=pytest.mark.slow),
    ],
)
def test_checkpoint_moves_between_plans(
    ranks: RankPool, tmp_path: Path, one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    """Also between a pipeline and a sharded plan, a placed plan, another pipeline."""
    for found in ranks.run(jobs.checkpoints, "transformer", one, other, str(tmp_path)):
        assert all(found["same"])
        assert found["value"] < ROUNDING
        assert found["continued"] < ROUNDING


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoint_of_stages_that_are_split(four_ranks: RankPool, tmp_path: Path) -> None:
    """Shards of a fused projection split on heads, of a parameter that two stages share: bits stay."""
    for found in four_ranks.run(jobs.checkpoints, "transformer", SPLIT, (1, 4), str(tmp_path)):
        assert all(found["same"])
        assert found["continued"] < ROUNDING


@pytest.mark.slow
@pytest.mark.distributed
def test_norm_of_stages_that_are_split(four_ranks: RankPool) -> None:
    """Replicas, shards and tied copies count once."""
    norms = four_ranks.run(jobs.norms, "transformer", SPLIT, 3)
    for ours, plain in norms:
        assert ours == pytest.approx(plain, rel=ROUNDING)
    assert len({tuple(ours) for ours, _ in norms}) == 1


@pytest.mark.distributed
def test_a_rank_asks_for_its_own_parameters_only(ranks: RankPool) -> None:
    asked = ranks.run(jobs.asked_for, "transformer", PLAIN, 3)
    (first, last), everything = (set(names) for names, _ in asked), set(asked[0][1])
    assert first | last == everything
    assert first != everything
    assert last != everything


def test_ranks_of_all_stages_meet_for_a_state_dict_that_one_stage_gathers() -> None:
    """A fused projection whose heads three ranks share unevenly has no DTensor of its own shape."""
    loaded = open_model(jobs.spec("transformer"))
    data = random_pipeline(loaded.graph, (2, 2, 3), "1f1b", random.Random(3)).to_data()
    for stage in data["stages"]:
        stage["stored"] = {name: ["R/P", "R/P"] for name in stage["stored"]}
    name = "p_model_blocks_0_qkv_weight"
    for layout, gathers in (("R/P", False), ("S(1)", True)):
        data["stages"][0]["stored"][name] = ["R/P", layout]
        strategy = PipelinedStrategy.from_data(data, loaded.graph)
        assert strategy.holders(name) == (0,)
        for rank, copies in ((0, 1 if gathers else 3), (5, 1)):
            with step_on(rank, loaded, strategy, "sgd") as step:
                shards = step.engine.shards
                assert shards.gathers_state == gathers
                assert (shards.in_state(name), shards.copies(name)) == (rank == 0, copies)
