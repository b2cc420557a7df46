"""What steps say of prices, worked out by hand."""

from __future__ import annotations

import pytest

from tensoropt import Settings, zoo
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.residuals import NETWORK, NO_RESIDUALS, REST, Residuals
from tensoropt.costs.source import CostSource
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.profiling.store import ProfileStore
from tensoropt.tuning.learned import Learned, priced
from tensoropt.tuning.steps import seconds_of
from tests.costs.models import problem


def test_a_collective_counts_from_the_rank_that_comes_last():
    one = {"steps": [(0.0, 9.0)], "collectives": [[("reduce", 1.0, 4.0), ("gather", 5.0, 6.0)]]}
    other = {"steps": [(0.5, 8.0)], "collectives": [[("reduce", 3.0, 4.5), ("gather", 5.0, 7.0)]]}
    assert seconds_of([one, other]) == ([8.5], [3.5])


@pytest.fixture
def strategy():
    built = zoo.build("mlp", 4096)
    return unsplit_strategy(problem(lambda: (built.model, built.args, built.kwargs)).graph)


def costs(store: ProfileStore) -> CostSource:
    return CostSource(load_cluster("cpu:1"), store, Settings(measure="never"), None, residuals=NO_RESIDUALS)


def test_computing_and_collectives_have_factors_of_their_own(strategy, monkeypatch):
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store))
        monkeypatch.setattr("tensoropt.tuning.learned.priced", lambda *_: (5.0, 1.0))
        for factor in (3.0, 2.0, 2.5):
            ran = {"steps": [(0.0, 4.0 * factor + 0.5)], "collectives": [[("all_reduce", 1.0, 1.5)]]}
            learned.learn(strategy, Mesh(shape=(1,)), [ran])
        found = learned.residuals
        assert found.of("matrix product") == found.of(REST) == pytest.approx(2.5)  # the median
        assert found.of(NETWORK) == pytest.approx(0.5)


def test_of_plans_without_stamps_whole_steps_are_known(strategy):
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store), Residuals({NETWORK: 3.0}))
        step_s = 2.0 * priced(strategy, Mesh(shape=(1,)), learned.costs)[0]
        learned.learn(strategy, Mesh(shape=(1,)), [{"steps": [(0.0, step_s)], "collectives": [[]]}])
        assert learned.residuals.of(REST) == pytest.approx(2.0)
        predicted_s, _ = priced(strategy, Mesh(shape=(1,)), learned.costs, learned.residuals)
        assert predicted_s == pytest.approx(step_s, rel=1e-3)


@pytest.mark.parametrize(("seconds", "factor"), [(1e3, 4.0), (1e-9, 1.0)])
def test_what_cannot_be_is_not_believed(strategy, seconds, factor):
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store))
        learned.learn(strategy, Mesh(shape=(1,)), [{"steps": [(0.0, seconds)], "collectives": [[]]}])
        assert learned.residuals.of(REST) == factor
