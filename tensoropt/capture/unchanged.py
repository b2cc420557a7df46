"""A model that is as it was after its code has run: attributes, buffers, what lists and dicts hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def unchanged(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """Put back what the code of a model's modules changes in them while the context is open.

    Args:
        values: also what tensors hold, where it was changed; else tensors are only put back in their places.
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
            # By value: kernels of norms change statistics without counting a version.
            for tensor, copy in copies:
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)


def _holds_others(value: Any) -> bool:
    return type(value) in (dict, list, set)
