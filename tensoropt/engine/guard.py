"""Refuse changes of a parallelized model that its plan does not follow, such as a new module or hook."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tensoropt.capture.no_grad import names_read
from tensoropt.errors import PlanError

_PLANNED = frozenset(
    {*vars(nn.Module()), "gradient_checkpointing", "_gradient_checkpointing_func", "use_cache", "forward"}
)
"""Attributes that are not compared, because the plan decides them or another check covers them."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_UNSET = object()

_BEFORE = "do it before parallelize"
_AS_ARGUMENT = f"{_BEFORE}, or pass what changes as an argument of the call"
_IN_BUFFER = f"{_BEFORE}, or make it a buffer (register_buffer) and write into that"
_IN_PLACE = (
    f"{_BEFORE}, or write into it (load_state_dict without assign, or with torch.no_grad(): p.copy_(...))"
)
_ON_THE_WHOLE = (
    f"{_BEFORE}, or add it to the whole model, whose own hooks are called (leave gradient checkpointing out: "
    "the plan decides what is recomputed)"
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _names(module: nn.Module) -> frozenset[str]:
    cls: Any = type(module)  # a key of the cache, which mypy does not take a class for
    return names_read(cls)


def _comparable(value: Any) -> bool:
    if type(value) is dict:
        return all(_comparable(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_comparable, value))
    # NaN is no value that could be compared.
    return (type(value) in _PLAIN and value == value) or (
        isinstance(value, _FUNCTIONS) and not isinstance(getattr(value, "__self__", None), nn.Module)
    )


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_copied, value))
    return value


def _same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except RuntimeError:  # a tensor
        return False


def _no_more(now: Any, was: Any) -> bool:
    return len(now) <= len(was)


def _as_written(now: Any, was: tuple[torch.Tensor, int]) -> bool:
    return now is was[0] and now._version == was[1]


class _Watched(NamedTuple):
    """A part of a module that must stay as it was when the model was parallelized.

    Attributes:
        holder, key: the dict (of attributes, children or parameters) that contains the part, and its key;
            for an attribute of the class, an object with the ``get`` of a dict.
        was: its value when the model was parallelized.
        alike: a function of the present value and ``was`` that returns whether it counts as unchanged.
        path: its name in the model.
        remedy: what to do instead of changing it.
    """

    holder: Any
    key: str
    was: Any
    alike: Callable[[Any, Any], bool]
    path: str
    remedy: str

    def refusal(self) -> PlanError:
        now, was = self.holder.get(self.key, _UNSET), self.was
        then = "when the model was parallelized"
        if self.alike is _no_more:
            new = [key if isinstance(key, str) else _shown(now[key]) for key in now if key not in was]
            change = f"has more {self.key.strip('_').replace('_', ' ')} than {then} ({', '.join(new)})"
        elif self.alike is _as_written:
            change = "was changed or replaced after parallelize"
        elif isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor):
            change = f"is another tensor than {then}"
        elif self.alike is operator.is_ and type(now) is type(was):
            change = f"is another {type(now).__name__} than {then}"
        else:
            change = f"is {_shown(now)} now, but was {_shown(was)} {then}"
        return PlanError(f"{self.path} {change}, and the plan would not follow this; {self.remedy}")


def _shown(value: Any) -> str:
    if value is _UNSET:
        return "not set"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    name = getattr(value, "__name__", None)
    return str(name) if name else repr(value)


def _watched(path: str, module: nn.Module) -> Iterator[_Watched]:
    """Yield the parts of one module that must not change, because the plan would not follow."""
    inner, attributes = f"{path}." if path else "", module.__dict__
    whole = path or "the model"
    yield _Watched(attributes, "_modules", (*module._modules,), _no_more, whole, _BEFORE)
    for name, child in module._modules.items():
        yield _Watched(module._modules, name, child, operator.is_, inner + name, _BEFORE)
    for name, parameter in module._parameters.items():
        yield _Watched(module._parameters, name, parameter, operator.is_, inner + name, _IN_PLACE)
    yield _Watched(attributes, "_parameters", (*module._parameters,), _no_more, whole, _BEFORE)
    if path:
        yield _Watched(
            attributes, "forward", attributes.get("forward", _UNSET), operator.is_, f"{inner}forward", _BEFORE
        )
        for name in _HOOKS:
            yield _Watched(attributes, name, (*attributes[name],), _no_more, path, _ON_THE_WHOLE)
    names = _names(module) - _PLANNED
    for name in names & attributes.keys():
        value = attributes[name]
        # Tensors of inference mode count no writes.
        if isinstance(value, torch.Tensor) and not value.is_inference():
            was = value, value._version
            yield _Watched(attributes, name, was, _as_written, inner + name, _IN_BUFFER)
        elif _comparable(value):
            yield _Watched(attributes, name, _copied(value), _same, inner + name, _AS_ARGUMENT)
        elif not isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType)) and not callable(value):
            fields = getattr(value, "__dict__", {})
            read = [field for field in names & fields.keys() if _comparable(fields[field])]
            if read:
                yield _Watched(attributes, name, value, operator.is_, inner + name, _BEFORE)
            for field in read:
                at = f"{inner}{name}.{field}"
                yield _Watched(fields, field, _copied(fields[field]), _same, at, _AS_ARGUMENT)
    # Attributes, those of the class included, with the `get` of a dict.
    of_class = types.SimpleNamespace(get=functools.partial(getattr, module))
    for name in names - attributes.keys():
        value = next((vars(c)[name] for c in type(module).__mro__ if name in vars(c)), _UNSET)
        plain = type(value) in (*_PLAIN, list, tuple, dict, set, frozenset)
        if plain and not name.startswith("__") and _comparable(value):
            yield _Watched(of_class, name, _copied(value), _same, inner + name, _AS_ARGUMENT)


class Guard:
    """The check that a model stays as it was when it was parallelized."""

    def __init__(self, model: nn.Module):
        self.model = model
        # The modes as captured; everything else is recorded when the engine's parameters are in place.
        self._training = _modes(model)
        self._watched: list[_Watched] = []
        self._of_mode: list[tuple[str, dict[str, Any], bool]] = []
        self._parameters: list[tuple[str, nn.Parameter, int, torch.Tensor, int, bool, int]] = []
        self._storages: list[Any] = []
        self._buffers: list[tuple[str, dict[str, Any], str, Mapping[str, torch.Tensor], str]] = []

    def watch_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record the state that :meth:`check` compares with; ``parameters`` has state-dict keys."""
        for name, module in self.model.named_modules():
            self._watched += _watched(name, module)
            if name and "training" in _names(module):
                self._of_mode.append((name, module.__dict__, self._training[name]))
        for key, parameter in parameters.items():
            local = getattr(parameter, "_local_tensor", parameter)
            # The storage is kept, so that no other storage can get its address.
            storage = parameter.untyped_storage()
            self._storages.append(storage)
            trained, hooks = parameter.requires_grad, _hook_count(parameter)
            self._parameters.append((key, parameter, storage._cdata, local, local.data_ptr(), trained, hooks))

    def watch_buffer(self, key: str, owner: dict[str, Any], attribute: str, buffers: Any, name: str) -> None:
        """Require that the buffer ``key``, at ``owner[attribute]``, stays the engine's ``buffers[name]``."""
        self._buffers.append((key, owner, attribute, buffers, name))

    def check(self) -> None:
        """Check that the plan still describes the model; PlanError if it has changed."""
        # Parameters of a class of their own would be asked for each of their attributes in Python.
        with torch._C.DisableTorchFunctionSubclass():
            self._check()

    def _check(self) -> None:
        for watched in self._watched:
            holder, key, was, alike, _, _ = watched
            if not alike(holder.get(key, _UNSET), was):
                raise watched.refusal()
        for path, attributes, training in self._of_mode:
            runs = self.model.training and training
            if attributes["training"] is not runs:
                words = ("evaluation", "training")
                raise PlanError(
                    f"{path} is in {words[not runs]} mode while the plan runs it in {words[runs]} mode; set "
                    "the modes of single modules before the model is explored and parallelized "
                    "(model.train() and model.eval() of the whole model are followed)"
                )
        for key, parameter, storage, local, address, trained, hooked in self._parameters:
            if parameter.untyped_storage()._cdata != storage or local.data_ptr() != address:
                raise PlanError(
                    f"{key} was given other data after parallelize (p.data = ...), and the plan would keep "
                    "using the old data; write into it (with torch.no_grad(): p.copy_(...))"
                )
            if not trained and parameter.requires_grad:
                raise PlanError(
                    f"{key} requires a gradient now, but was frozen when the model was parallelized, and the "
                    "plan computes none; unfreeze it before the model is explored and parallelized"
                )
            if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and (  # type: ignore[attr-defined]
                _hook_count(parameter) > hooked
            ):
                raise PlanError(
                    f"a hook on the gradient of {key} was added after parallelize, and the plan would never "
                    "call it; change gradients between backward() and the optimizer's step"
                )
        for key, owner, attribute, buffers, name in self._buffers:
            if owner.get(attribute) is not buffers[name]:
                raise PlanError(
                    f"the buffer {key} was replaced after parallelize, and the plan would keep using the "
                    "old one; write into it (.copy_(...))"
                )


def _modes(model: nn.Module) -> dict[str, bool]:
    before = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()  # some modules stay in evaluation by themselves
    modes = {name: module.training for name, module in model.named_modules()}
    for module, mode in before.items():
        module.training = mode
    return modes


def _hook_count(parameter: torch.Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]


# -- moves and conversions -------------------------------------------------------------------------------


def keep_in_place(model: nn.Module, owned: frozenset[str]) -> None:
    """Make ``.to``, ``.cuda``, ``.half`` and the like refuse to change the tensors ``owned`` (by key)."""
    for path, module in model.named_modules():
        module.__dict__["_apply"] = functools.partial(_apply, module, path, owned)


def _apply(
    module: nn.Module, path: str, owned: frozenset[str], fn: Callable[..., Any], recurse: bool = True
) -> nn.Module:
    """Stand in for ``nn.Module._apply``: refuse to change tensors in ``owned``, and convert all others."""
    tensors = list(_tensors(module, path, recurse))
    looked_at: set[tuple[Any, ...]] = set()
    for key, value, _ in tensors:
        kind = (value.dtype, value.device, min(value.dim(), 5))
        if key in owned and kind not in looked_at:
            looked_at.add(kind)
            _refuse_change(key, value, fn)
    for key, value, place in tensors:
        if key not in owned:  # nothing of the plan
            with torch.no_grad():
                changed = fn(value)
            if isinstance(value, nn.Parameter):
                value.data = changed
            else:
                place[key.rpartition(".")[2]] = changed
    return module


def _tensors(
    module: nn.Module, path: str, recurse: bool
) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for name, part in module.named_modules() if recurse else [("", module)]:
        prefix = ".".join(piece for piece in (path, name) if piece)
        for place in (part._parameters, part._buffers):
            for attribute, value in place.items():
                if value is not None:
                    yield (f"{prefix}.{attribute}" if prefix else attribute), value, place


def _refuse_change(key: str, value: torch.Tensor, fn: Callable[..., Any]) -> None:
    """Try a conversion on a small tensor; PlanError if it would change the tensor ``key``."""
    probe = torch.zeros((2,) * min(value.dim(), 5), dtype=value.dtype, device=value.device)
    # A tensor with dims of 1 would keep its layout in any conversion; one with dims of 2 does not.
    converted = fn(probe)
    if converted.dtype != probe.dtype:
        raise PlanError(
            f"{key} is {value.dtype} in the plan, and would become {converted.dtype}; convert the model "
            "before it is explored and parallelized, or explore it with --dtype for mixed precision"
        )
    if _device(converted.device) != _device(probe.device):
        raise PlanError(
            f"{key} is on {value.device}, where the plan runs, and would go to {converted.device}; pass "
            "device= to parallelize, which puts this rank's part there"
        )
    if converted.stride() != probe.stride() or (converted.is_shared() and probe.device.type == "cpu"):
        raise PlanError(
            f"{key} would move, or change its layout in memory, after parallelize; {_BEFORE}, if at all"
        )


def _device(device: torch.device) -> torch.device:
    """Return a device with its index: ``cpu`` equals ``cpu:0``."""
    if device.index is not None or device.type == "meta":
        return device
    return torch.device(device.type, torch.cuda.current_device() if device.type == "cuda" else 0)
