"""Ways of calling models and of returning losses that scripts have, each as a small model."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

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


@dataclasses.dataclass(frozen=True)
class Results:
    """Every field is required, and the last one looks at another."""

    logits: torch.Tensor
    loss: torch.Tensor
    classes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", self.logits.shape[-1])


class Pair(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


class Returning(nn.Module):
    """Puts its loss into an object of some kind."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.down(self.up(x).relu())
        return self.kind(logits=logits, loss=F.cross_entropy(logits, labels))


def build_required_fields() -> Recipe:
    """A frontier: the loss is in a frozen dataclass without defaults."""
    return Returning(Results), _inputs(), {}


def build_named_tuple() -> Recipe:
    """A frontier: the loss is a field of a named tuple."""
    return Returning(Pair), _inputs(), {}


def build_default_dict() -> Recipe:
    """A frontier: the loss is in a dict that is not made of a dict alone."""
    return Returning(lambda **values: collections.defaultdict(list, values)), _inputs(), {}
