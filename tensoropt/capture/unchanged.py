"""A model that is restored after its code has run: attributes, buffers, the contents of lists and dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def unchanged(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """While open, record what the code of a model's modules changes in them; restore it at the end.

    Args:
        values: also restore the contents of changed tensors; otherwise tensors are only put back in their
            places.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = {id(v): (v, v.copy()) for found in attributes for v in found.values() if _holds_others(v)}
    stored = [*model.parameters(), *model.buffers()] if values else []
    copies = [(tensor, tensor.detach().clone()) for tensor in stored]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        for holder, before in contents.values():
            if isinstance(holder, list):
                holder[:] = before
            else:
                holder.clear()
                holder.update(before)
        with torch.no_grad():
            # By value, because kernels of norms change statistics without increasing a version.
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def _holds_others(value: Any) -> bool:
    return type(value) in (dict, list, set)
