"""The exponential moving average of a model's parameters, as scripts keep it, under any plan and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import tensoropt
from tensoropt.engine.parallel_model import ATTRIBUTE

DECAY = 0.8


class Average:
    """The average of all parameters since it was made; a rank averages what it has of them.

    Saved as the parameters of a checkpoint, which any plan of the model reads.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.values = self._parameters()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.model.parameters(), values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are, after a step."""
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter, 1 - DECAY)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model with the average as its parameters, until the block ends."""
        own = self._parameters()
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def save(self, path: Path) -> None:
        """All ranks together."""
        if not hasattr(self.model, ATTRIBUTE):
            torch.save(self.values, path)
            return
        with self.in_place():
            tensoropt.save_checkpoint(path, self.model)

    def load(self, path: Path) -> None:
        """All ranks together; the parameters stay."""
        if not hasattr(self.model, ATTRIBUTE):
            self.values = torch.load(path)
            return
        own = self._parameters()
        tensoropt.load_checkpoint(path, self.model)
        self.values = self._parameters()
        self._put(own)
