"""Model FLOP by the formula of PaLM's appendix B, and by kind of device and settings."""

from __future__ import annotations

import pytest

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.plan.coverage import unsplit
from tensoropt.plan.model_flops import model_flops
from tensoropt.plan.problem import Problem, prepare
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.ranks.kernel_settings import KernelSettings

PLAIN = KernelSettings()


def problem_of(name: str, **more: object) -> Problem:
    built = zoo.build(name, device="meta")
    return prepare(capture(built.model, built.args, built.kwargs, **more))  # type: ignore[arg-type]


def test_a_transformer_has_what_palm_counts() -> None:
    problem = problem_of("gpt2-tiny")
    (flops,) = model_flops(problem.graph, find_facts, "cuda", PLAIN).values()
    graph = problem.graph.atoms.graph
    batch, length = graph.tensors["input_ids"].shape
    blocks = sum(op.target.startswith("aten.scaled_dot_product") for op in graph.operators)
    # Weights of products: each is met by every token; the tied one as the head, positions not at all.
    weights = sum(
        t.elements for t in graph.parameters if len(t.shape) == 2 and "wpe" not in str(t.key)
    )  # fmt: skip
    (width,) = {t.shape[0] for t in graph.parameters if str(t.key).endswith("ln_f.weight")}
    tokens = batch * length
    # 6 N + 12 L (H Q) T for a token.
    assert flops == tokens * (6 * weights + 12 * blocks * width * length)


def test_attention_that_computes_its_scores_again_is_counted_once() -> None:
    problem = problem_of("gpt2-tiny")
    attention = [
        t.facts[0]
        for name, t in unsplit(problem.graph, find_facts).items()
        if "attention" in name  # the groups are called like their operators
    ]
    assert attention
    # What the kernels of this build do, without which the cap would be for nothing.
    assert {f.backward_flops / f.forward_flops for f in attention} == {2.5}


def test_products_of_the_zoo_do_not_exceed_the_cap() -> None:
    for name in ("mlp", "lstm-lm-tiny", "resnet-tiny", "bert-tiny"):
        problem = problem_of(name)
        counted = [t.facts[0] for t in unsplit(problem.graph, find_facts).values()]
        whole = sum(f.forward_flops + min(f.backward_flops, 2 * f.forward_flops) for f in counted)
        assert sum(model_flops(problem.graph, find_facts, "cpu", PLAIN).values()) == whole > 0


def test_inference_has_no_backward() -> None:
    problem = problem_of("mlp", mode="inference")
    forward = model_flops(problem.graph, lambda work: find_facts(work, training=False), "cpu", PLAIN)
    both = model_flops(problem_of("mlp").graph, find_facts, "cpu", PLAIN)
    # The first layer's input has no gradient.
    assert 2 * forward["float32"] < both["float32"] < 3 * forward["float32"]


@pytest.mark.parametrize(
    ("device_type", "kernels", "format_name"),
    [
        ("cpu", PLAIN, "float32"),
        ("cuda", PLAIN, "tf32"),  # PyTorch's own setting of convolutions
        ("cuda", KernelSettings(convolution="ieee"), "float32"),
    ],
)
def test_float32_is_tf32_where_settings_say_so(
    device_type: str, kernels: KernelSettings, format_name: str
) -> None:
    problem = problem_of("unet-tiny")
    assert format_name in model_flops(problem.graph, find_facts, device_type, kernels)
