"""Functions that find modules of equal structure in a model, before their code runs, so that one trace can
serve all of them."""

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
"""A description of a module that is equal for alike modules."""
Place = tuple[str, str]
"""An attribute inside a block: (path of the submodule that has the attribute, name of the attribute)."""

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""The types of values that are fully described by their type and ``repr``."""
_STORED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True)
class Layout:
    """A tensor's shape, strides, dtype, device and ``requires_grad``, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Return a new tensor with this layout and its own memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Block:
    """A module, with a description by which modules of equal structure are found.

    Attributes:
        likeness: description of the module's classes, shapes and contents; equal for alike modules.
        simple: numbers, flags and texts that the module holds, which may differ between alike modules.
        objects: other objects that the module holds, such as a config; alike modules hold the same objects.
    """

    module: nn.Module
    likeness: Likeness
    simple: Mapping[Place, Any]
    objects: Sequence[Any]

    def state(self) -> Any:
        """Return the module's state except tensor values; states before and after a call are compared."""
        block = _block(self.module)
        return block.likeness, repr(block.simple), [_shallow(value) for value in self.objects]


def repeated_blocks(model: nn.Module, apart: Container[Likeness] = ()) -> list[Block]:
    """Return the outermost modules that have the same structure as another module of the model.

    Args:
        apart: structures (likenesses) of modules that are left out; their submodules may be returned.
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
    """Return, by likeness (a module structure), the attributes whose numbers, flags or texts differ between
    modules of that structure."""
    first: dict[Likeness, Block] = {}
    places_of: dict[Likeness, set[Place]] = {}
    for block in blocks:
        reference = first.setdefault(block.likeness, block)
        places = places_of.setdefault(block.likeness, set())
        places |= {p for p, value in block.simple.items() if not same_value(value, reference.simple[p])}
    return places_of


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal and of one type, because code can tell 1, 1.0 and True apart."""
    return repr(first) == repr(second)


def stored_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of all parameters and buffers, once per name, in an order that alike modules
    share."""
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
    """Return what identifies an attribute's value when two modules are compared: the path of a module inside
    the block, the contents of a container, the ``id`` of most other objects.

    Args:
        objects: list to which every object identified by ``id`` is appended.
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
