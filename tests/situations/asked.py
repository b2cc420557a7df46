"""What forward asks of backward, of its own parameters or of values, in ways that a graph does not hold."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH, CLASSES = 8, 16, 4


def _inputs():
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


class Two(nn.Module):
    """Two layers; what is special happens in ``features``."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def features(self, x):
        return self.first(x).tanh()

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.features(x)), y)


class Packed(Two):
    """Keeps activations in half precision for backward."""

    def features(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return super().features(x)


class Offloaded(Two):
    """Keeps activations in the host's memory."""

    def features(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().features(x)


class Watched(Two):
    """Asks for the gradient of an activation."""

    def features(self, x):
        h = super().features(x)
        h.retain_grad()
        return h


class Frozen(Two):
    """Freezes a layer for one call, as adversarial training does."""

    def features(self, x):
        self.first.requires_grad_(False)
        h = super().features(x)
        self.first.requires_grad_(True)
        return h


class Assigned(Two):
    """The same by the attribute, of one parameter."""

    def features(self, x):
        self.first.weight.requires_grad = False
        return super().features(x)


class Held(Two):
    """Freezes what is frozen already, which changes nothing."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)

    def features(self, x):
        self.first.requires_grad_(False)
        return super().features(x)


class Divided(Two):
    """Norms a weight in place, by an operator that assigns it again."""

    def features(self, x):
        with torch.no_grad():
            self.first.weight /= self.first.weight.norm(dim=1, keepdim=True)
        return super().features(x)


class Masked(Two):
    """A loss of some of the rows."""

    def forward(self, x, y):
        scores = self.head(self.features(x))
        return F.cross_entropy(scores[y > 0], y[y > 0])


def build_packed_activations():
    """A refusal: a plan keeps activations as they are, which gives other gradients."""
    return Packed(), _inputs()


build_packed_activations.refused = r"backward runs the hook Packed\.features\.<lambda> \(.*asked\.py:\d+"


def build_offloaded_activations():
    """A frontier; a plan keeps activations where they are."""
    return Offloaded(), _inputs()


def build_watched_activation():
    """A frontier; asking changes nothing."""
    return Watched(), _inputs()


def build_frozen_in_forward():
    """Refused: the graph would train the layer."""
    return Frozen(), _inputs()


build_frozen_in_forward.refused = r"asked\.py:\d+ .*freezes or unfreezes a parameter in forward.*before"


def build_assigned_in_forward():
    """Refused."""
    return Assigned(), _inputs()


build_assigned_in_forward.refused = build_frozen_in_forward.refused


def build_held_in_forward():
    """A frontier: nothing is changed."""
    return Held(), _inputs()


def build_divided_weight():
    """Refused for what it does: it changes a parameter, and makes none."""
    return Divided(), _inputs()


build_divided_weight.refused = r"changes its parameter first\.weight in forward"


def build_loss_of_some_rows():
    """Refused with the line and a word on boolean indexing."""
    return Masked(), _inputs()


build_loss_of_some_rows.refused = r"asked\.py:\d+ .*value of a tensor.*boolean indexing"


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


def build_overwritten_state():
    """Refused: PyTorch's own backward fails, as the state that it needs is overwritten."""
    return Stateful(False), (torch.randn(BATCH, 4, WIDTH), torch.randint(0, CLASSES, (BATCH,)))


build_overwritten_state.refused = r"own backward fails.*changed in place.*clone\(\)"


def build_kept_state():
    """A frontier of one micro-batch."""
    return Stateful(True), (torch.randn(BATCH, 4, WIDTH), torch.randint(0, CLASSES, (BATCH,)))


class Optioned(Two):
    """Takes whatever it is given beside the batch."""

    def forward(self, x, y, option=None):
        return super().forward(x, y)


class Options(dict):
    """A dict of a class of one's own."""


def build_array_passed():
    """Refused by name: numpy's arrays are no tensors."""
    return Optioned(), _inputs(), {"option": {"scale": np.ones(3)}}


build_array_passed.refused = r"the input `option\['scale'\]` is of the class numpy\.ndarray.*as_tensor"


def build_number_of_numpy_passed():
    """Refused by name."""
    return Optioned(), _inputs(), {"option": np.int64(3)}


build_number_of_numpy_passed.refused = r"`option` is of the class numpy\.int64.*a Python number"


def build_function_passed():
    """Refused by name."""
    return Optioned(), _inputs(), {"option": torch.relu}


build_function_passed.refused = r"`option` is of the class .*function.*__init__"


def build_object_passed():
    """Refused by name."""
    return Optioned(), _inputs(), {"option": Options(scale=torch.ones(3))}


build_object_passed.refused = r"`option` is of the class .*Options.*plain dict"


def build_labels_of_floats():
    """Refused as the model refuses it, with a word on types."""
    return Two(), (torch.randn(BATCH, WIDTH), torch.rand(BATCH))


build_labels_of_floats.refused = r"int64.*check the example inputs.*types"


class Steps(Two):
    """Divides with a remainder, for which PyTorch has no gradient."""

    def features(self, x):
        return self.first(x) // 0.5 + x


def build_floor_divided():
    """Refused with the line and a word on backward."""
    return Steps(), _inputs()


build_floor_divided.refused = r"asked\.py:\d+.*floor_divide.*no backward"
