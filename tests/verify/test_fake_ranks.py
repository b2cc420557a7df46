"""Any rank of any plan, without the job: what it would send and keep.

The memory that is predicted with optimizers that people bring, beside what their steps take.

Frozen weights beside adapters that are trained: what is stored of them, sent and kept.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.errors import PlanError
from tensoropt.ops.calls import RING_SEND
from tensoropt.profiling.optimizers import kind_of, with_kind
from tensoropt.sharding.recipes import groups_run_once
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.collectives import predicted_collectives
from tensoropt.verify.answer import entry_of
from tensoropt.verify.fake_ranks import check_on_fake_ranks, fake_job
from tensoropt.verify.findings import RunFindings
from tensoropt.verify.predict import Prediction
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tensoropt.verify.recorder import rows_of
from tests.execute import jobs
from tests.profiling import own_optimizers
from tests.simulate.strategies import facts_by_group, memory_curve
from tests.verify.test_verify import around, assert_sent, check_strategies, draw_of, peak_of

SITUATIONS = Path(__file__).parents[1] / "situations"


@pytest.mark.sweep(quick=1)
@pytest.mark.parametrize(("name", "mesh", "recompute"), [
    ("mlp", (2, 8), "none"),
    ("transformer_dropout", (1, 2, 4), "full"),
    ("transformer_dropout", (2, 2, 4), "products"),
    ("vgg_norm", (1, 8, 8), "none"),
    ("transformer_dropout", (1, 4), "gathered inputs"),
    ("transformer_dropout", (2, 2, 2), "gathered inputs"),
])  # fmt: skip
def test_predicted_is_issued(name, mesh, recompute):
    loaded = load_model(jobs.spec(name))
    strategy = jobs.strategy_of(loaded, mesh, 1)
    if recompute == "gathered inputs":
        strategy = replace(strategy, gathered_again=strategy.gatherable)
        assert strategy.gathered_again
    elif recompute != "none":
        regions = find_regions(loaded.graph)
        once = (groups_run_once(loaded.graph, region, recompute) for region in regions)
        strategy = replace(strategy, recomputed=regions, once=frozenset().union(*once))
        # What was drawn without regions may be gathered for groups that now run again.
        strategy = replace(strategy, gathered_again=strategy.gathered_again & strategy.gatherable)
    as_predicted(loaded, strategy, within=0.005)
    assert not dist.is_initialized()


def as_predicted(
    loaded: CapturedModel, strategy: Strategy, optimizer: str = "adam", within: float = 0.01
) -> tuple[RunFindings, Any]:
    """The findings of fake ranks, which sent and kept what was predicted, and the predicted peak."""
    found = check_on_fake_ranks(loaded, strategy, optimizer)
    assert_sent(strategy, found)
    peak = memory_curve(strategy, facts_by_group(strategy), optimizer).peak
    constants = loaded.graph.atoms.graph.constant_bytes
    assert found.memory_tracked_bytes == pytest.approx(peak.total + constants, rel=within)
    return found, peak


@pytest.mark.slow
def test_messages_around_a_ring_are_predicted():
    """Of eight ranks that have two positions each."""
    loaded = load_model(jobs.spec("llama"))
    strategy = Strategy.from_data(around("llama", (1, 8)), loaded.graph)
    found, _ = as_predicted(loaded, strategy)
    # Keys and values forward, again in recomputed blocks, and in backward; gradients all the way home.
    assert len(strategy.recomputed) == 2
    sends = sum(row["count"] for row in found.collectives_issued if row["kind"] == RING_SEND)
    assert sends == 2 * (7 + 7 + 7 + 8)


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_would_hang_are_named(monkeypatch, alike):
    """With the first sum, every rank makes two more; in one case rank 1 makes them the other way round."""
    loaded = load_model(jobs.spec("mlp"))
    strategy = jobs.strategy_of(loaded, (1, 2), 1)
    all_reduce = dist.all_reduce

    def three(value: torch.Tensor, **more: Any) -> Any:
        pieces = [torch.zeros(1), torch.zeros(2)]
        for piece in pieces if alike or dist.get_rank() == 0 else reversed(pieces):
            all_reduce(piece, **more)
        return all_reduce(value, **more)

    monkeypatch.setattr(dist, "all_reduce", three)
    found = check_on_fake_ranks(loaded, strategy, "sgd")
    assert found.error is None
    summed = [{row["bytes"]: row["count"] for row in rows} for rows in found.collectives_of_ranks]
    assert summed[0] == summed[1]
    prediction = Prediction(found.collectives_of_ranks[0], 0.0, 0.0)
    entry = entry_of(strategy, prediction, found)
    assert entry["collectives_in_order"] is alike
    if not alike:
        (line,) = entry["order_unlike"]
        assert line.startswith("ranks 0 and 1 must issue their common collectives and messages in the same")
        assert line.endswith(
            "is all_reduce of 4 bytes among ranks [0, 1] on rank 0, and all_reduce of 8 bytes among ranks "
            "[0, 1] on rank 1"
        )
        assert not entry["ok"]


@pytest.mark.parametrize(("mesh", "ranks"), [
    ((4, 2), (0, 1)), ((1, 64), (0, 63)), ((1, 2, 4), (0, 4, 7)), ((2, 2, 2, 2), (0, 4, 6, 7)),
    ((1, 1), (0,)),
])  # fmt: skip
def test_representatives_go_to_the_end_of_each_axis(mesh, ranks):
    strategy = jobs.strategy_of(load_model(jobs.spec("mlp")), mesh, 1)
    assert strategy.representatives == ranks


def test_refused_inside_a_job():
    with fake_job(1, 4):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        with pytest.raises(PlanError, match="a process of its own"), fake_job(0, 2):
            pass


@pytest.mark.parametrize("number", range(4))
def test_inputs_that_require_a_gradient_get_none(number):
    """Whose gradient would take memory, and gather the first layer's parameters once more."""
    loaded = load_model(ModelSpec(f"{SITUATIONS}/readers.py:build_input_with_gradient"))
    assert loaded.inputs[0].requires_grad
    micro = micro_strategies(loaded.graph, 1)
    strategy = random_strategy(loaded.graph, (1, 2), micro, random.Random(number), recompute=0.0)
    as_predicted(loaded, strategy, "sgd")


def test_a_plan_with_more_memory_than_predicted_fails():
    loaded = load_model(jobs.spec("transformer_dropout"))
    strategy = jobs.strategy_of(loaded, (1, 2), 1)
    found, peak = check_on_fake_ranks(loaded, strategy, "adam"), peak_of(strategy)
    right = Prediction(rows_of(predicted_collectives(strategy, facts_by_group(strategy))), peak, 0.0)
    assert entry_of(strategy, right, found)["ok"]
    entry = entry_of(strategy, replace(right, memory_bytes=0.95 * peak), found)
    assert not entry["ok"]
    assert "bytes in tensors, over 3 % more than the predicted" in entry["memory_unlike"][0]


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize("name", ["adamw", "rmsprop", "amsgrad", "lion"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2)])
def test_their_memory_is_predicted(name, mesh):
    loaded, optimizer = load_model(jobs.spec("mlp")), with_kind(f"{own_optimizers.__name__}:{name}")
    strategy = jobs.strategy_of(loaded, mesh, 1)
    # Of steps that take one parameter after the other, the rank's largest shard is taken for that of the
    # largest parameter, and nothing is counted for the one before.
    found, peak = as_predicted(loaded, strategy, optimizer, 0.02 if kind_of(optimizer).largest else 0.01)
    assert found.memory_tracked["optimizer"] == pytest.approx(peak.optimizer, abs=64)  # counters of steps


SOURCE = "zoo:llama-tiny?layers=1&lora=r=4,targets=q_proj+down_proj"
IN_BYTES = "zoo:llama-tiny?layers=1&hidden=128&inner=256&lora=r=4,targets=q_proj+down_proj,base="


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2), (1, 8)])
def test_they_have_no_master_copy_no_gradient_and_no_state(dtype, mesh):
    pytest.importorskip("peft")
    spec = ModelSpec(SOURCE, compute_dtype=dtype)
    loaded = load_model(spec)
    parameters = loaded.graph.atoms.graph.parameters
    wide = {t.key.split(".")[-2] for t in parameters if not t.requires_grad and t.stored_dtype == "float32"}
    if dtype == "bfloat16":  # but of norms, which are multiplied in float32
        assert wide == {"input_layernorm", "post_attention_layernorm", "norm"}
    memory_is_as_predicted(spec, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "mesh"),
    [(one, mesh) for one in ("nf4-double", "int8") for mesh in ((1, 2), (2, 2, 2))],
    ids=str,
)
def test_weights_of_bytes_stay_bytes(scheme, mesh):
    pytest.importorskip("peft")
    spec = ModelSpec(IN_BYTES + scheme, compute_dtype="bfloat16")
    graph = load_model(spec).graph.atoms.graph
    codes = [tensor for tensor in graph.parameters if tensor.key.endswith(".codes")]
    assert {tensor.stored_dtype for tensor in codes} == {"int8" if scheme == "int8" else "uint8"}
    assert sum(t.bytes for t in codes) == (3 * 128 * 256 + 128 * 3 * 128) * (2 if scheme == "int8" else 1) / 2
    memory_is_as_predicted(spec, mesh)


def memory_is_as_predicted(spec: ModelSpec, mesh: tuple[int, ...]) -> None:
    loaded = load_model(spec)
    parameters = loaded.graph.atoms.graph.parameters
    for seed in range(2):
        found, peak = as_predicted(loaded, jobs.strategy_of(loaded, mesh, seed))
        memory = found.memory_tracked
        assert (memory["parameters"], memory["gradients"]) == (peak.parameters, peak.gradients)
        assert memory["optimizer"] == pytest.approx(peak.optimizer, abs=4 * len(parameters))


@pytest.mark.slow
def test_they_are_right_on_two_ranks(ranks):
    pytest.importorskip("peft")
    spec = ModelSpec(SOURCE, compute_dtype="bfloat16")
    check_strategies(spec, draw_of(spec, (2, 2), 2), ranks)
