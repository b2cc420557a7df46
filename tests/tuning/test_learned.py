"""What steps say of prices, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tensoropt import zoo
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.compute import class_of
from tensoropt.costs.residuals import NETWORK, NO_RESIDUALS, REST, Residuals
from tensoropt.costs.source import CostSource
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.pipeline.evaluate import stage_works
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.sharding.strategy import Strategy
from tensoropt.tuning.learned import Learned, priced
from tensoropt.tuning.steps import seconds_of
from tests.costs.models import problem


def test_a_collective_counts_from_the_rank_that_comes_last() -> None:
    one = {"steps": [(0.0, 9.0)], "collectives": [[("reduce", 1.0, 4.0), ("gather", 5.0, 6.0)]]}
    other = {"steps": [(0.5, 8.0)], "collectives": [[("reduce", 3.0, 4.5), ("gather", 5.0, 7.0)]]}
    assert seconds_of([one, other]) == ([8.5], [3.5])


@pytest.fixture
def strategy() -> Strategy:
    built = zoo.build("mlp", 4096)
    return unsplit_strategy(problem(lambda: (built.model, built.args, built.kwargs)).graph)


def costs(store: ProfileStore) -> CostSource:
    return CostSource(load_cluster("cpu:1"), store, Settings(measure="never"), None, residuals=NO_RESIDUALS)


def ran(strategy: Strategy, learned: Learned, factor: float) -> dict[str, Any]:
    """A rank on which each operator takes ``factor`` times its price, and nothing else takes any time."""
    compute, (works,) = learned.costs.compute(), stage_works(strategy)
    seconds: dict[str, dict[str, float]] = {"forward_s": {}, "backward_s": {}}
    for group in strategy.graph.groups:
        work = works[group.name]
        for way, s in zip(seconds, compute.seconds(work, learned.costs.facts.of(work)), strict=True):
            seconds[way][group.operators[0].name] = factor * s
    whole = sum(sum(times.values()) for times in seconds.values())
    return {"steps": [(0.0, whole)], "collectives": [[]], **seconds}


def test_classes_of_work_take_the_factor_of_steps(strategy: Strategy) -> None:
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store))
        (works,) = stage_works(strategy)
        for factor in (3.0, 2.0, 2.5):
            learned.learn(strategy, Mesh(shape=(1,)), [ran(strategy, learned, factor)])
        found = learned.residuals
        product = next(work for work in works.values() if class_of(work) == "matrix product")
        assert found.of(class_of(product)) == pytest.approx(2.5)  # the median
        assert NETWORK not in found.factors
        # The step is then predicted as it ran, but for its optimizer, of which no time was left.
        one = Mesh(shape=(1,))
        assert priced(strategy, one, learned.costs, found) > priced(strategy, one, learned.costs)


def test_of_plans_without_stamps_whole_steps_are_known(strategy: Strategy) -> None:
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store), Residuals({NETWORK: 3.0}))
        step_s = 2.0 * priced(strategy, Mesh(shape=(1,)), learned.costs)[0]
        learned.learn(strategy, Mesh(shape=(1,)), [{"steps": [(0.0, step_s)], "collectives": [[]]}])
        assert learned.residuals.of(REST) == pytest.approx(2.0)
        predicted_s, _ = priced(strategy, Mesh(shape=(1,)), learned.costs, learned.residuals)
        assert predicted_s == pytest.approx(step_s, rel=1e-3)


@pytest.mark.parametrize(("seconds", "factor"), [(1e3, 4.0), (1e-9, 1.0)])
def test_what_cannot_be_is_not_believed(strategy: Strategy, seconds: float, factor: float) -> None:
    with ProfileStore(":memory:") as store:
        learned = Learned(costs(store))
        learned.learn(strategy, Mesh(shape=(1,)), [{"steps": [(0.0, seconds)], "collectives": [[]]}])
        assert learned.residuals.of(REST) == factor
