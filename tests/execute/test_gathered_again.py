"""Copies that backward gathers again are the same to the last bit, and so are loss and gradients."""

from __future__ import annotations

import pytest

from tensoropt.ranks.pool import RankPool
from tests.execute import gathering_jobs

pytestmark = pytest.mark.distributed


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "mesh", "seed", "recompute"),
    [
        ("transformer_dropout", (1, 2), 4, 0.0),
        ("transformer_dropout", (2, 2), 1, 0.7),
        ("gpt2_small", (1, 2), 3, 0.5),
    ],
)
def test_gradients_are_the_same(
    ranks: RankPool, name: str, mesh: tuple[int, ...], seed: int, recompute: float
) -> None:
    for found in ranks.run(gathering_jobs.gather_alike, name, mesh, seed, recompute):
        assert found["gathered"]
        assert found["loss"]
        assert found["gradients"]


@pytest.mark.slow
def test_gradients_are_the_same_on_two_axes(four_ranks: RankPool) -> None:
    for found in four_ranks.run(gathering_jobs.gather_alike, "transformer_dropout", (1, 2, 2), 3, 0.5):
        assert found["gathered"]
        assert found["loss"]
        assert found["gradients"]
