"""Find the modules of a model that are alike, before any of their code runs."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Likeness = tuple[Any, ...]
"""A value that is equal for modules that are alike."""
Place = tuple[str, str]
"""The path of a submodule in its block, and the name of an attribute."""

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""The types of values that are fully described by their type and text."""
_STORED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Layout:
    """A tensor's properties apart from its values: shape, strides and types."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of ``tensor``."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Return a new tensor with this layout and its own memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Block:
    """A module that is like others.

    Attributes:
        simple: numbers, flags and names that it holds, which may differ between alike modules.
        objects: other objects that it holds, such as a model's config; alike modules hold the same ones.
    """

    module: nn.Module
    likeness: Likeness
    simple: Mapping[Place, Any]
    objects: Sequence[Any]

    def state(self) -> Any:
        """Return the state that a module's code may change besides tensors, compared before and after a
        call.
        """
        block = _block(self.module)
        return block.likeness, repr(block.simple), [_shallow(value) for value in self.objects]


def repeated_blocks(model: nn.Module, apart: Container[Likeness] = ()) -> list[Block]:
    """Return the outermost modules that are like another module.

    Args:
        apart: likenesses that are skipped; modules inside such modules may be returned.
    """
    blocks = {m: _block(m) for m in model.modules() if m is not model and _may_stand_for_others(m)}
    alike = Counter(block.likeness for block in blocks.values())
    block_of: dict[nn.Module, Block] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            block = blocks.get(child)
            if block is not None and alike[block.likeness] > 1 and block.likeness not in apart:
                block_of[child] = block
            else:
                visit(child)

    visit(model)
    return list(block_of.values())


def differing_places(blocks: Sequence[Block]) -> dict[Likeness, set[Place]]:
    """Return the places of numbers, flags and names that differ between modules of one likeness, by
    likeness.
    """
    first: dict[Likeness, Block] = {}
    places_of: dict[Likeness, set[Place]] = {}
    for block in blocks:
        reference = first.setdefault(block.likeness, block)
        places = places_of.setdefault(block.likeness, set())
        places |= {p for p, value in block.simple.items() if not same_value(value, reference.simple[p])}
    return places_of


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal and of one type: 1, 1.0 and True are different to a model's
    code.
    """
    return repr(first) == repr(second)


def stored_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers under all their names, in an order that is equal for alike
    modules.
    """
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _may_stand_for_others(module: nn.Module) -> bool:
    if next(module.children(), None) is None or type(module).forward is nn.Module.forward:
        return False
    norms = (m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    return not any(norm.training and norm.track_running_stats for norm in norms)


def _block(module: nn.Module) -> Block:
    paths = {id(part): path for path, part in module.named_modules()}
    numbers: dict[int, int] = {}
    simple: dict[Place, Any] = {}
    objects: list[Any] = []
    numbered: list[Any] = []
    for path, part in module.named_modules(remove_duplicate=False):
        numbered.append((path, paths[id(part)], type(part)))
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None:
                numbered.append((name, None))
            else:
                # Numbered, so that one tensor under two names can be distinguished from two tensors.
                number = numbers.setdefault(id(tensor), len(numbers))
                numbered.append((name, type(tensor), number, Layout.of(tensor)))
        for name, value in vars(part).items():
            if name in _STORED:
                continue
            if _is_simple(value):
                simple[path, name] = value
                numbered.append(name)
            else:
                numbered.append((name, _identity(value, paths, objects)))
    return Block(module, tuple(numbered), simple, objects)


def _is_simple(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_simple, value))
    return isinstance(value, SIMPLE)


def _identity(value: Any, paths: Mapping[int, str], objects: list[Any]) -> Any:
    """Return a value that identifies another: the path for a module of the block, the object itself for most
    other objects.

    Args:
        objects: receives the objects that are identified by themselves.
    """

    def contents(inner: Any) -> Any:
        return _identity(inner, paths, objects)

    if id(value) in paths:
        return ("here", paths[id(value)])
    if _is_simple(value):
        return (type(value), repr(value))
    if isinstance(value, types.MethodType):
        return (value.__func__, contents(value.__self__))
    if isinstance(value, functools.partial):
        return (value.func, contents(value.args), contents(value.keywords))
    if isinstance(value, dict):
        return (type(value), tuple((repr(k), contents(v)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(contents, value)))
    objects.append(value)
    return id(value)


def _shallow(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return None
    attributes = getattr(value, "__dict__", {})
    return {name: repr(v) if _is_simple(v) else (id(v), _length(v)) for name, v in attributes.items()}


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, dict, set)) else None
