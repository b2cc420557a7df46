"""Refuse changes of a parallelized model that its plan does not follow, such as a new module or hook."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensoropt.capture.no_grad import names_read
from tensoropt.errors import PlanError

_PLANNED = frozenset(
    {*vars(nn.Module()), "gradient_checkpointing", "_gradient_checkpointing_func", "use_cache"}
)
"""Attributes that forward reads and that are not compared, as the plan itself decides them."""
_OF_CHECKPOINTING = "make_inputs_require_grads"
"""The hook by which transformers and peft make inputs of checkpointed blocks require a gradient."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)


def _names(module: nn.Module) -> frozenset[str]:
    cls: Any = type(module)  # a key of the cache, which mypy does not take a class for
    return names_read(cls)


def reads(module: nn.Module, name: str) -> bool:
    return name in _names(module)


def _settings_of(module: nn.Module) -> dict[str, Any]:
    names = _names(module) - _PLANNED
    # NaN is no value that could be compared.
    return {n: _copied(v) for n, v in module.__dict__.items() if n in names and _comparable(v) and v == v}


def _plain_tensors(module: nn.Module) -> tuple[tuple[str, torch.Tensor, int], ...]:
    names = _names(module) - _PLANNED
    tensors = ((n, v) for n, v in module.__dict__.items() if n in names and isinstance(v, torch.Tensor))
    # Tensors of inference mode count no writes.
    return tuple((n, v, v._version) for n, v in tensors if not v.is_inference())


def _objects_of(module: nn.Module) -> dict[str, tuple[Any, dict[str, Any]]]:
    names = _names(module) - _PLANNED
    objects = {}
    for name, value in module.__dict__.items():
        if name not in names or isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType)):
            continue
        if _comparable(value) or not hasattr(value, "__dict__") or callable(value):
            continue
        settings = {
            n: _copied(v) for n, v in vars(value).items() if n in names and _comparable(v) and same(v, v)
        }
        if settings:
            objects[name] = value, settings
    return objects


def _of_class(module: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for base in type(module).__mro__:
        if base in nn.Module.__mro__ or base.__module__.startswith("torch."):
            continue
        for name, value in vars(base).items():
            if name in _names(module) and name not in module.__dict__ and name not in settings:
                plain = type(value) in (*_PLAIN, list, tuple, dict, set, frozenset)
                if plain and not name.startswith("__") and _comparable(value) and same(value, value):
                    settings[name] = _copied(value)
    return {name: value for name, value in settings.items() if name not in _PLANNED}


def _comparable(value: Any) -> bool:
    if type(value) is dict:
        return all(_comparable(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_comparable, value))
    return type(value) in _PLAIN or (
        isinstance(value, _FUNCTIONS) and not isinstance(getattr(value, "__self__", None), nn.Module)
    )


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_copied, value))
    return value


def same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except RuntimeError:  # a tensor
        return False


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = getattr(value, "__name__", None)
    return str(name) if name else repr(value)


_BEFORE = "do it before parallelize"


@dataclass(frozen=True)
class _Part:
    """One module of the model as captured.

    Attributes:
        children, parameters: its own; parameters by identity.
        hooks: their number.
        forward: its instance attribute of that name, if any.
        settings: numbers, strings and functions that forward reads, by name.
        tensors: plain tensors that forward reads, by name, with their versions.
        objects: numbers that forward reads of an object (a config), by the object's name.
        classes: attributes of its class that it reads, which no own attribute may shadow.
        read: reads all of these; None if there are none.
        sensitive: whether forward depends on the mode.
        training: the mode in which it was captured.
    """

    name: str
    module: nn.Module
    children: tuple[nn.Module | None, ...]
    parameters: list[int]
    hooks: int
    forward: Any
    settings: Mapping[str, Any]
    tensors: tuple[tuple[str, torch.Tensor, int], ...]
    objects: Mapping[str, tuple[Any, Mapping[str, Any]]]
    classes: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Any] | None
    sensitive: bool
    training: bool


class Guard:
    """The check that a model stays as it was when it was parallelized."""

    def __init__(self, model: nn.Module):
        self.model = model
        # The modes as captured; everything else is recorded when the engine's parameters are in place.
        self._training = _modes(model)
        # Each part with the dicts of its module, which stay the same: every call goes through this list.
        self._parts: list[tuple[_Part, Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._parameters: list[tuple[str, nn.Parameter, int, torch.Tensor, int, bool, int]] = []
        self._storages: list[Any] = []
        self._buffers: list[tuple[str, dict[str, Any], str, Mapping[str, torch.Tensor], str]] = []

    # -- the recorded state -------------------------------------------------------------------------

    def watch_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Begin the check, with the parameters that stand for the engine's, by state-dict key."""
        for name, module in self.model.named_modules():
            settings = _settings_of(module)
            part = _Part(
                name,
                module,
                tuple(module._modules.values()),
                [*map(id, module._parameters.values())],
                sum(map(len, _hooks(module))),
                module.__dict__.get("forward"),
                settings,
                _plain_tensors(module),
                _objects_of(module),
                _of_class(module),
                operator.itemgetter(*settings) if settings else None,
                reads(module, "training") and bool(name),
                self._training[name],
            )
            dicts = module._modules, module._parameters, _hooks(module), module.__dict__
            self._parts.append((part, *dicts))
        for key, parameter in parameters.items():
            local = getattr(parameter, "_local_tensor", parameter)
            # The storage is kept, so that no other storage can get its address.
            storage = parameter.untyped_storage()
            self._storages.append(storage)
            trained, hooks = parameter.requires_grad, _hook_count(parameter)
            self._parameters.append((key, parameter, storage._cdata, local, local.data_ptr(), trained, hooks))

    def watch_buffer(self, key: str, owner: dict[str, Any], attribute: str, buffers: Any, name: str) -> None:
        """Require that a buffer of the model is the engine's ``buffers[name]``."""
        self._buffers.append((key, owner, attribute, buffers, name))

    # -- changes --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the plan still describes the model; PlanError if it has changed."""
        # Parameters of a class of their own would be asked for each of their attributes in Python.
        with torch._C.DisableTorchFunctionSubclass():
            self._check()

    def _check(self) -> None:
        mode = self.model.training
        for part, children, parameters, hooks, attributes in self._parts:
            if (*children.values(),) != part.children:
                raise self._of_children(part)
            if [*map(id, parameters.values())] != part.parameters:
                raise self._of_parameters(part)
            if any(hooks) and sum(map(len, hooks)) > part.hooks and part.name:
                raise self._of_hooks(part, hooks)
            if attributes.get("forward") is not part.forward and part.name:
                raise PlanError(
                    f"the forward of {part.name} was replaced after parallelize, and the plan would never "
                    f"call it; {_BEFORE}"
                )
            if part.read is not None and self._differs(part):
                raise self._of_settings(part)
            for attribute, tensor, version in part.tensors:
                if attributes.get(attribute) is not tensor or tensor._version != version:
                    raise self._of_tensor(part, attribute)
            for holder, (value, settings) in part.objects.items():
                if attributes.get(holder) is not value or any(
                    not same(value.__dict__.get(name, self), was) for name, was in settings.items()
                ):
                    raise self._of_object(part, holder)
            if part.classes:
                self._check_class(part)
            if part.sensitive and attributes["training"] is not self._mode_of(part, mode):
                raise self._of_mode(part)
        for key, parameter, storage, local, address, trained, hooked in self._parameters:
            if parameter.untyped_storage()._cdata != storage or local.data_ptr() != address:
                raise PlanError(
                    f"{key} was given other data after parallelize (p.data = ...), and the plan would keep "
                    "using the old data; write into it (with torch.no_grad(): p.copy_(...))"
                )
            if not trained and parameter.requires_grad:
                raise PlanError(
                    f"{key} requires a gradient now, but was frozen when the model was parallelized, and the "
                    "plan makes none; unfreeze it before the model is explored and parallelized"
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

    @staticmethod
    def _differs(part: _Part) -> bool:
        assert part.read is not None
        try:
            return bool(part.read(part.module.__dict__) != part.read(part.settings))
        except (KeyError, RuntimeError):  # it was deleted, or is a tensor now
            return True

    @staticmethod
    def _mode_of(part: _Part, mode: bool) -> bool:
        return mode and part.training

    def _of_children(self, part: _Part) -> PlanError:
        children = dict(zip(part.module._modules, part.module._modules.values(), strict=True))
        new = next((n for n, c in children.items() if all(c is not child for child in part.children)), None)
        prefix = f"{part.name}." if part.name else ""
        change = f"{prefix}{new} was added to the model"
        if not new:
            change = f"a module of {part.name or 'the model'} was removed"
        return PlanError(
            f"{change} after parallelize (a new layer or head, peft, quantisation, a parametrisation), and "
            f"the plan would run the model without this change; {_BEFORE}"
        )

    def _of_hooks(self, part: _Part, hooks: tuple[Mapping[int, Any], ...]) -> PlanError:
        names = {getattr(hook, "__name__", "") for each in hooks for hook in each.values()}
        if _OF_CHECKPOINTING in names:
            return PlanError(
                f"gradient checkpointing was switched on after parallelize, with a hook on {part.name}, but "
                "the plan decides what is recomputed; leave gradient_checkpointing_enable() and "
                "enable_input_require_grads() out"
            )
        return PlanError(
            f"a hook was added to {part.name} after parallelize, and the plan would never call it; add it "
            "before parallelize, or to the model as a whole, whose own hooks are called"
        )

    def _of_parameters(self, part: _Part) -> PlanError:
        parameters = part.module._parameters
        new = [name for name, value in parameters.items() if id(value) not in part.parameters]
        name = f"{part.name}.{new[0]}" if part.name and new else (new[0] if new else part.name)
        if not new:
            return PlanError(f"a parameter of {name} was removed after parallelize; {_BEFORE}")
        return PlanError(
            f"{name} is another parameter than when the model was parallelized "
            "(load_state_dict(assign=True), an assignment, a conversion), and the plan would never train it; "
            f"{_BEFORE}, or write into it (load_state_dict without assign, or with torch.no_grad(): "
            "p.copy_(...))"
        )

    def _of_settings(self, part: _Part) -> PlanError:
        attributes = part.module.__dict__
        name = next(
            n for n in part.settings if n not in attributes or not same(attributes[n], part.settings[n])
        )
        current, captured = _shown(attributes.get(name)), _shown(part.settings[name])
        return PlanError(
            f"{part.name + '.' if part.name else ''}{name} is {current} now, but was {captured} when the "
            f"model was parallelized, and the plan would keep using the old value; {_BEFORE}, or pass what "
            "changes as an argument of the call"
        )

    def _of_object(self, part: _Part, owner: str) -> PlanError:
        value, settings = part.objects[owner]
        path = f"{part.name + '.' if part.name else ''}{owner}"
        current = part.module.__dict__.get(owner)
        if current is not value:
            return PlanError(
                f"{path} is another {type(value).__name__} than when the model was parallelized, and the "
                f"plan would keep using the old value; {_BEFORE}"
            )
        name = next(n for n, captured in settings.items() if not same(value.__dict__.get(n, self), captured))
        shown_now, captured = _shown(value.__dict__.get(name)), _shown(settings[name])
        return PlanError(
            f"{path}.{name} is {shown_now} now, but was {captured} when the model was parallelized, and the "
            f"plan would keep using the old value; {_BEFORE}, or pass what changes as an argument of the call"
        )

    @staticmethod
    def _check_class(part: _Part) -> None:
        for name, captured in part.classes.items():
            current = getattr(part.module, name, None)
            if not same(current, captured):
                kind = type(part.module).__name__
                raise PlanError(
                    f"{part.name + '.' if part.name else ''}{name} is {_shown(current)} now, but was "
                    f"{_shown(captured)} (an attribute of {kind}) when the model was parallelized, and the "
                    f"plan would keep using the old value; {_BEFORE}, or pass what changes as an argument of "
                    "the call"
                )

    def _of_tensor(self, part: _Part, name: str) -> PlanError:
        return PlanError(
            f"the tensor {part.name + '.' if part.name else ''}{name} was changed or replaced after "
            f"parallelize, and the plan would keep using the old one; {_BEFORE}, or make it a buffer "
            "(register_buffer) and write into that"
        )

    def _of_mode(self, part: _Part) -> PlanError:
        words = ("evaluation", "training")
        runs = self._mode_of(part, self.model.training)
        return PlanError(
            f"{part.name} is in {words[part.module.training]} mode while the plan runs it in {words[runs]} "
            "mode; set the modes of single modules before the model is explored and parallelized "
            "(model.train() and model.eval() of the whole model are followed)"
        )


# -- the mode and the hooks of modules ----------------------------------------------------------------------


def _modes(model: nn.Module) -> dict[str, bool]:
    before = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()  # some modules stay in evaluation by themselves
    modes = {name: module.training for name, module in model.named_modules()}
    for module, mode in before.items():
        module.training = mode
    return modes


def _hooks(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _hook_count(parameter: torch.Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]


# -- moves and conversions -------------------------------------------------------------------------------


def keep_in_place(model: nn.Module, owned: frozenset[str]) -> None:
    """Make ``.to``, ``.cuda``, ``.half`` and the like refuse to convert or move these tensors."""
    for path, module in model.named_modules():
        module.__dict__["_apply"] = functools.partial(_apply, module, path, owned)


def _apply(
    module: nn.Module, path: str, owned: frozenset[str], fn: Callable[..., Any], recurse: bool = True
) -> nn.Module:
    """Replace ``nn.Module._apply`` for a parallelized model."""
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
    """Raise a PlanError if a conversion would change the tensor ``key``; it is tried on a small tensor."""
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
