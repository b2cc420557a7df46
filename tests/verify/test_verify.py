"""Random legal strategies of every kind of model give the unsplit model's results on 2 and 4 ranks."""

import json
import math
import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.ops.ring_attention import RING
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import enumerate_configurations
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import predicted_collectives
from tensoropt.verify.findings import (
    Differences,
    NarrowDistance,
    RunFindings,
    is_rounding,
    near_enough,
    within_tolerance,
)  # fmt: skip
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tensoropt.verify.recorder import compare_collectives, rows_of, without_values
from tensoropt.verify.reference import has_kinks, module_difference
from tests.execute import jobs
from tests.simulate.strategies import facts_by_group, memory_curve

NUMERICS = CheckOptions(memory=False, timed_steps=0)


def draw(name: str, mesh: tuple[int, ...], count: int, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    return draw_of(jobs.spec(name, **more), mesh, count, seed)


def draw_of(spec: ModelSpec, mesh: tuple[int, ...], count: int, seed: int = 0) -> list[dict[str, Any]]:
    graph = load_model(spec).graph
    micro, rng = micro_strategies(graph, mesh[0]), random.Random(seed)
    drawn = [random_strategy(graph, mesh, micro, rng, recompute=0.5).to_data() for _ in range(count)]
    return json.loads(json.dumps(drawn))


def check(name: str, mesh: tuple[int, ...], count: int, pool: RankPool, **more: Any) -> None:
    check_strategies(jobs.spec(name, **more), draw(name, mesh, count, **more), pool)


def check_strategies(spec: ModelSpec, strategies: list[dict[str, Any]], pool: RankPool) -> None:
    for strategy, result in zip(
        strategies, verify_strategies(spec, strategies, pool=pool, options=NUMERICS), strict=True
    ):
        assert result.numerics_ok, (result, strategy)
        assert_sent(Strategy.from_data(strategy, load_model(spec).graph), result)


def assert_sent(strategy: Strategy, found: RunFindings) -> None:
    """Whether ranks sent what the cost side says will be sent, and all of them the same."""
    issued = [row | {"axes": [a - 1 for a in row["axes"]]} for row in found.collectives_issued]
    wanted = rows_of(predicted_collectives(strategy, facts_by_group(strategy)))
    assert compare_collectives(without_values(wanted), without_values(issued)) == [], strategy.to_data()
    assert found.ranks_unlike == []


def peak_of(strategy: Strategy, optimizer: str = "adam") -> float:
    """The predicted peak; constants are counted with what a step keeps alive."""
    peak = memory_curve(strategy, facts_by_group(strategy), optimizer).peak.total
    return peak + strategy.graph.atoms.graph.constant_bytes


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize(("name", "mesh", "count", "dtype"), [
    ("mlp", (4, 2), 3, "float32"), ("vgg_dropout", (2, 2), 3, "float32"),
    ("transformer_dropout", (1, 2), 3, "float32"), ("transformer", (1, 2), 2, "bfloat16"),
    ("transformer_unequal", (2, 2), 2, "float32"), ("mlp", (1, 2), 4, "float32"),
    ("vgg_norm", (1, 2), 4, "float32"), ("gpt2_dropout", (2, 2), 1, "float32"),
    ("bert_dropout", (1, 2), 1, "float32"), ("llama_small", (2, 2), 1, "float32"),
    ("mlp", (2, 2), 2, "bfloat16"), ("vgg_norm", (1, 2), 2, "bfloat16"),
])  # fmt: skip
def test_two_ranks(ranks, name, mesh, count, dtype):
    """In mixed precision beside the unsplit model under the same policy; collectives in the types really
    sent."""
    check(name, mesh, count, ranks, **({} if dtype == "float32" else {"compute_dtype": dtype}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("transformer", (2, 2, 2)), ("vgg_norm", (1, 2, 2)), ("mlp", (1, 4))]
)
def test_four_ranks(four_ranks, name, mesh):
    check(name, mesh, 1, four_ranks)


def sending_rows(mesh: tuple[int, ...], count: int, also: str = "") -> list[dict[str, Any]]:
    """Random strategies of a mixture of experts that send rows to their experts, and split along a further
    axis ``also``."""
    graph, rng, found = load_model(jobs.spec("mixtral")).graph, random.Random(0), []
    micro = micro_strategies(graph, mesh[0])
    for _ in range(500):
        strategy = random_strategy(graph, mesh, micro, rng, recompute=0.5)
        labels = sorted(label.split(".")[0] for label in strategy.configurations["experts"].labels)
        if labels == sorted(filter(None, ["dispatch", also])):
            found.append(json.loads(json.dumps(strategy.to_data())))
        if len(found) == count:
            return found
    raise AssertionError("nothing drawn sends rows")


@pytest.mark.slow
def test_rows_are_sent_to_their_experts(ranks):
    pytest.importorskip("transformers.integrations.moe")
    check_strategies(jobs.spec("mixtral"), sending_rows((1, 2), 2) + sending_rows((2, 2), 1), ranks)


def around(name: str, mesh: tuple[int, ...], also: str = "", **more: Any) -> dict[str, Any]:
    """A random strategy whose attention sends keys around one axis, and splits along ``also`` on a further
    one; repeated blocks are recomputed."""
    graph = load_model(jobs.spec(name, **more)).graph
    micro, rng = micro_strategies(graph, mesh[0]), random.Random(0)
    wanted = sorted(filter(None, [RING, also]))
    given = {
        group.name: configuration
        for group in graph.groups
        if group.anchor.target == ATTENTION
        for configuration in enumerate_configurations(graph.atoms, group, mesh, micro[group.name])
        if sorted(label.split(".")[0] for label in configuration.labels) == wanted
    }
    assert given
    strategy = random_strategy(graph, mesh, micro, rng, recompute=1.0, given=given)
    return json.loads(json.dumps(strategy.to_data()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("llama_small", (1, 2)), ("bert_small", (2, 2))])
def test_keys_go_around_two_ranks(ranks, name, mesh):
    spec, strategy = jobs.spec(name), around(name, mesh)
    check_strategies(spec, [strategy], ranks)
    options = CheckOptions(numerics=False, timed_steps=0)
    (found,) = verify_strategies(spec, [strategy], pool=ranks, options=options)
    most = peak_of(Strategy.from_data(strategy, load_model(spec).graph))
    assert found.memory_tracked_bytes == pytest.approx(most, rel=0.01)


@pytest.mark.slow
def test_keys_in_narrow_numbers_go_around(ranks):
    narrow = {"compute_dtype": "bfloat16"}
    check_strategies(jobs.spec("llama_small", **narrow), [around("llama_small", (1, 2), **narrow)], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("also", [RING, "queries", "heads", "batch0"])
def test_keys_go_around_beside_another_axis(four_ranks, also):
    check_strategies(jobs.spec("llama_small"), [around("llama_small", (1, 2, 2), also)], four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("also", ["features", "rows", "experts"])
def test_rows_are_sent_beside_another_axis(four_ranks, also):
    pytest.importorskip("transformers.integrations.moe")
    check_strategies(jobs.spec("mixtral"), sending_rows((1, 2, 2), 1, also), four_ranks)


def test_double_precision_is_much_closer(ranks):
    spec = jobs.spec("mlp", dtype="float64")
    (result,) = verify_strategies(
        spec, draw("mlp", (2, 2), 1, seed=3, dtype="float64"), pool=ranks, options=NUMERICS
    )
    assert result.numerics_ok
    assert result.differences.gradient < 1e-12


def test_rounding_of_the_narrow_type_sets_the_tolerance():
    found, rounding = Differences(0.05, 0.05, 0.05, 0.05), Differences(0.02, 0.02, 0.02, 0.02)
    assert within_tolerance(found, "bfloat16", rounding)
    for kind in rounding.by_kind:
        assert not within_tolerance(found, "bfloat16", replace(rounding, **{kind: 0.01}))


def test_captured_graph_equals_the_module(ranks):
    found, _ = ranks.run(module_difference, jobs.spec("transformer"), 0)
    assert found is not None
    assert found.differences.gradient < 1e-5
    assert ranks.run(module_difference, jobs.spec("transformer_dropout"), 0) == [None, None]


def test_result_is_plain_and_measured(ranks):
    calls = []
    (result,) = verify_strategies(
        jobs.spec("mlp"),
        draw("mlp", (1, 2), 1),
        pool=ranks,
        options=CheckOptions(timed_steps=2),
        progress=lambda stage, done, total, what: calls.append((done, total)),
    )
    assert json.loads(json.dumps(asdict(result))) == asdict(result)
    assert calls == [(1, 1)]
    memory = result.memory_tracked
    assert result.memory_tracked_bytes >= memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert memory["parameters"] == memory["gradients"]
    assert result.time_measured_s > 0
    assert result.replicas_agree is True
    assert result.error is None


def test_wrong_results_are_noticed():
    right = Differences(0.0, 0.0, 0.0, 0.0)
    assert within_tolerance(right)
    for kind in right.by_kind:
        assert not within_tolerance(replace(right, **{kind: 0.05}))
        assert not within_tolerance(replace(right, **{kind: math.nan}))


@pytest.mark.parametrize(("single", "double", "rounding"), [
    (3e-1, 2e-10, True),  # amplified, and as much smaller as the unit of rounding is
    (3e-1, 5e-11, True),
    (2e-4, 2e-9, False),  # hardly smaller than it was: something else is off by 1e-9
    (3e-1, 3e-1, False),
    (math.inf, 1e-3, False),
    (3e-1, math.nan, False),
])  # fmt: skip
def test_what_shrinks_with_precision_is_rounding(single, double, rounding):
    in_single, in_double = (Differences(0.0, 0.0, value, 0.0) for value in (single, double))
    assert is_rounding(in_single, in_double) is rounding


@pytest.mark.parametrize(("split", "unsplit", "kinked", "precision", "near"), [
    (3e-6, 1e-6, 0, "float32", True),
    (4e-3, 1e-6, 0, "float32", False),  # a cast to bfloat16 where nothing can cross a kink
    (1.3e-2, 5.6e-6, 1, "float32", True),  # a ResNet's ReLU crossed
    (0.1, 5.6e-6, 1, "float32", False),
    (0.22, 4.3e-2, 1, "bfloat16", True),
    (0.9, 4.3e-2, 1, "bfloat16", False),
    (math.nan, 1e-6, 1, "float32", False),
])  # fmt: skip
def test_the_narrow_result_is_bounded_too(split, unsplit, kinked, precision, near):
    assert near_enough(NarrowDistance(split, unsplit, bool(kinked)), precision) is near


def test_a_fault_of_the_narrow_path_alone_is_found(ranks):
    """Gradients are cast to bfloat16 on their way between ranks in float32, and not in float64."""
    strategies = draw("mlp", (1, 2), 1)
    with jobs.spoilt_on(ranks, jobs.spoil, "narrow"):
        (spoilt,) = verify_strategies(jobs.spec("mlp"), strategies, pool=ranks, options=NUMERICS)
    assert "right in float64, wrong in float32" in spoilt.error
    assert spoilt.compared_in == "float64"
    assert spoilt.differences.gradient < 1e-9
    assert not spoilt.numerics_ok


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mode"), [("perceptron_outputs", "inference"), ("mlp", "train")])
def test_a_plan_that_gives_nan_fails(ranks, name, mode):
    """NaN was no difference: ``max(0.0, nan)`` is 0.0."""
    strategies = [s for s in draw(name, (1, 2), 6, mode=mode) if sends_forward(name, s, mode)][:2]
    with jobs.spoilt_on(ranks, jobs.spoil, "forward"):
        results = verify_strategies(jobs.spec(name, mode=mode), strategies, pool=ranks, options=NUMERICS)
    assert results
    for result in results:
        assert result.differences.loss == math.inf
        assert not result.numerics_ok
        assert result.not_finite == {}
        assert result.compared_in == "float32"  # not explained away in double precision
        assert mode == "inference" or result.differences.gradient == math.inf


def sends_forward(name: str, data: dict[str, Any], mode: str) -> bool:
    """Whether the strategy's edges exchange anything on the way to the outputs."""
    strategy = Strategy.from_data(data, load_model(jobs.spec(name, mode=mode)).graph)
    return any(strategy.steps(edge)[0] for edge in strategy.edges())


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "mode"), [("undefined_outputs", "inference"), ("undefined_loss", "train")])
def test_what_the_unsplit_model_does_not_define_is_said(ranks, name, mode):
    spec = jobs.spec(name, mode=mode)
    results = verify_strategies(spec, draw(name, (1, 2), 3, mode=mode), pool=ranks, options=NUMERICS)
    for result in results:
        assert result.numerics_ok, result
        assert 0 < result.not_finite["output 0"] <= 16 * 8
        if mode == "train":
            assert any(key.startswith("gradient of") for key in result.not_finite)
    module, _ = ranks.run(module_difference, spec, 0)
    assert module is not None
    assert within_tolerance(module.differences)
    assert module.not_finite == results[0].not_finite


@pytest.mark.parametrize(("name", "kinks"), [("mlp", False), ("vgg_norm", True)])
def test_kinks_are_found(name, kinks):
    assert has_kinks(load_model(jobs.spec(name))) is kinks
