"""The settings that decide what a module's forward computes, beside parameters, buffers and modules: numbers,
texts, functions and plain tensors that forward reads, from the module, its class, and its config."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from tensoropt.capture.reads import names_read

PLANNED = frozenset(
    {*vars(nn.Module()), "gradient_checkpointing", "_gradient_checkpointing_func", "use_cache"}
)
"""Attributes that forward reads and that are not compared: the mode and what else every module has are, by
themselves; the plan says what is recomputed, and keeps no cache of keys and values whatever a config says."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _names(module: nn.Module) -> frozenset[str]:
    cls: Any = type(module)  # a key of the cache, which mypy does not take a class for
    return names_read(cls)


def reads(module: nn.Module, name: str) -> bool:
    return name in _names(module)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its forward reads and that are not tensors: constants of the
    plan."""
    names = _names(module) - PLANNED
    # NaN is no value that could be compared.
    return {n: _copied(v) for n, v in module.__dict__.items() if n in names and _comparable(v) and v == v}


def plain_tensors(module: nn.Module) -> tuple[tuple[str, torch.Tensor, int], ...]:
    names = _names(module) - PLANNED
    found = ((n, v) for n, v in module.__dict__.items() if n in names and isinstance(v, torch.Tensor))
    # Tensors of inference mode count no writes.
    return tuple((n, v, v._version) for n, v in found if not v.is_inference())


def objects_of(module: nn.Module) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the objects whose attributes a module's forward reads (a config), with what it reads of them."""
    names = _names(module) - PLANNED
    found = {}
    for name, value in module.__dict__.items():
        if name not in names or isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType)):
            continue
        if _comparable(value) or not hasattr(value, "__dict__") or callable(value):
            continue
        settings = {
            n: _copied(v) for n, v in vars(value).items() if n in names and _comparable(v) and same(v, v)
        }
        if settings:
            found[name] = value, settings
    return found


def of_class(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and the like that a module's forward reads from its class."""
    found: dict[str, Any] = {}
    for base in type(module).__mro__:
        if base in nn.Module.__mro__ or base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            if name in _names(module) and name not in module.__dict__ and name not in found:
                plain = type(value) in (*_PLAIN, list, tuple, dict, set, frozenset)
                if plain and not name.startswith("__") and _comparable(value) and same(value, value):
                    found[name] = _copied(value)
    return {name: value for name, value in found.items() if name not in PLANNED}


def _comparable(value: Any) -> bool:
    """Return whether a value is a number, a text, a function, or made of such."""
    if type(value) is dict:
        return all(_comparable(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_comparable, value))
    return type(value) in _PLAIN or (
        isinstance(value, _FUNCTIONS) and not isinstance(getattr(value, "__self__", None), nn.Module)
    )


def _copied(value: Any) -> Any:
    """Return a value that does not change when the containers in it are written to; functions are
    themselves."""
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_copied, value))
    return value


def same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RuntimeError:  # a tensor
        return False


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = getattr(value, "__name__", None)
    return str(name) if name else repr(value)
