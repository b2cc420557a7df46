"""Sizes that no mesh divides are said, not refused.

Model FLOP by the formula of PaLM's appendix B, and by kind of device and settings.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt import Exploration, explore, zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import Problem, model_flops, prepare, unsplit
from tensoropt.profiling.fact_finding import find_facts
from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.kernel_settings import KernelSettings
from tensoropt.report.table import summary_lines
from tests.models import Call

PLAIN = KernelSettings()


@cache
def problem_of(name: str, **more: object) -> Problem:
    built = zoo.build(name, device="meta")
    return prepare(capture(built.model, built.args, built.kwargs, **more))  # type: ignore[arg-type]


def flops_of(
    problem: Problem, device_type: str, kernels: KernelSettings = PLAIN, facts_of: Any = find_facts
) -> dict[str, float]:
    return model_flops(unsplit(problem.graph, facts_of).values(), facts_of, device_type, kernels)


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_model_that_computes_nothing_is_refused(mode: Any) -> None:
    with pytest.raises(TensorOptError, match="computes nothing"):
        explore(Call(lambda m, x: m.scale, scale=()), (torch.randn(4, 4),), cluster="dgx-h100", mode=mode)


def test_a_transformer_has_what_palm_counts() -> None:
    problem = problem_of("gpt2-tiny")
    (flops,) = flops_of(problem, "cuda").values()
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


@pytest.mark.slow
def test_products_of_the_zoo_do_not_exceed_the_cap() -> None:
    for name in ("mlp", "lstm-lm-tiny", "resnet-tiny", "bert-tiny"):
        problem = problem_of(name)
        counted = [t.facts[0] for t in unsplit(problem.graph, find_facts).values()]
        whole = sum(f.forward_flops + min(f.backward_flops, 2 * f.forward_flops) for f in counted)
        assert sum(flops_of(problem, "cpu").values()) == whole > 0


def test_inference_has_no_backward() -> None:
    problem = problem_of("mlp", mode="inference")
    forward = flops_of(problem, "cpu", facts_of=lambda work: find_facts(work, training=False))
    both = flops_of(problem_of("mlp"), "cpu")
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
    assert format_name in flops_of(problem, device_type, kernels)


def explored(folder: Path, batch: int, inside: int, out: int, devices: int = 4) -> Exploration:
    file = folder / "four.yaml"
    file.write_text(f"devices: [{{kind: H100-80GB, count: {devices}}}]\nlinks: {{intra_node: NVLink4}}\n")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(inside, out)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).mean()

    with ProfileStore(folder / "profiles.sqlite") as store:
        return explore(
            Net(),
            (torch.randn(batch, inside),),
            cluster=load_cluster(file),
            micro_batches=(1,),
            store=store,
            placements="never",
            pipelines="never",
        )


def whole(found: Exploration) -> list[str]:
    return [line for line in summary_lines(found) if "kept whole, since no searched mesh divides" in line]


def test_odd_sizes_are_named_with_their_operator(tmp_path: Path) -> None:
    found = explored(tmp_path, 1, 5, 7)
    assert found.points
    (first, *_) = whole(found)
    assert first.endswith(
        "linear linear (out_features 7, in_features 5); an axis of 2 divides out_features 6 or 8, "
        "in_features 4 or 6"
    )


@pytest.mark.parametrize("sizes", [(8, 5, 7), (3, 5, 7), (1, 8, 7), (1, 5, 8)])
def test_one_size_that_divides_is_enough(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    assert not any(" linear linear " in line for line in whole(explored(tmp_path, *sizes)))
