"""parallelize with a placed plan: the user's own training script keeps working."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tensoropt
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.ranks.pool import RankPool
from tests.execute import jobs
from tests.placement.execute.cases import opened, record_moves
from tests.placement.execute.random_placed import random_placed

PLACED = ()
ROUNDING = 2e-4


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "plan"), [("transformer", PLACED), ("vgg_norm_plain", PLACED), ("transformer", ("placed", 4))]
)
def test_usual_loop(ranks: RankPool, name: str, plan: tuple[Any, ...]) -> None:
    """Losses, gradients, their norm over all ranks, clipped steps, evaluation."""
    for found in ranks.run(jobs.train_alike, name, plan, 3):
        assert all(value < ROUNDING for value in found.values()), found


@pytest.mark.distributed
def test_accumulation(ranks: RankPool) -> None:
    for found in ranks.run(jobs.accumulate, "mlp", PLACED, 5):
        assert all(value < ROUNDING for value in found.values()), found


@pytest.mark.distributed
def test_any_optimizer(ranks: RankPool) -> None:
    """Of a model with frozen, unused and shared modules."""
    for found in ranks.run(jobs.optimizers, "odd", PLACED, 5):
        assert all(value < ROUNDING for value in found.values()), found


@pytest.mark.distributed
def test_state_dict(ranks: RankPool) -> None:
    for found in ranks.run(jobs.state_dicts, "transformer", PLACED, 7):
        found.pop("strided")
        assert found.pop("loss") < ROUNDING
        assert all(found.values()), found


@pytest.mark.sweep
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLACED, (1, 2)),
        (("placed", 2), (2, 2)),
        pytest.param((2, 2), PLACED, marks=pytest.mark.slow),
    ],
)
def test_checkpoint_moves_between_plans(
    ranks: RankPool, tmp_path: Path, one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    """Also between a placed and a sharded plan, and back."""
    for found in ranks.run(jobs.checkpoints, "transformer", one, other, str(tmp_path)):
        assert all(found["same"])
        assert found["value"] < ROUNDING
        assert found["continued"] < ROUNDING


@pytest.mark.distributed
def test_evaluation(ranks: RankPool) -> None:
    for found in ranks.run(jobs.evaluated, "vgg_norm", PLACED):
        assert max(found) < 1e-5


@pytest.mark.slow
@pytest.mark.distributed
def test_training_converges_as_unsplit(ranks: RankPool) -> None:
    """NetSplit's check, on ranks."""
    losses = ranks.run(jobs.long_run, "transformer", PLACED, 40)
    assert losses[0] == losses[1]
    ours, plain = zip(*losses[0], strict=True)
    assert ours == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < 0.9 * plain[0]


def test_one_process_runs_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = record_moves(monkeypatch)
    loaded = opened("mlp")
    (model, args, _), (plain, _, _) = jobs.spec("mlp").build(), jobs.spec("mlp").build()
    strategy = random_placed(loaded.graph, 3, random.Random(1))
    tensoropt.parallelize(model, strategy, args)
    assert isinstance(model._tensoropt.engine, PlacedEngine)
    for each in (model, plain):
        each(*args).backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for name, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-6)
    assert moved


def test_a_compiler_is_told_why_it_changes_nothing() -> None:
    model, args, _ = jobs.spec("mlp").build()
    tensoropt.parallelize(model, random_placed(opened("mlp").graph, 2, random.Random(1)), args)
    plain = float(model(*args).detach())
    with pytest.warns(UserWarning, match="torch.compile changes nothing here: a placed plan"):
        assert float(torch.compile(model, backend="eager")(*args).detach()) == plain
