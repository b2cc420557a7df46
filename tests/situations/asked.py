"""What forward asks of backward, of its own parameters or of values, in ways that a graph does not hold."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import Call, situation

BATCH, WIDTH, CLASSES = 8, 16, 4


def _inputs():
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


def _features(net, x):
    return net.first(x).tanh()


def _two(features=_features):
    """Two layers, of which ``features(net, x)`` computes the first."""

    def forward(net, x, y):
        return F.cross_entropy(net.head(features(net, x)), y)

    return Call(forward, first=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, CLASSES))


def of(features, refused=None):
    return situation(lambda: _two(features), _inputs, refused)


def _offloaded(net, x):
    with torch.autograd.graph.save_on_cpu():
        return _features(net, x)


def _watched(net, x):
    h = _features(net, x)
    h.retain_grad()
    return h


def _frozen(net, x):
    net.first.requires_grad_(False)
    h = _features(net, x)
    net.first.requires_grad_(True)
    return h


def _assigned(net, x):
    net.first.weight.requires_grad = False
    return _features(net, x)


def _held(net, x):
    net.first.requires_grad_(False)
    return _features(net, x)


def _divided(net, x):
    with torch.no_grad():
        net.first.weight /= net.first.weight.norm(dim=1, keepdim=True)
    return _features(net, x)


FREEZES = r"asked\.py:\d+ .*freezes or unfreezes a parameter in forward.*before"
# A frontier; a plan keeps activations where they are.
build_offloaded_activations = of(_offloaded)
# A frontier; asking for an activation's gradient changes nothing.
build_watched_activation = of(_watched)
# Refused, as adversarial training is: the graph would train the layer.
build_frozen_in_forward = of(_frozen, FREEZES)
# The same by the attribute, of one parameter.
build_assigned_in_forward = of(_assigned, FREEZES)
# Refused for what it does: it changes a parameter, and makes none.
build_divided_weight = of(_divided, r"changes its parameter first\.weight in forward")
# Refused with the line and a word on backward, which a division with a remainder has not.
build_floor_divided = of(lambda net, x: net.first(x) // 0.5 + x, r"asked\.py:\d+.*floor_divide.*no backward")


def build_held_in_forward():
    """A frontier: what is frozen already is frozen, which changes nothing."""
    model = _two(_held)
    model.first.requires_grad_(False)
    return model, _inputs()


class Stateful(nn.Module):
    """A recurrent layer that begins where the last batch ended."""

    def __init__(self, apart):
        super().__init__()
        self.layer, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("last", torch.zeros(1, BATCH, WIDTH))
        self.apart = apart

    def forward(self, x, y):
        begin = self.last.clone() if self.apart else self.last
        h, last = self.layer(x, begin)
        self.last.copy_(last.detach())
        return F.cross_entropy(self.head(h[:, -1]), y)


def _sequences():
    return torch.randn(BATCH, 4, WIDTH), torch.randint(0, CLASSES, (BATCH,))


# Refused: PyTorch's own backward fails, as the state that it needs is overwritten.
build_overwritten_state = situation(
    lambda: Stateful(False), _sequences, r"own backward fails.*changed in place.*clone\(\)"
)
# A frontier of one micro-batch.
build_kept_state = situation(lambda: Stateful(True), _sequences)


class Optioned(nn.Module):
    """Takes whatever it is given beside the batch."""

    def __init__(self):
        super().__init__()
        self.two = _two()

    def forward(self, x, y, option=None):
        return self.two(x, y)


class Options(dict):
    """A dict of a class of one's own."""


def optioned(option, refused):
    """Refused by name: what is passed is no tensor."""

    def build():
        return Optioned(), _inputs(), {"option": option}

    build.refused = refused
    return build


build_array_passed = optioned(
    {"scale": np.ones(3)}, r"the input `option\['scale'\]` is of the class numpy\.ndarray.*as_tensor"
)
build_number_of_numpy_passed = optioned(
    np.int64(3), r"`option` is of the class numpy\.int64.*a Python number"
)
build_function_passed = optioned(torch.relu, r"`option` is of the class .*function.*__init__")
build_object_passed = optioned(
    Options(scale=torch.ones(3)), r"`option` is of the class .*Options.*plain dict"
)
# Refused as the model refuses it, with a word on types.
build_labels_of_floats = situation(
    _two, lambda: (torch.randn(BATCH, WIDTH), torch.rand(BATCH)), r"int64.*check the example inputs.*types"
)
