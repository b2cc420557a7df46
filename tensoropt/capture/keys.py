"""Registration of a module's parameters and buffers by their state-dict keys."""

from __future__ import annotations

import contextlib
import keyword
from collections.abc import Iterator
from unittest import mock

import torch


def register(root: torch.nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Make ``tensor`` a parameter (if it is one) or a buffer of ``root`` under a dotted key.

    Missing submodules along the key are created.
    """
    module = root
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


@contextlib.contextmanager
def any_names() -> Iterator[None]:
    """Allow module names with quotes and newlines, or Python keywords; PyTorch writes them into code
    unchanged."""

    def written(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
        return base

    with mock.patch.object(torch.fx.graph, "_format_target", written):
        yield
