"""Kernels that operators of several families share: averages computed as parts that add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensoropt.ops.context import ShardContext
from tensoropt.ops.overloads import resolve_overload


def mean_as_sum(
    context: ShardContext, name: str, target: str, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A mean over split dims: the sum (``target``) divided by the global count, so that shards add up."""
    total: torch.Tensor = resolve_overload(target)(*args, **kwargs)
    return total / count


def divided(
    context: ShardContext, name: str, target: str, parts: tuple[int, ...], *args: Any, **kwargs: Any
) -> Any:
    """The operator's results, each divided by the number of parts of an average."""
    result = resolve_overload(target)(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return result / parts[0]
    return tuple(value / count if count > 1 else value for value, count in zip(result, parts, strict=True))


SHARED_KERNELS: dict[str, Callable[..., Any]] = {
    "kernels.mean_as_sum": mean_as_sum,
    "kernels.divided": divided,
}
