"""Tensors that say they are on a GPU, and compute on the CPU."""

from __future__ import annotations

from typing import Any

import torch


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU and has its numbers on the CPU: where the two meet is an error."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> OnCuda:
        found: OnCuda = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device="cuda:0"
        )
        found.numbers = numbers
        return found

    numbers: torch.Tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCuda({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        moves = "copy" in str(func)
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            plain = isinstance(value, torch.Tensor) and not isinstance(value, OnCuda)
            if plain and value.dim() and not moves:
                raise RuntimeError(f"{func}: expected all tensors on cuda:0, one is on {value.device}")
        target = torch.device(kwargs.get("device") or "cuda:0")
        if target.type == "cuda" and "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = torch.utils._pytree.tree_map_only(OnCuda, lambda t: t.numbers, (args, kwargs))
        found = func(*args, **kwargs)
        if target.type != "cuda":
            return found
        return torch.utils._pytree.tree_map_only(torch.Tensor, OnCuda, found)


def put_on_cuda(model: torch.nn.Module) -> None:
    """Bring a model's parameters and buffers there; tied ones stay tied."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is None:
                    continue
                if id(value) not in moved:
                    there = OnCuda(value.detach())
                    is_parameter = isinstance(value, torch.nn.Parameter)
                    moved[id(value)] = (
                        torch.nn.Parameter(there, value.requires_grad) if is_parameter else there
                    )
                holder[name] = moved[id(value)]
