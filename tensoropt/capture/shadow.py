"""Captures without a GPU: a model that is not on the CPU is captured on the meta device.

An export needs only shapes and types, which the meta device provides for free. Values are read where the
graph keeps some (constants made from what the model stores), and are moved to the CPU for this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

META = torch.device("meta")


def off_the_cpu(model: nn.Module, call: Any) -> bool:
    """Whether any tensor of the model, or of an example call (any pytree), is on a device other than the CPU.

    Fake tensors are on no device, and are captured unchanged.
    """
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    found = [t for t in tensors if isinstance(t, torch.Tensor)]
    if any(isinstance(t, FakeTensor) for t in found):
        return False
    return any(t.device.type != "cpu" for t in found)


def on_meta(call: Any) -> Any:
    """An example call with its tensors on the meta device."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(META), call)


@contextlib.contextmanager
def shadowed(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Replace a model's tensors with meta tensors while the context is open.

    In place rather than on a copy, because modules hold objects that cannot be copied, and tied tensors stay
    tied.

    Args:
        convert: makes the replacement of a tensor; by default one on the meta device.

    Yields:
        The model's original tensors, by their name in the model: parameters, buffers and tensors that are
        plain attributes of a module.
    """
    found: dict[str, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    found[f"{path}.{name}" if path else name] = value
                    places.append((holder, name, value))
    shadows = {id(value): (convert or _shadow)(value) for _, _, value in places}
    try:
        for holder, name, value in places:
            holder[name] = shadows[id(value)]
        yield found
    finally:
        for holder, name, value in places:
            holder[name] = value


def _shadow(value: torch.Tensor) -> torch.Tensor:
    shadow = torch.empty_like(value, device=META, requires_grad=False)
    return nn.Parameter(shadow, value.requires_grad) if isinstance(value, nn.Parameter) else shadow
