"""Multi-layer perceptrons: the smallest models with something to split."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensoropt.zoo.inputs import tokens
from tensoropt.zoo.registry import Recipe, register


class MLP(nn.Module):
    """``x (batch, features)`` through ``layers`` linear layers with ReLU between, then cross entropy."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = F.relu(layer(x))
        return F.cross_entropy(last(x), labels)


@register("mlp", paper="", size="laptop", batch=64)
def mlp(batch: int, features: int = 256, hidden: int = 1024, classes: int = 16, layers: int = 3) -> Recipe:
    """Multi-layer perceptron with a classification loss."""
    return MLP(features, hidden, classes, layers), (torch.randn(batch, features), tokens(classes, batch)), {}
