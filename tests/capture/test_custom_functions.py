"""Functions with a backward of their own: one operator each, whose gradients are the function's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.fidelity import in_double
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.errors import CaptureError
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.question.model_source import load_model
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators

SITUATIONS = Path(__file__).parents[1] / "situations" / "gradients.py"
KEPT = {
    "build_straight_through": ["Round", "Round"],
    "build_reversal": ["Reverse", "Reverse"],
    "build_clipped": ["Clip"],
    "build_quantised": ["LearnedStep"] * 4,
    "build_codebook": ["Nearest"],
    "build_narrow": ["Round"],
    "build_rounded_blocks": ["Round"] * 4,
    "build_not_reentrant": ["Round"] * 3,
    "build_reentrant": ["Round"] * 3,
}


def functions(graph) -> list[str]:
    targets = [op.target.split(".") for op in graph.operators]
    return [packet.rpartition("_")[0] for namespace, packet, _ in targets if namespace == FUNCTIONS]


@pytest.mark.parametrize("name", KEPT)
def test_functions_are_kept(name):
    """With their gradients, which a capture compares with the module's."""
    built = load_model(f"{SITUATIONS}:{name}")
    assert functions(capture(built.model, built.args).graph) == KEPT[name]


def test_the_engine_gives_the_gradients_of_the_function():
    built = load_model(f"{SITUATIONS}:build_straight_through")
    captured = capture(built.model, built.args)
    engine = ShardedEngine(
        unsplit_strategy(group_operators(refine_graph(captured.graph))), model_values(captured)
    )
    loss = engine(*built.args)[0]
    loss.backward()
    wanted = built.model(*built.args)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    for tensor in captured.graph.parameters:
        own = built.model.get_parameter(tensor.key).grad
        torch.testing.assert_close(engine.shards.gradients[tensor.name], own, rtol=1e-4, atol=1e-6)


def quantised(rank: int, world: int) -> str:
    built = load_model(f"{SITUATIONS}:build_quantised")
    return capture(built.model, built.args).graph.fingerprint


@pytest.mark.slow
@pytest.mark.distributed
def test_names_are_the_same_in_another_process(ranks: RankPool):
    """A plan names functions; the ranks that run it define them again."""
    assert ranks.run(quantised) == [quantised(0, 1)] * 2


def test_a_module_on_the_meta_device_keeps_its_functions():
    built = load_model(f"{SITUATIONS}:build_straight_through")
    here = capture(built.model, built.args).graph
    meta = load_model(f"{SITUATIONS}:build_straight_through", device="meta")
    assert capture(meta.model, meta.args).graph.fingerprint == here.fingerprint


def test_bfloat16_and_double_have_the_function_too():
    built = load_model(f"{SITUATIONS}:build_straight_through")
    graph = capture(built.model, built.args, dtype="bfloat16").graph
    assert functions(graph) == ["Round", "Round"]
    first = next(op for op in graph.operators if op.target.startswith(FUNCTIONS))
    assert graph.tensors[first.outputs[0]].dtype == graph.tensors[first.inputs()[0]].dtype
    assert functions(in_double(graph)) == ["Round", "Round"]


class Scaled(torch.autograd.Function):
    """Two results, a list and a dict among its arguments, and an operand that gets no gradient."""

    @staticmethod
    def forward(ctx, x, weights, options, other):
        ctx.by = options["by"]
        ctx.save_for_backward(weights[0])
        return x * weights[0] + other, None, (x * options["by"]).detach()

    @staticmethod
    def backward(ctx, grad, *_):
        return grad * ctx.saved_tensors[0] * ctx.by, None, None, None


class Structured(nn.Module):
    """Calls it."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        made, nothing, free = Scaled.apply(self.one(x), [x], {"by": 2.0}, self.two(x))
        assert nothing is None
        return (made * self.three(free)).square().mean()


def test_arguments_and_results_of_any_structure():
    graph = capture(Structured(), (torch.randn(4, 8),)).graph
    trained = {t.key for t in graph.parameters if t.requires_grad}
    # `two` is added to the result, and the function gives it no gradient: as in the module.
    assert functions(graph) == ["Scaled"]
    (scaled,) = (op for op in graph.operators if op.target.startswith(FUNCTIONS))
    assert [graph.tensors[n].requires_grad for n in scaled.inputs()] == [True, False, False]
    assert {"one.weight", "three.weight"} <= trained


def made_with(bits):
    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x * 2**bits) / 2**bits

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Quantise


class Made(nn.Module):
    """Calls classes that a function made, alike but for what is around them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        h = self.layer(x)
        return (made_with(2).apply(h) - made_with(5).apply(h) + h).square().mean()


def test_classes_are_told_apart_by_what_is_around_them():
    graph = capture(Made(), (torch.randn(4, 8),)).graph
    assert len({op.target for op in graph.operators if op.target.startswith(FUNCTIONS)}) == 2


class Blind(torch.autograd.Function):
    """Looks at a value."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if float(x.sum()) > 0 else x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Peeking(nn.Module):
    """Calls it in the middle, or without gradients."""

    def __init__(self, gradients):
        super().__init__()
        self.layer, self.gradients = nn.Linear(8, 8), gradients

    def forward(self, x):
        h = self.layer(x)
        if self.gradients:
            return Blind.apply(h).square().mean()
        with torch.no_grad():
            target = Scaled.apply(h, [x], {"by": 1.0}, x)[0]
        return F.mse_loss(h, target)


def test_a_function_that_needs_values_is_refused():
    with pytest.raises(CaptureError, match=r"Blind .*forward cannot run without values"):
        capture(Peeking(True), (torch.randn(4, 8),))


def test_without_gradients_a_function_is_what_it_calls():
    graph = capture(Peeking(False), (torch.randn(4, 8),)).graph
    assert functions(graph) == []
    graph = capture(Structured(), (torch.randn(4, 8),), mode="inference").graph
    assert functions(graph) == []


def test_apply_is_pytorchs_own_again():
    before = torch.autograd.Function.apply.__func__.__code__
    capture(Structured(), (torch.randn(4, 8),))
    with pytest.raises(CaptureError):
        capture(Peeking(True), (torch.randn(4, 8),))
    assert torch.autograd.Function.apply.__func__.__code__ is before
