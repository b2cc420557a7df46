"""Small models of what is easily made on the wrong device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Drawing(nn.Module):
    """Draws noise, makes its positions, masks its labels with a constant and has a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("kept", torch.arange(8) % 3 > 0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape) * 0.1 + torch.rand(x.shape) + torch.rand_like(x)
        positions = torch.arange(x.shape[1], dtype=x.dtype).cos()[:, None]
        hidden = F.dropout(F.relu(self.inner(x + noise + positions)), 0.1)
        y = torch.where(torch.arange(8) % 4 > 0, y, -100).masked_fill(~self.kept, -100)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), y.flatten())


def drawing() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The model and its example inputs."""
    return Drawing(), (torch.randn(16, 8, 16), torch.randint(0, 8, (16, 8))), {}
