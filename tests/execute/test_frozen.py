"""The usual loop with a model whose first block and embeddings are frozen, by every kind of plan."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt.ranks.pool import RankPool
from tests.execute import jobs

ROUNDING = 2e-4


@pytest.mark.sweep(quick=2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "seed"),
    [
        ((1, 2), 3), ((2, 2), 5), (("1f1b", 2, 2), 3), (("1f1b", 2, 2), 4), (("zero_bubble", 4, 2), 3),
        (("placed", 1), 3),
    ],
    ids=str,
)  # fmt: skip
def test_usual_loop(ranks: RankPool, mesh: tuple[Any, ...], seed: int) -> None:
    for found in ranks.run(jobs.train_alike, "transformer_frozen", mesh, seed):
        assert all(value < ROUNDING for value in found.values()), found
