"""The memory that is predicted with optimizers that people bring, beside what their steps take."""

from __future__ import annotations

import pytest

from tensoropt.engine.models import load_model
from tensoropt.profiling.optimizers import kind_of, with_kind
from tensoropt.simulate.owners import memory_curve
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tests.execute import jobs
from tests.profiling import own_optimizers
from tests.simulate.strategies import facts_by_group


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "amsgrad", "lion"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2)])
def test_their_memory_is_predicted(name, mesh):
    loaded, optimizer = load_model(jobs.spec("mlp")), with_kind(f"{own_optimizers.__name__}:{name}")
    strategy = jobs.strategy_of(loaded, mesh, 1)
    found = check_on_fake_ranks(loaded, strategy, optimizer)
    peak = memory_curve(strategy, facts_by_group(strategy), optimizer).peak
    assert found.memory_tracked["optimizer"] == pytest.approx(peak.optimizer, abs=64)  # counters of steps
    # Of steps that take one parameter after the other, the rank's largest shard is taken for that of the
    # largest parameter, and nothing is counted for the one before.
    error = 0.02 if kind_of(optimizer).largest else 0.01
    assert found.memory_tracked["peak"] == pytest.approx(peak.total, rel=error)
