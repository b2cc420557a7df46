"""Gradients in plans whose ranks have different parameters: this rank's part, empty if it has none.

``torch.nn.utils.clip_grad_norm_`` sees only the gradients of its own rank. Norms of these gradients remember
that, and the norm of norms is taken over all ranks.
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
    """Return this rank's share of a norm; nothing if the gradient is elsewhere."""
    found = torch.linalg.vector_norm(value, order) if value.numel() else value.new_zeros(())
    copies = getattr(value, "copies", 1)
    # The powers of all ranks are summed, so each of several copies contributes its fraction.
    if copies > 1 and order != float("inf"):
        found = found / copies ** (1.0 / order)
    return found.as_subclass(SpreadNorm)


def spread(value: torch.Tensor, copies: int = 1) -> SpreadGradient:
    """Return a gradient as :class:`SpreadGradient`, given the number of ranks that have the same one."""
    found = value.as_subclass(SpreadGradient)
    found.copies = copies
    return found


class SpreadGradient(torch.Tensor):
    """A gradient, or a part of one, that is on this rank, or elsewhere and empty here.

    Attributes:
        copies: the number of ranks that have the same one.
    """

    copies: int = 1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Otherwise the call would come back to this very function, endlessly.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS:
                return _norm(args[0], _order(args, kwargs))
            # clip_grad_norm_ calls this where it can.
            if func is torch._foreach_norm:
                return [_norm(value, _order(args, kwargs)) for value in args[0]]
            return func(*args, **kwargs)


class SpreadNorm(torch.Tensor):
    """Norms of this rank's gradients; their norm is that of all ranks' gradients together."""

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
    # Powers of many elements are summed in float64: a narrow type overflows or loses the small ones.
    total = own.double() ** order
    dist.all_reduce(total)
    return (total ** (1.0 / order)).to(own.dtype)
