"""Ordinary models: what has to be explored."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(torch.relu(self.body(x))), y)


def build():
    """A frontier."""
    return Classifier(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))


class Branching(Classifier):
    def forward(self, x, y):
        if x.sum() > 0:
            x = x * 2
        return super().forward(x, y)


def build_branching():
    """A refusal: which way is taken depends on the batch."""
    return Branching(), (torch.randn(8, 8), torch.randint(0, 4, (8,)))


build_branching.refused = r"ordinary\.py:\d+ \(if x\.sum\(\) > 0:\).*torch\.where"
