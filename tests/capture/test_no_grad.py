"""Regions without gradients: ``no_grad`` and ``inference_mode``, as contexts and as decorators."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.fidelity import trained_parameters
from tensoropt.plan import load_model


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
