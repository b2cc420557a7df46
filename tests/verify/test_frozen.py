"""Frozen weights beside adapters that are trained: what is stored of them, sent and kept."""

from __future__ import annotations

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.simulate.owners import memory_curve
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tests.execute import jobs
from tests.simulate.strategies import facts_by_group
from tests.verify.test_verify import assert_sent, check_strategies, draw_of

pytest.importorskip("peft")
SOURCE = "zoo:llama-tiny?layers=1&lora=r=4,targets=q_proj+down_proj"
IN_BYTES = "zoo:llama-tiny?layers=1&hidden=128&inner=256&lora=r=4,targets=q_proj+down_proj,base="


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2, 2), (1, 8)])
def test_they_have_no_master_copy_no_gradient_and_no_state(dtype, mesh):
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
        strategy = jobs.strategy_of(loaded, mesh, seed)
        found = check_on_fake_ranks(loaded, strategy, "adam")
        assert_sent(strategy, found)
        peak = memory_curve(strategy, facts_by_group(strategy), "adam").peak
        memory, constants = found.memory_tracked, loaded.graph.atoms.graph.constant_bytes
        assert (memory["parameters"], memory["gradients"]) == (peak.parameters, peak.gradients)
        assert memory["optimizer"] == pytest.approx(peak.optimizer, abs=4 * len(parameters))
        assert memory["peak"] == pytest.approx(peak.total + constants, rel=0.01)


@pytest.mark.slow
@pytest.mark.distributed
def test_they_are_right_on_two_ranks(ranks):
    spec = ModelSpec(SOURCE, compute_dtype="bfloat16")
    check_strategies(spec, draw_of(spec, (2, 2), 2), ranks)
