"""Regions without gradients: ``no_grad`` and ``inference_mode``, as contexts and as decorators.

A loss that is cut off from the parameters is refused.

Each module's own mode is captured; only a model that evaluates as a whole is set to train.
"""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.capture.no_grad import in_mode
from tensoropt.errors import CaptureError
from tests.models import Call, trained_by
from tests.situations import gradients

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


def test_the_graph_is_that_of_the_model_as_it_was_set():
    model, args = gradients.build_held_norm()
    graph = capture(model, args).graph
    assert not {op.target for op in graph.operators} & {"aten.dropout.default"}
    # Only the norm that trains has new statistics.
    assert {graph.tensors[name].key.split(".")[0] for name in graph.mutations} == {"last"}
    assert any("stay in eval mode" in note and "norm, drop" in note for note in graph.notes)
    assert not model.norm.training


def net(*held, new_head=False, train=()):
    """A net whose modules ``held`` evaluate, or all of it but ``train``."""
    model = Net()
    for name in held:
        model.get_submodule(name).eval()
    if new_head:
        model.layer = nn.Linear(8, 8)
    for name in train:
        model.get_submodule(name).train()
    return model


ALL = {"", "layer", "norm", "drop"}
MODES = {
    "one held": (net("norm"), {"drop"}, "^modules that stay in eval mode, as given: norm$"),
    "all": (net(""), {"norm", "drop"}, "was in eval mode and is captured in train mode.*norm, drop"),
    "a new head in a loaded model": (net("", new_head=True), {"norm", "drop"}, "was in eval mode"),
    "a part that trains": (net("", train=["drop"]), {"drop"}, "norm"),
    "its own train": (Held(), {"drop"}, ""),
}


@pytest.mark.parametrize("name", MODES)
def test_modules_are_captured_as_they_were_set_unless_all_evaluate(name):
    model, train, said = MODES[name]
    before = modes(model)
    found, notes = trained(model)
    assert found & {"norm", "drop"} == train
    assert not said or re.search(said, notes[0])
    assert modes(model) == before


def test_no_note_where_modes_change_nothing():
    assert trained(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)).eval())[1] == ()
    assert trained(Net())[1] == ()


def test_inference_evaluates_everything():
    model = Net()
    with in_mode(model, "inference") as notes:
        assert modes(model) == set()
    assert notes == ()
    assert modes(model) == {"", "layer", "norm", "drop"}


def _scaled(module, x):
    return x * 0.5 if module.training else x


class Chosen(nn.Linear):
    """Depends on its mode in a method that forward calls."""

    def _mixed(self, x):
        return x + 1 if self.training else x

    def forward(self, x):
        return self._mixed(super().forward(x))


class ByFunction(nn.Linear):
    def forward(self, x):
        return _scaled(self, super().forward(x))


@pytest.mark.parametrize("kind", [Chosen, ByFunction, nn.Linear])
def test_what_forward_calls_may_depend_on_the_mode(kind):
    model = nn.Sequential(kind(8, 8).eval(), nn.BatchNorm1d(8))
    _, notes = trained(model)
    assert notes == (() if kind is nn.Linear else ("modules that stay in eval mode, as given: 0",))


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


@pytest.mark.parametrize("build", [gradients.build_inference_teacher, gradients.build_decorated_teacher])
def test_a_teacher_in_inference_mode_gets_no_gradient(build):
    assert trained_by(capture(*build()).graph) == {"student.weight", "student.bias"}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(torch.no_grad, torch.enable_grad), (torch.inference_mode, lambda: torch.inference_mode(False))],
)
def test_gradients_switched_on_inside(outer, inner):
    def forward(m, x):
        with outer():
            wanted = torch.tanh(m.teacher(x))
            with inner():
                extra = m.inner(x).mean()
        return F.mse_loss(m.student(x), wanted.clone()) + extra

    model = Call(forward, **{name: nn.Linear(8, 8) for name in ("student", "teacher", "inner")})
    assert trained_by(capture(model, (X,)).graph) == {
        f"{layer}.{kind}" for layer in ("student", "inner") for kind in ("weight", "bias")
    }


WRITES = {
    "whole": lambda v: v.clamp_(min=0.4),
    "part": lambda v: v[:, 1:3].copy_(v[:, :2].round()),
    "item": lambda v: v.__setitem__((slice(None), 1), 2.0),
    "chunk": lambda v: v.chunk(2)[1].mul_(0.5),
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
    assert trained_by(capture(model, (X,)).graph) == {"layer.weight", "layer.bias"}


KEEPS = {
    "row": lambda kept, h: kept.__setitem__(0, h[0]),
    "queue": lambda kept, h: kept[1:3].copy_(h[:2].abs()),
    "chunk": lambda kept, h: kept.chunk(2)[1].lerp_(h[:2], 0.5),
    "whole": lambda kept, h: kept.copy_(h),
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("stored", [True, False])
def test_what_is_kept_without_gradients_has_none(keep, stored):
    """Part of a buffer or of a new tensor is written; the graph's gradients are compared with the model's."""

    def forward(m, x):
        h, kept = m.layer(x), m.kept if stored else torch.zeros(4, 8)
        with torch.no_grad():
            KEEPS[keep](kept, h)
        return (h * kept.sin()).square().mean()

    model = Call(forward, layer=nn.Linear(8, 8), kept=torch.ones(4, 8))
    assert trained_by(capture(model, (X,)).graph) == {"layer.weight", "layer.bias"}
    assert not model.kept.requires_grad
    model.train()(X).backward()  # as before


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, torch.bernoulli])
def test_what_is_drawn_has_no_gradient(draw):
    model = Call(lambda m, x: (m.layer(x) * draw(m.layer(x).sigmoid())).mean(), layer=nn.Linear(8, 8))
    graph = capture(model, (X,)).graph
    (drawn,) = [op for op in graph.operators if "like" in op.target or "bernoulli" in op.target]
    assert not graph.tensors[drawn.outputs[0]].requires_grad
