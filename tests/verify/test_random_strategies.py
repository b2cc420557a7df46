"""Random pipelines: which are drawn, and that ranks do what is predicted of them.

Random placements: some in micro-batches, where the model can run so.
"""

import random
from collections import Counter
from typing import Any

import pytest

from tensoropt import TensorOptError, load_cluster, verify_random
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.pipeline.strategy import SCHEDULES, PipelinedStrategy
from tensoropt.verify.random_plans import _placements, _problem_of
from tensoropt.verify.random_strategies import (
    _any_way,
    draw_pipelines,
    micro_strategies,
    pipeline_degrees,
    random_following,
    random_pipeline,
    random_strategy,
)
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.costs.models import four, problem
from tests.pipeline.models import tables, tied
from tests.placement.execute.cases import costs_on, opened

FOUR = "tests.costs.models:four"


def drawn(count: int, degrees: tuple[int, ...], devices: int = 4, seed: int = 0) -> Any:
    cluster = load_cluster(f"cpu:{devices}")
    return draw_pipelines(load_model(ModelSpec(FOUR)), cluster, degrees, (1, 2, 4, 8), count, seed, 0.3)


# -- what is drawn --------------------------------------------------------------------------------


def test_only_the_degrees_that_are_asked_for_are_drawn():
    assert {strategy.places for strategy, _ in drawn(20, (2,))} == {2}
    assert {strategy.places for strategy, _ in drawn(20, (2, 4))} == {2, 4}
    for strategy, mesh in drawn(20, (2, 4)):
        assert strategy.devices == mesh.size == 4
        assert strategy.mesh[1:] == mesh.shape


def test_every_schedule_and_number_of_micro_batches_comes_up():
    found = [strategy for strategy, _ in drawn(80, (2,), devices=2)]
    assert {strategy.schedule for strategy in found} == set(SCHEDULES)
    assert {strategy.micro_batches for strategy in found} == {1, 2, 4, 8}
    # What takes a backward apart passes no collectives; places of two ranks have some.
    apart = {name for name, one in SCHEDULES.items() if one.apart}
    assert {s.schedule for s, m in drawn(60, (2,)) if len(m.shape) > 1} == set(SCHEDULES) - apart


def test_a_seed_draws_the_same_again():
    first, again, other = ([s for s, _ in drawn(5, (2, 4), seed=seed)] for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_cuts_and_what_is_made_again_vary():
    graph, rng = problem(tables).graph, random.Random(0)
    found = [random_pipeline(graph, (2, 2), "gpipe", rng) for _ in range(30)]
    assert len({strategy.cuts for strategy in found}) > 3
    assert {strategy.duplicated for strategy in found} == {frozenset(), frozenset({"softmax"})}


@pytest.mark.parametrize("mesh", [(2, 2), (4, 4), (4, 2, 2)])
def test_copies_of_a_parameter_are_drawn_alike(mesh):
    graph, rng = problem(tied).graph, random.Random(0)
    copies: Counter[int] = Counter()
    for _ in range(10):
        strategy = random_pipeline(graph, mesh, "gpipe", rng)
        copies[len(strategy.holders("p_model_first_weight"))] += 1
        for name in strategy.tied:
            assert len({s.stored[name] for s in strategy.stages if name in s.stored}) == 1
    assert copies[2]


def test_degrees_are_those_of_the_cluster_that_the_model_has_cuts_for():
    graph = problem(four).graph  # three cuts
    assert pipeline_degrees(graph, load_cluster("cpu:4")) == (2, 4)
    assert pipeline_degrees(graph, load_cluster("cpu:8")) == (2, 4)
    assert pipeline_degrees(graph, load_cluster("cpu:1")) == ()


def test_degrees_that_the_cluster_has_not_are_refused():
    with pytest.raises(TensorOptError, match="4 devices cannot be divided into 3 equal parts"):
        drawn(1, (3,))


def test_models_with_too_few_cuts_are_refused():
    with pytest.raises(TensorOptError, match=r"no pipeline schedule for 8 .* with 3 possible cuts"):
        drawn(1, (8,), devices=8)
    with pytest.raises(TensorOptError, match=r"no pipeline of 8 stages was found: .* 3 possible cuts"):
        random_pipeline(problem(four).graph, (8, 8), "gpipe", random.Random(0))


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2)])
def test_most_groups_follow_the_batch_or_the_sequence(mesh):
    """On some axis of some strategies, together with others; what cannot be split so is left to be drawn."""
    graph, rng = load_model(ModelSpec("tests.verify.sweep_models:causal")).graph, random.Random(0)
    micro = micro_strategies(graph, mesh[0])
    drawn = [random_following(graph, mesh, micro, rng) for _ in range(12)]
    for given in drawn:
        assert len(given) > len(graph.groups) / 4
        strategy = random_strategy(graph, mesh, micro, rng, given=given)
        assert all(strategy.configurations[name] == chosen for name, chosen in given.items())
    queries = [{label for c in given.values() for label in c.labels} >= {"queries"} for given in drawn]
    assert 0 < sum(queries) < len(drawn)


# -- what verify does with them -------------------------------------------------------------------


def test_verify_draws_pipelines_of_the_degree_that_is_asked_for(monkeypatch):
    seen: list[PipelinedStrategy] = []

    def noted(*arguments: Any) -> Any:
        found = draw_pipelines(*arguments)
        seen.extend(strategy for strategy, _ in found)
        return found

    monkeypatch.setattr("tensoropt.verify.random_strategies.draw_pipelines", noted)
    data = verify_random(FOUR, "cpu:4", 2, where="fake", pipeline=2)
    assert data["ok"], data
    assert len(data["plans"]) == 2
    assert [strategy.places for strategy in seen] == [2, 2]
    for plan in data["plans"]:
        assert plan["collectives_predicted"] == plan["collectives_issued"]
        assert plan["ranks_checked"] == [0, 1, 2, 3]


def test_a_third_of_random_strategies_are_pipelines():
    data = verify_random(FOUR, "cpu:2", 3, where="fake")
    assert data["ok"], data
    kinds = [sorted({row["kind"] for row in plan["collectives_predicted"]}) for plan in data["plans"]]
    assert ["send" in kind for kind in kinds] == [False, False, True]


def test_two_ranks_compute_what_one_does(ranks):
    pipelines = [strategy for strategy, _ in drawn(5, (2,), devices=2, seed=1)]
    assert len({strategy.schedule for strategy in pipelines}) > 2
    strategies = [strategy.to_data() for strategy in pipelines]
    options = CheckOptions(memory=False, timed_steps=0)
    for found in verify_strategies(ModelSpec(FOUR), strategies, pool=ranks, options=options):
        assert found.numerics_ok, found


def test_a_schedule_that_the_model_cannot_have_is_passed_over():
    mesh, ways = (2,), [("zbv", [4]), ("1f1b", [2])]
    for seed in range(4):
        # The first and the last stage use one parameter, which zbv puts on the same devices.
        assert _any_way(problem(tied).graph, mesh, ways, random.Random(seed), 0.0).schedule == "1f1b"


@pytest.mark.parametrize(("name", "counts"), [("mlp", {1, 2, 4, 8}), ("vgg_norm", {1})])
def test_placements_are_drawn_in_the_micro_batches_a_model_has(name, counts):
    loaded, costs = opened(name), costs_on("netsplit-paper")
    drawn = [s for s, _ in _placements(loaded, _problem_of(loaded), costs.cluster, 16, 0, costs)]
    found = {strategy.micro_batches for strategy in drawn}
    assert found <= counts
    assert len(found) > 1 or counts == {1}
    assert all(not strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches > 1)
    assert any(strategy.placed_graph.splits for strategy in drawn if strategy.micro_batches == 1)
