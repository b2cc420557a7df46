"""The module beside its graph: modes as its user set them, rounding told from a fault."""

from __future__ import annotations

import pytest

from tensoropt.engine import models
from tensoropt.engine.models import ModelSpec
from tensoropt.verify.reference import module_difference

SITUATIONS = "tests/situations/gradients.py"
AUTOCAST = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(torch.softmax(self.a(self.b(torch.relu(self.a(x)))), -1)).float().square().mean()

def build():
    return Net(), (torch.randn(8, 6, 16),)
"""


def found(source):
    models.forget_models()
    return module_difference(0, 1, ModelSpec(source), 0)


@pytest.mark.parametrize(
    "name", ["build_straight_through", "build_codebook", "build_held_norm", "build_summed_losses",
             "build_python_random", "build_reentrant"],
)  # fmt: skip
def test_a_graph_is_its_module(name):
    module = found(f"{SITUATIONS}:{name}")
    assert module.ok
    assert module.differences.gradient < 1e-5


def test_a_mode_that_capture_overruled_is_seen(monkeypatch):
    """The module runs as its user set it, whatever capture does."""
    monkeypatch.setattr("tensoropt.capture.pytorch.in_mode", lambda model, mode: _all_training(model))
    module = found(f"{SITUATIONS}:build_held_norm")
    # Its dropout would train in the graph, which then is not compared.
    assert module is None or not module.ok


def _all_training(model):
    import contextlib

    @contextlib.contextmanager
    def open_():
        modes = {m: m.training for m in model.modules()}
        model.train()
        model.drop.eval()
        yield ()
        for m, training in modes.items():
            m.training = training

    return open_()


def test_autocast_inside_is_judged_by_what_bfloat16_changes(tmp_path):
    file = tmp_path / "autocast.py"
    file.write_text(AUTOCAST)
    assert found(f"{file}:build").ok


def test_a_lost_backward_inside_bfloat16_is_not(monkeypatch):
    """Without the function's own backward the rounding has no gradient at all."""
    monkeypatch.setattr("tensoropt.capture.pytorch.check_structure", lambda *args: ())
    monkeypatch.setattr(
        "tensoropt.capture.custom_functions._kept",
        lambda cls, args, kwargs: cls.forward(_Anything(), *args),
    )
    module = found(f"{SITUATIONS}:build_narrow")
    assert not module.ok
    assert module.worst_gradient in {"first.weight", "first.bias"}


class _Anything:
    def save_for_backward(self, *tensors):
        pass
