"""Each module's own mode is captured; only a model that evaluates as a whole is set to train."""

from __future__ import annotations

import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.modes import in_mode
from tensoropt.question.model_source import load_model

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
