"""Results that kernels leave in more memory than they have elements, which fake tensors do not show.

A kernel that makes its result in place of something larger and then shrinks it keeps the memory: PyTorch's
``resize_`` never releases any. A test compares the storages of every operator's results, forward and
backward, with those that real kernels leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten


def _columns(columns: torch.Tensor, *_: Any, **__: Any) -> Sequence[int]:
    # Made with the size of the columns, each element of which goes to one position in the image.
    return [columns.numel()]


def _reduced(input: torch.Tensor, target: torch.Tensor, reduction: int = 1, **_: Any) -> Sequence[int]:
    # The terms, if they are summed.
    return [torch.broadcast_shapes(input.shape, target.shape).numel() if reduction else 0]


def _bags(weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> Sequence[int]:
    # The bag of each index, with one extra element for counting.
    return [0, indices.numel() + 1, 0, 0]


_ELEMENTS: dict[Any, Callable[..., Sequence[int]]] = {
    aten.col2im.default: _columns,
    aten.mse_loss.default: _reduced,
    aten.soft_margin_loss.default: _reduced,
    aten._embedding_bag.default: _bags,
    aten._embedding_bag_forward_only.default: _bags,
}
"""Least number of elements in the storages of an operator's results, by their positions, per operator."""


class KernelStorages(TorchDispatchMode):
    """A mode that gives results of fake tensors the storages that real kernels leave; it must be entered
    under all modes that watch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        elements = _ELEMENTS.get(func)
        if elements is None:
            return result
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        left = [
            _in_storage(one, count)
            for one, count in zip(results, elements(*args, **(kwargs or {})), strict=True)
        ]
        return left[0] if isinstance(result, torch.Tensor) else tuple(left)


def _in_storage(value: torch.Tensor, elements: int) -> torch.Tensor:
    # A result with no elements at all was not made (the bags of a sum).
    if not 0 < value.numel() < elements:
        return value
    return value.new_empty(elements).as_strided(value.shape, value.stride())
