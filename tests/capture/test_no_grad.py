"""Regions without gradients: ``no_grad`` and ``inference_mode``, as contexts and as decorators.

A loss that is cut off from the parameters is refused.

Each module's own mode is captured; only a model that evaluates as a whole is set to train.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.fidelity import _trained_parameters
from tensoropt.capture.no_grad import in_mode
from tensoropt.errors import CaptureError
from tensoropt.question.model_source import load_model
from tests.models import Call

X = torch.randn(4, 8)


class Net(nn.Module):
    """A norm and a dropout."""

    def __init__(self, p=0.5):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.norm(self.layer(x))).square().mean()


class Held(Net):
    """Holds its norm in eval whenever it is told to train."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def modes(model):
    return {name for name, module in model.named_modules() if module.training}


def trained(model):
    """(names of the modules that train while it is captured, the notes)."""
    with in_mode(model, "train") as notes:
        return modes(model), notes


def test_modules_in_eval_stay_so_and_are_named():
    model = Net()
    model.norm.eval()
    found, notes = trained(model)
    assert found == {"", "layer", "drop"}
    assert notes == ("held in eval mode, as the model has them: norm",)
    assert modes(model) == {"", "layer", "drop"}


def test_the_graph_is_that_of_the_model_as_it_was_set():
    built = load_model("tests/situations/gradients.py:build_held_norm")
    graph = capture(built.model, built.args).graph
    assert not {op.target for op in graph.operators} & {"aten.dropout.default"}
    # Only the norm that trains has new statistics.
    assert {graph.tensors[name].key.split(".")[0] for name in graph.mutations} == {"last"}
    assert any("held in eval mode" in note and "norm, drop" in note for note in graph.notes)
    assert not built.model.norm.training


def test_a_model_that_evaluates_as_a_whole_is_set_to_train_with_a_note():
    found, notes = trained(Net().eval())
    assert found == {"", "layer", "norm", "drop"}
    assert "was in eval mode and is captured in train mode" in notes[0]
    assert "norm, drop" in notes[0]


def test_no_note_where_modes_change_nothing():
    assert trained(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)).eval())[1] == ()
    assert trained(Net())[1] == ()


def test_a_new_head_in_a_loaded_model_does_not_count_as_set_by_hand():
    model = Net().eval()
    model.layer = nn.Linear(8, 8)
    assert trained(model)[0] == {"", "layer", "norm", "drop"}


def test_parts_set_to_train_in_a_model_that_evaluates_are_kept():
    model = Net().eval()
    model.drop.train()
    found, notes = trained(model)
    assert "drop" in found
    assert "norm" not in found
    assert "norm" in notes[0]


def test_a_models_own_train_is_asked():
    assert trained(Held())[0] == {"", "layer", "drop"}


def test_inference_evaluates_everything():
    model = Net()
    with in_mode(model, "inference") as notes:
        assert modes(model) == set()
    assert notes == ()
    assert modes(model) == {"", "layer", "norm", "drop"}


def _scaled(module, x):
    return x * 0.5 if module.training else x


class Chosen(nn.Module):
    """Depends on its mode in a method and in a function that forward calls."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def _mixed(self, x):
        return x + 1 if self.training else x

    def forward(self, x):
        if self.how == "method":
            return self._mixed(self.layer(x))
        return self.layer(x)


class ByFunction(Chosen):
    def forward(self, x):
        return _scaled(self, self.layer(x))


def test_what_forward_calls_may_depend_on_the_mode():
    for layer, said in ((Chosen("method"), True), (ByFunction(""), True), (nn.Linear(8, 8), False)):
        model = nn.Sequential(layer, nn.BatchNorm1d(8))
        layer.eval()
        _, notes = trained(model)
        assert bool(notes) is said
        assert not said or "held in eval mode, as the model has them: 0" in notes[0]


@pytest.mark.parametrize(
    "cut",
    [
        lambda h: h.detach(),
        lambda h: torch.tanh(h.data),
        torch.no_grad()(torch.tanh),
        torch.inference_mode()(torch.tanh),
    ],
)
def test_a_loss_that_is_cut_off_from_the_parameters_is_refused(cut):
    model = Call(lambda m, x: cut(m.layer(x)).square().mean(), layer=nn.Linear(8, 8))
    with pytest.raises(CaptureError, match=r"depends on no trained parameter.*no_grad.*detach"):
        capture(model, (X,))
    with pytest.raises(CaptureError, match="result of loss= depends on no trained parameter"):
        capture(model, (X,), loss=lambda out: out * 2)


@pytest.mark.parametrize("name", ["build_inference_teacher", "build_decorated_teacher"])
def test_a_teacher_in_inference_mode_gets_no_gradient(name):
    built = load_model(f"tests/situations/gradients.py:{name}")
    graph = capture(built.model, built.args).graph
    assert _trained_parameters(graph) == {"student.weight", "student.bias"}


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
    [(torch.no_grad, torch.enable_grad), (torch.inference_mode, lambda: torch.inference_mode(False))],
)
def test_gradients_switched_on_inside(outer, inner):
    model = Nested(outer, inner)
    graph = capture(model, (torch.randn(4, 8),)).graph
    assert _trained_parameters(graph) == {
        f"{layer}.{kind}" for layer in ("student", "inner") for kind in ("weight", "bias")
    }


WRITES = {
    "whole": lambda v: v.clamp_(min=0.4),
    "part": lambda v: v[:, 1:3].copy_(v[:, :2].round()),
    "item": lambda v: v.__setitem__((slice(None), 1), 2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_gradients_to_a_tensor_that_has_one_is_refused(write):
    def forward(m, x, of):
        v = F.softplus(m.layer(x)).clone()
        with torch.no_grad():
            WRITES[write](of(v))
        return (v * x).square().mean()

    model = Call(lambda m, x: forward(m, x, lambda v: v), layer=nn.Linear(8, 8))
    with pytest.raises(CaptureError, match=r"test_no_grad\.py:\d+ .*writes, without gradients, to a tensor"):
        capture(model, (X,))
    # What the region itself has made is its own.
    model = Call(lambda m, x: forward(m, x, torch.clone), layer=nn.Linear(8, 8))
    assert _trained_parameters(capture(model, (X,)).graph) == {"layer.weight", "layer.bias"}
