"""A model on the meta device is the same graph as the one with weights: a plan made from the first fits the
second."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt import zoo
from tensoropt.capture import capture

QUICK = ("mixtral-tiny", "lenet")
LAPTOP = [e.name for e in zoo.list_models() if e.size == "laptop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAPTOP]
)
def test_the_zoo_is_captured_alike(name):
    graphs = []
    for device in ("meta", "cpu"):
        built = zoo.build(name, device=device)
        graphs.append(capture(built.model, built.args, built.kwargs).graph)
    there, here = graphs
    assert [op.name for op in there.operators] == [op.name for op in here.operators]
    assert dict(there.tensors) == dict(here.tensors)
    assert there.fingerprint == here.fingerprint


class Stored(nn.Module):
    """Layers that hold equal tables, index by a stored count, and reshape what attention returns."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        for layer in range(2):
            self.register_buffer(f"angles{layer}", torch.arange(4.0), persistent=False)
        self.register_buffer("rows", torch.arange(2), persistent=False)

    def forward(self, x):
        for layer, weight in enumerate(self.weights):
            y = F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(2, 4, 8) @ weight
            cosine = getattr(self, f"angles{layer}").cos()[None, None, :, None]
            x = y.view(2, 4, 2, 4).transpose(1, 2) * cosine
        return x[self.rows].sum()


def captured(device: str):
    with torch.device(device):
        model, x = Stored(), torch.randn(2, 2, 4, 4)
    return capture(model, (x,)).graph


def test_nothing_is_decided_by_stored_values():
    there, here = captured("meta"), captured("cpu")
    assert there.fingerprint == here.fingerprint
    cosines = [n for n, value in here.constants.items() if value.numel() == 4]
    assert len(cosines) == 2
    assert here.constants[cosines[0]] is here.constants[cosines[1]]


def test_views_are_numbered_as_one():
    assert not any("unsafe" in op.name + op.target for op in captured("meta").operators)
