"""Random placements: some in micro-batches, where the model can run so."""

from __future__ import annotations

import pytest

from tensoropt.verify.random_plans import _placements, _problem_of
from tests.placement.execute.cases import costs_on, opened


@pytest.mark.parametrize(("name", "counts"), [("mlp", {1, 2, 4, 8}), ("vgg_norm", {1})])
def test_placements_are_drawn_in_the_micro_batches_a_model_has(name, counts):
    loaded, costs = opened(name), costs_on("netsplit-paper")
    drawn = [s for s, _ in _placements(loaded, _problem_of(loaded), costs.cluster, 16, 0, costs)]
    found = {strategy.micro_batches for strategy in drawn}
    assert found <= counts
    assert len(found) > 1 or counts == {1}
    assert all(not strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches > 1)
    assert any(strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches == 1)
