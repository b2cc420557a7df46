"""Which modules of a model are alike: what is known of them before any of their code runs."""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Likeness = tuple[Any, ...]
"""Equal for modules alike."""
Place = tuple[str, str]
"""The path of a submodule in its block, and the name of an attribute."""

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Values that are all there is to know of them."""
_STORED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Layout:
    """What there is to know of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of ``tensor``."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A tensor of this layout, in memory of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Block:
    """A module that others are like.

    Attributes:
        simple: numbers, flags and names that it holds, which may differ between modules alike.
        objects: other objects that it holds, a model's config for one; modules alike hold the same ones.
    """

    module: nn.Module
    likeness: Likeness
    simple: Mapping[Place, Any]
    objects: Sequence[Any]

    def state(self) -> Any:
        """What its code may change beside tensors; equal before and after a call that changes nothing."""
        now = _block(self.module)
        return now.likeness, repr(now.simple), [_shallow(value) for value in self.objects]


def repeated_blocks(model: nn.Module, apart: Container[Likeness] = ()) -> list[Block]:
    """The outermost modules that another one is like.

    Args:
        apart: likenesses that are passed over; modules inside such ones may be found.
    """
    blocks = {m: _block(m) for m in model.modules() if m is not model and _may_stand_for_others(m)}
    alike: dict[Likeness, int] = {}
    for block in blocks.values():
        alike[block.likeness] = alike.get(block.likeness, 0) + 1
    found: dict[nn.Module, Block] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            block = blocks.get(child)
            if block is not None and alike[block.likeness] > 1 and block.likeness not in apart:
                found[child] = block
            else:
                visit(child)

    visit(model)
    return list(found.values())


def differing_places(blocks: Sequence[Block]) -> dict[Likeness, set[Place]]:
    """Per likeness the numbers, flags and names in which its modules differ."""
    first: dict[Likeness, Block] = {}
    found: dict[Likeness, set[Place]] = {}
    for block in blocks:
        other = first.setdefault(block.likeness, block)
        places = found.setdefault(block.likeness, set())
        places |= {p for p, value in block.simple.items() if not same_value(value, other.simple[p])}
    return found


def same_value(one: Any, other: Any) -> bool:
    """Equal and of one type: 1, 1.0 and True are different things to a model's code."""
    return repr(one) == repr(other)


def stored_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names, in an order that is equal for modules alike."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _may_stand_for_others(module: nn.Module) -> bool:
    """Whether a module has code of its own around others, and keeps no statistics of what it has seen."""
    if next(module.children(), None) is None or type(module).forward is nn.Module.forward:
        return False
    norms = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    return not any(norm.training and norm.track_running_stats for norm in norms)


def _block(module: nn.Module) -> Block:
    paths = {id(part): path for path, part in module.named_modules()}
    numbers: dict[int, int] = {}
    simple: dict[Place, Any] = {}
    objects: list[Any] = []
    known: list[Any] = []
    for path, part in module.named_modules(remove_duplicate=False):
        known.append((path, paths[id(part)], type(part)))
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None:
                known.append((name, None))
            else:
                # Numbered, so that a tensor under two names is told from two tensors.
                number = numbers.setdefault(id(tensor), len(numbers))
                known.append((name, type(tensor), number, Layout.of(tensor)))
        for name, value in vars(part).items():
            if name in _STORED:
                continue
            if _is_simple(value):
                simple[path, name] = value
                known.append(name)
            else:
                known.append((name, _identity(value, paths, objects)))
    return Block(module, tuple(known), simple, objects)


def _is_simple(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_simple, value))
    return isinstance(value, SIMPLE)


def _identity(value: Any, paths: Mapping[int, str], objects: list[Any]) -> Any:
    """What a value is known by: a module of the block by its place, most other objects by themselves.

    Args:
        objects: objects known by themselves are added to it.
    """

    def known(inner: Any) -> Any:
        return _identity(inner, paths, objects)

    if id(value) in paths:
        return ("here", paths[id(value)])
    if _is_simple(value):
        return (type(value), repr(value))
    if isinstance(value, types.MethodType):
        return (value.__func__, known(value.__self__))
    if isinstance(value, functools.partial):
        return (value.func, known(value.args), known(value.keywords))
    if isinstance(value, dict):
        return (type(value), tuple((repr(k), known(v)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(known, value)))
    objects.append(value)
    return id(value)


def _shallow(value: Any) -> Any:
    """What an object holds, its own objects by themselves."""
    if isinstance(value, nn.Module):
        return None
    found = getattr(value, "__dict__", {})
    return {name: repr(v) if _is_simple(v) else (id(v), _length(v)) for name, v in found.items()}


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) else None
