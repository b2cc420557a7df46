"""Regions without gradients: ``no_grad`` and ``inference_mode``, as contexts and as decorators.

A loss that is cut off from the parameters is refused with the line that does it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.fidelity import trained_parameters
from tensoropt.capture.rebuild import rebuild
from tensoropt.errors import CaptureError
from tensoropt.question.model_source import load_model

X = torch.randn(4, 8)


class Cut(nn.Module):
    """A layer, then something."""

    def __init__(self, cut):
        super().__init__()
        self.layer, self.cut = nn.Linear(8, 8), cut

    def forward(self, x):
        return self.cut(self.layer(x)).square().mean()


def without_gradients(h):
    with torch.no_grad():
        return torch.tanh(h)


def in_inference_mode(h):
    with torch.inference_mode():
        return torch.tanh(h)


@pytest.mark.parametrize(
    ("cut", "how"),
    [
        (lambda h: h.detach(), r"detach\(\)"),
        (lambda h: torch.tanh(h.data), r"\.data"),
        (without_gradients, r"tanh\(\), without gradients"),
        (in_inference_mode, r"tanh\(\), without gradients"),
    ],
)
def test_the_line_is_named(cut, how):
    line = cut.__code__.co_firstlineno
    with pytest.raises(
        CaptureError, match=rf"cut off from the parameters at .*test_no_grad\.py:\d+ \({how}"
    ) as e:
        capture(Cut(cut), (X,))
    found = int(str(e.value).split("test_no_grad.py:")[1].split(" ")[0])
    assert line <= found <= line + 2
    with pytest.raises(CaptureError, match=r"result of loss= has no gradient: it is cut off .*test_no_grad"):
        capture(Cut(cut), (X,), loss=lambda out: out * 2)


@pytest.mark.parametrize("name", ["build_inference_teacher", "build_decorated_teacher"])
def test_a_teacher_in_inference_mode_gets_no_gradient(name):
    built = load_model(f"tests/situations/gradients.py:{name}")
    graph = capture(built.model, built.args).graph
    assert trained_parameters(graph) == {"student.weight", "student.bias"}


class Nested(nn.Module):
    """Gradients on inside a region where they are off, and inference mode off inside one where it is on."""

    def __init__(self, outer, inner):
        super().__init__()
        self.student, self.teacher, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.contexts = outer, inner

    def forward(self, x):
        outer, inner = self.contexts
        with outer():
            wanted = torch.tanh(self.teacher(x))
            with inner():
                extra = self.inner(x).mean()
        return F.mse_loss(self.student(x), wanted.clone()) + extra


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (torch.no_grad, torch.enable_grad),
        (torch.inference_mode, lambda: torch.inference_mode(False)),
    ],
)
def test_gradients_switched_on_inside(outer, inner):
    model = Nested(outer, inner)
    graph = capture(model, (torch.randn(4, 8),)).graph
    assert trained_parameters(graph) == {
        f"{layer}.{kind}" for layer in ("student", "inner") for kind in ("weight", "bias")
    }


def test_inference_mode_is_pytorchs_own_again():
    built = load_model("tests/situations/gradients.py:build_inference_teacher")
    capture(built.model, built.args)
    with torch.inference_mode():
        assert torch.is_inference_mode_enabled()


def bounded(v: torch.Tensor) -> None:
    v.clamp_(min=0.4)


def a_part_set(v: torch.Tensor) -> None:
    v[:, 1:3] = 2.0


def a_part_bounded(v: torch.Tensor) -> None:
    v[:, 0].clamp_(max=0.1)


def added(v: torch.Tensor) -> None:
    v += v.round()


def written(v: torch.Tensor) -> None:
    v.copy_(v.sort(dim=-1)[0])


class Writes(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], None]):
        super().__init__()
        self.a, self.write = nn.Linear(4, 4), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = nn.functional.softplus(self.a(x)).clone()
        with torch.no_grad():
            self.write(v)
        return (v * x).square().mean()


@pytest.mark.parametrize("write", [bounded, a_part_set, a_part_bounded, added, written])
def test_what_is_written_without_gradients_keeps_the_gradient_of_what_was_there(
    write: Callable[[torch.Tensor], None],
) -> None:
    torch.manual_seed(0)
    model, x = Writes(write), torch.randn(3, 4)
    graph = capture(model, (x,), compare=False).graph
    found = torch.autograd.grad(rebuild(graph, model)(x), list(model.parameters()))
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(float(w.abs().max()) > 1e-3 for w in wanted)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)
