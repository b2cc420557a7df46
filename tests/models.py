"""A little model that tests of many folders write their own forward for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Call(nn.Module):
    """``function(module, *args, **kwargs)``, with modules, buffers, and parameters of the given shapes."""

    def __init__(
        self, function: Callable[..., Any], **held: nn.Module | torch.Tensor | int | tuple[int, ...]
    ) -> None:
        super().__init__()
        for name, value in held.items():
            if isinstance(value, nn.Module):
                setattr(self, name, value)
            elif isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, nn.Parameter(torch.randn(value)))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def trained_by(graph: Any) -> set[str]:
    """The model's names of the parameters that a graph trains."""
    return {str(tensor.key) for tensor in graph.parameters if tensor.requires_grad}


def situation(make: Callable[[], nn.Module], inputs: Callable[[], Any], refused: str | None = None) -> Any:
    """A function as model files have them, which returns ``make(), inputs()``, the same at every call.

    ``refused`` is what a situation that cannot be explored is told.
    """

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return make(), inputs()

    build.refused = refused  # type: ignore[attr-defined]
    return build
