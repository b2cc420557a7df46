"""Ways of calling models that scripts have, each as a small model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Recipe = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Called(nn.Module):
    """Takes tensors, numbers, flags, containers and things that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(
        self,
        x: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        *,
        repeat: int = 1,
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> torch.Tensor:
        h = self.up(x).relu()
        for _ in range(repeat):
            h = torch.tanh(h)
        if mask is not None:
            h = h * mask
        if extra is not None:
            h = h + extra["shift"]["each"]
        if more.get("scale") is not None:
            h = h * more["scale"]
        out = self.down(h)
        return out.square().mean() if labels is None else F.cross_entropy(out, labels)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 16), torch.randint(0, 8, (8,))


def build_explicit_none() -> Recipe:
    """A frontier: None is passed for an argument whose default it is."""
    x, y = _inputs()
    return Called(), (x, y, None), {"extra": None}


def build_nested_arguments() -> Recipe:
    """A frontier: tensors in dicts, a number, and an argument that only ``**kwargs`` takes."""
    x, y = _inputs()
    extra = {"shift": {"each": torch.randn(8, 32), "other": None}}
    return Called(), (x,), {"labels": y, "repeat": 2, "extra": extra, "scale": torch.ones(8, 1)}
