"""Random placements: some in micro-batches, where the model can run so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.verify.random_plans import _placements, _problem_of
from tests.placement.execute.cases import opened


@pytest.mark.parametrize(("name", "counts"), [("mlp", {1, 2, 4, 8}), ("vgg_norm", {1})])
def test_placements_are_drawn_in_the_micro_batches_a_model_has(
    tmp_path: Path, name: str, counts: set[int]
) -> None:
    loaded, cluster = opened(name), load_cluster("netsplit-paper")
    costs = CostSource(cluster, ProfileStore(tmp_path / "profiles.db"), Settings(), None)
    drawn = [strategy for strategy, _ in _placements(loaded, _problem_of(loaded), cluster, 16, 0, costs)]
    found = {strategy.micro_batches for strategy in drawn}
    assert found <= counts
    assert len(found) > 1 or counts == {1}
    assert all(not strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches > 1)
    assert any(strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches == 1)
