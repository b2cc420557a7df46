"""Functions with a backward of their own: one operator each, whose gradients are the function's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.custom_functions import _Replaced
from tensoropt.capture.fidelity import in_double
from tensoropt.errors import CaptureError
from tensoropt.ops.functions import _in_python
from tensoropt.ops.overloads import FUNCTIONS
from tensoropt.question.model_source import load_model
from tensoropt.ranks.pool import RankPool
from tests.models import Call
from tests.situations import gradients

SITUATIONS = Path(__file__).parents[1] / "situations" / "gradients.py"
X = torch.randn(4, 8)
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


def quantised(rank: int, world: int) -> str:
    return capture(*gradients.build_quantised()).graph.fingerprint


@pytest.mark.slow
@pytest.mark.distributed
def test_names_are_the_same_in_another_process(ranks: RankPool):
    """A plan names functions; the ranks that run it define them again."""
    assert ranks.run(quantised) == [quantised(0, 1)] * 2


def test_a_module_on_the_meta_device_keeps_its_functions():
    here = capture(*gradients.build_straight_through()).graph
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


def structured():
    def forward(m, x):
        made, nothing, free = Scaled.apply(m.one(x), [x], {"by": 2.0}, m.two(x))
        assert nothing is None
        return (made * m.three(free)).square().mean()

    return Call(forward, **{name: nn.Linear(8, 8) for name in ("one", "two", "three")})


def test_arguments_and_results_of_any_structure():
    graph = capture(structured(), (X,)).graph
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


def test_classes_are_told_apart_by_what_is_around_them():
    def forward(m, x):
        h = m.layer(x)
        return (made_with(2).apply(h) - made_with(5).apply(h) + h).square().mean()

    graph = capture(layered(forward), (X,)).graph
    assert len({op.target for op in graph.operators if op.target.startswith(FUNCTIONS)}) == 2


def layered(forward):
    return Call(forward, layer=nn.Linear(8, 8))


class Blind(torch.autograd.Function):
    """Looks at a value."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if float(x.sum()) > 0 else x

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_function_that_needs_values_is_refused_and_apply_is_pytorchs_own_again():
    before = torch.autograd.Function.apply.__func__.__code__
    with pytest.raises(CaptureError, match=r"Blind .*forward cannot run without values"):
        capture(layered(lambda m, x: Blind.apply(m.layer(x)).square().mean()), (X,))
    assert torch.autograd.Function.apply.__func__.__code__ is before


def test_an_apply_in_c_becomes_one_that_capture_can_replace():
    """PyTorch 2.14 and later have only the one in C."""
    own = _in_python(torch._C._FunctionBase.__dict__["apply"]).__func__
    assert torch.equal(own(gradients.Round, X, 1), X.round())
    assert own.__code__.co_freevars == _Replaced.apply.__code__.co_freevars


def test_without_gradients_a_function_is_what_it_calls():
    def forward(m, x):
        h = m.layer(x)
        with torch.no_grad():
            target = Scaled.apply(h, [x], {"by": 1.0}, x)[0]
        return F.mse_loss(h, target)

    assert functions(capture(layered(forward), (X,)).graph) == []
    assert functions(capture(structured(), (X,), mode="inference").graph) == []
