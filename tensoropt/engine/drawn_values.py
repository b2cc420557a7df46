"""Random values for a model built on the meta device or in fake mode, so that plans can be checked on it."""

from __future__ import annotations

import os
from math import prod, sqrt
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tensoropt.errors import PlanError
from tensoropt.units import format_bytes

_COPIES = 2
"""The number of copies in memory: the model's own tensors, and the values that runs start from."""
_SHARE = 8
"""The free memory needed, for all ranks and this process, relative to the model's copies; an assumption."""


def draw_values(model: torch.nn.Module, call: Any, seed: int) -> Any:
    """Give all meta tensors of a model and its example call random values, equal in every process.

    The model is changed in place, and the call returned. PlanError if this machine lacks the memory.
    """
    places: list[tuple[dict[str, Any], str]] = [
        (owner, name)
        for module in model.modules()
        for owner in cast("list[dict[str, Any]]", [module._parameters, module._buffers, vars(module)])
        for name, value in owner.items()
        if isinstance(value, torch.Tensor) and _has_none(value)
    ]
    without = {id(owner[name]): owner[name] for owner, name in places}
    needed = _COPIES * sum(value.nbytes for value in without.values())
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > free / _SHARE:
        raise PlanError(
            "the model was built without values (on the meta device), and is too large to be given random "
            f"ones: {format_bytes(needed)} in each process, where {format_bytes(free)} are free; give it "
            "fewer layers, or build it with values"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = {number: _drawn(value, generator) for number, value in without.items()}
    for owner, name in places:
        owner[name] = drawn[id(owner[name])]
    return pytree.tree_map_only(
        torch.Tensor, lambda value: _drawn(value, generator) if _has_none(value) else value, call
    )


def _has_none(value: torch.Tensor) -> bool:
    return value.is_meta or isinstance(value, FakeTensor)


def _drawn(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = like.shape
    if like.is_complex():
        value = torch.randn(shape, generator=generator, dtype=torch.complex128)
    elif like.is_floating_point():
        value = torch.randn(shape, generator=generator, dtype=torch.float32)
        value = value / sqrt(max(prod(shape[1:]), 1)) if value.dim() > 1 else value.sigmoid() + 0.5
    else:
        value = torch.full(shape, like.dtype == torch.bool)
    value = value.to(like.dtype)
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(value, like.requires_grad)
    return value.requires_grad_(like.requires_grad)
