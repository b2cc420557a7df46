"""What recurrent layers keep on GPUs: the published sizes, and a layer's storages by hand."""

from __future__ import annotations

import pytest

import tensoropt
from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall
from tensoropt.ops.registry import reserve_of
from tensoropt.profiling.cuda_kernels import _reserve_bytes, has_recurrent
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.workload import TensorSpec, Workload
from tests.profiling.test_facts import linear

A100 = (8, 0)


@pytest.mark.parametrize(("layer", "published"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_published_reserves_are_of_25_000_steps(layer, published):
    numbers = reserve_of(f"aten.{layer}.input")
    assert _reserve_bytes(numbers, 25_000, 320, 4, 1, 4) == published


def layer(kind: str, dtype: str = "float32", layers: int = 1) -> Workload:
    """Six steps of four sequences, 8 numbers in and 16 units."""
    gates, states = (4, 2) if kind == "lstm" else (3, 1)
    inputs = [("x", TensorSpec((4, 6, 8), dtype, True), "read")]
    inputs += [(f"s{i}", TensorSpec((layers, 4, 16), dtype, False), "read") for i in range(states)]
    names = []
    for number in range(layers):
        for name, shape in (
            ("ih", (gates * 16, 8 if number == 0 else 16)),
            ("hh", (gates * 16, 16)),
            ("bi", (gates * 16,)),
            ("bh", (gates * 16,)),
        ):
            names.append(f"{name}{number}")
            inputs.append((names[-1], TensorSpec(shape, dtype, True), "parameter"))
    hidden = [Ref(f"s{i}") for i in range(states)]
    args = (
        *(Ref("x"), hidden if kind == "lstm" else hidden[0], [Ref(n) for n in names]),
        *(True, layers, 0.0, True, False, True),
    )
    call = LocalCall(f"aten.{kind}.input", args, {})
    outputs = ("y", "h", "c")[: states + 1]
    return Workload(tuple(inputs), ((call, outputs),), None, ("y",), {})


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3)])
@pytest.mark.parametrize("layers", [1, 2])
def test_what_a_layer_keeps_by_hand(kind, gates, layers):
    work = layer(kind, layers=layers)
    assert has_recurrent(work)
    assert not has_recurrent(linear(4, 8, 8))
    found, on_cpu = find_facts(work, True, A100), find_facts(work, True)
    output, steps = 4 * 4 * 6 * 16, 4 * 6
    weights = 4 * sum(gates * 16 * (n + 16 + 2) for n in (8, 16)[:layers])
    reserve = 4 * steps * 16 * (reserve_of(f"aten.{kind}.input") * layers + layers - 1)
    assert found.kept_bytes == output + weights + reserve
    assert found.writes_kept == ("y",)
    assert {"x"} <= set(found.reads_kept)
    # Backward makes the gradients of all weights at once, beside that of its input.
    assert found.backward_peak_bytes >= weights + 4 * 4 * 6 * 8
    # What is computed is not a matter of the device.
    assert (found.forward_flops, found.traffic_bytes) == (on_cpu.forward_flops, on_cpu.traffic_bytes)
    assert found.forward_flops > 0


def test_in_inference_nothing_is_kept():
    assert find_facts(layer("lstm"), False, A100).kept_bytes == 0


def test_explorations_of_gpus_say_that_it_is_an_estimate():
    def notes(cluster: str) -> list[str]:
        from tensoropt.question.model_source import load_model

        model = load_model("zoo:lstm-lm-tiny")
        found = tensoropt.explore(
            model.model, model.args, model.kwargs, cluster=cluster, measure="never", micro_batches=(1,)
        )
        return [note for note in found.report["notes"] if "recurrent layers" in note]

    assert notes("local:1") == []
    (said,) = notes("dgx-a100[1]")
    assert "is an estimate for 1 of " in said
