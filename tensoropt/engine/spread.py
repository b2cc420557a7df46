"""Gradients of plans in which ranks have different parameters: this rank's part, empty where it has none.

``torch.nn.utils.clip_grad_norm_`` sees the gradients of its own rank only. Norms of these gradients remember
that, and the norm of norms is one over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_NORMS: tuple[Callable[..., Any], ...] = (
    torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm,
)  # fmt: skip
_KEEPS: tuple[Callable[..., Any], ...] = (torch.stack, torch.Tensor.to)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    return 2.0 if given is None or given == "fro" else float(given)


def _norm(value: torch.Tensor, order: float) -> SpreadNorm:
    """This rank's share of a norm; nothing where the gradient is elsewhere."""
    found = torch.linalg.vector_norm(value, order) if value.numel() else value.new_zeros(())
    copies = getattr(value, "copies", 1)
    # All ranks' powers are added up, so that each of several copies gives its part of one.
    if copies > 1 and order != float("inf"):
        found = found / copies ** (1.0 / order)
    return found.as_subclass(SpreadNorm)


def spread(value: torch.Tensor, copies: int = 1) -> SpreadGradient:
    """A gradient as :class:`SpreadGradient`, of which so many ranks have the same."""
    found = value.as_subclass(SpreadGradient)
    found.copies = copies
    return found


class SpreadGradient(torch.Tensor):
    """A gradient, or a part of one, that is here, or elsewhere and empty here.

    Attributes:
        copies: ranks that have the same.
    """

    copies: int = 1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Else the call would come back to this very function, without end.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS:
                return _norm(args[0], _order(args, kwargs))
            # What clip_grad_norm_ calls where it can.
            if func is torch._foreach_norm:
                return [_norm(value, _order(args, kwargs)) for value in args[0]]
            return func(*args, **kwargs)


class SpreadNorm(torch.Tensor):
    """Norms of gradients that this rank has; their norm is that of all ranks' together."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in _NORMS:
                return _over_ranks(result, _order(args, kwargs))
        return result.as_subclass(cls) if func in _KEEPS else result


def _over_ranks(own: torch.Tensor, order: float) -> torch.Tensor:
    if not dist.is_initialized():
        return own
    if order == float("inf"):
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own
    # Powers of many elements are added up in float64: a narrow type overflows or loses the small ones.
    total = own.double() ** order
    dist.all_reduce(total)
    return (total ** (1.0 / order)).to(own.dtype)
