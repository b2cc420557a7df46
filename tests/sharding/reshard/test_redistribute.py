"""Resharding on real ranks: every pair of layouts, forward and backward, against the whole tensor."""

from __future__ import annotations

import pytest

from tensoropt.ranks.pool import RankPool
from tests.execute import part_jobs

pytestmark = pytest.mark.distributed


def test_one_axis(ranks: RankPool) -> None:
    for count, *wrong in ranks.run(part_jobs.reshard_all, (2,)):
        assert count == "6 layouts"
        assert wrong == []


def test_two_axes(four_ranks: RankPool) -> None:
    for count, *wrong in four_ranks.run(part_jobs.reshard_all, (2, 2)):
        assert count == "35 layouts"
        assert wrong == []


def test_shards_of_which_some_are_smaller(four_ranks: RankPool) -> None:
    for found in four_ranks.run(part_jobs.reshard_uneven):
        assert found == pytest.approx({"gathered": 0.0, "scattered": 0.0}, abs=1e-5)
