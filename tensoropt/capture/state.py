"""Checks of state that forward changes: new values of buffers become results of the graph; other changes are
refused or noted.

Export would silently lose assignments to buffers (except the outermost module's), changes through ``.data``,
and changes of a module's other state (parameters, plain tensors, lists, Python numbers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tensoropt.errors import CaptureError

_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_LIBRARIES = frozenset({"torch", "transformers", "tensoropt", "numpy", "builtins", "functools"})
"""The libraries whose objects are not inspected."""
_REMEDY = "register it in __init__ with register_buffer if later steps read it"


class _Place(NamedTuple):
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass
class _Kept:
    kind: str
    value: Any
    content: Any = None


@dataclass
class _Changes:
    """The changes that one run of the model's forward makes to the state of its modules.

    Attributes:
        reassigned: names of plain tensors (neither buffers nor parameters) that forward replaced.
        notes: notes for the user on state that a plan leaves unchanged.
    """

    reassigned: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def check(self, exported: Any, prefix: str) -> None:
        """Raise :class:`CaptureError` if forward changes a parameter, or a plain tensor that the graph has as
        a constant."""
        for spec in exported.graph_signature.output_specs:
            if spec.kind.name == "PARAMETER_MUTATION":
                name = spec.target.removeprefix(prefix)
                raise CaptureError(
                    f"the model changes its parameter {name} in forward, but in a plan only the optimizer "
                    "changes parameters, on the ranks that store them. Change it between steps, under "
                    "torch.no_grad() after optimizer.step() (for an Embedding's max_norm: renorm_), "
                    "or make it a buffer (register_buffer) if it is not trained"
                )
        for spec in exported.graph_signature.input_specs:
            if spec.kind.name == "CONSTANT_TENSOR" and spec.target in self.reassigned:
                raise plain_tensor_changed(spec.target.removeprefix(prefix))


def plain_tensor_changed(name: str) -> CaptureError:
    """Return the error to raise for a tensor that forward changes although no state dict contains it."""
    place = "in a list or variable" if name.startswith("lifted_tensor") else name
    return CaptureError(
        f"the model changes its tensor {place} in forward, but it is neither a buffer nor a "
        f"parameter, so every step of a plan would see it as it was at capture; {_REMEDY}"
    )


@contextlib.contextmanager
def watched(subject: nn.Module, prefix: str) -> Iterator[_Changes]:
    """While open, record how a model's forward changes the state of its modules.

    Reads and writes of ``.data`` become operators that export can represent.

    Args:
        subject: the exported module.
        prefix: prefix of names in ``subject`` that is removed to get the user's own names.

    Raises:
        CaptureError: forward makes a buffer, or gives a buffer another shape or dtype.
    """
    changes = _Changes()
    forward = type(subject).forward

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if vars(module) is not vars(subject):
            return forward(module, *args, **kwargs)
        changes.reassigned.clear()
        changes.notes.clear()
        before = _state(subject)
        result = forward(module, *args, **kwargs)
        modules = dict(subject.named_modules())
        for place, current in _state(subject).items():
            was = before.get(place)
            if was is None or was.value is not current.value or was.content != current.content:
                _compare(place, was, current, modules[place.module], changes, prefix)
        _write_exchanged(before, modules)
        return result

    with mock.patch.object(type(subject), "forward", run), _Data(subject):
        yield changes


def _state(model: nn.Module) -> dict[_Place, _Kept]:
    state: dict[_Place, _Kept] = {}
    for path, module in model.named_modules():
        for name, value in vars(module)["_buffers"].items():
            state[_Place(path, name)] = _Kept("buffer", value)
        for name, value in vars(module).items():
            if name not in _MODULE and not isinstance(value, nn.Module):
                state[_Place(path, name)] = _Kept("attribute", value, _content(value))
    return state


def _content(value: Any, depth: int = 2) -> Any:
    """Return the content of a value, to detect changes in place; containers are read to ``depth`` levels."""
    if isinstance(value, (int, float, complex, bool, str, type(None))):
        return repr(value)
    if isinstance(value, torch.Tensor) or depth == 0:
        return id(value)
    if isinstance(value, dict):
        return [(repr(key)[:100], _content(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, (list, set, tuple)):
        return [_content(item, depth - 1) for item in value]
    # An object of the model's own: its fields.
    if type(value).__module__.split(".")[0] in _LIBRARIES:
        return id(value)
    return [(name, _content(item, 0)) for name, item in getattr(value, "__dict__", {}).items()]


def _compare(
    place: _Place, was: _Kept | None, current: _Kept, module: nn.Module, changes: _Changes, prefix: str
) -> None:
    shown = str(place).removeprefix(prefix)
    previous = None if was is None else was.value
    if current.kind == "buffer":
        if was is None:
            del vars(module)["_buffers"][place.name]
        old, new = (None if v is None else (v.shape, v.dtype) for v in (previous, current.value))
        if old is None or old != new:
            raise CaptureError(
                f"the model makes its buffer {shown} in forward, or gives it another shape or type, so that "
                "the next step would need another graph; give it a tensor of the final shape in __init__ "
                "(register_buffer), with padding where a part is empty"
            )
    elif isinstance(previous, torch.Tensor):
        # A value that is overwritten before it is read (weights that hooks compute) carries nothing over.
        changes.reassigned.add(str(place))
    elif was is not None and not isinstance(current.value, torch.Tensor):
        value = f" ({previous!r})" if isinstance(previous, (int, float, str)) else ""
        changes.notes.append(
            f"forward changes {shown}, which is no buffer: every step of a plan finds it as it was at "
            f"capture{value}; {_REMEDY}"
        )


def _write_exchanged(before: Mapping[_Place, _Kept], modules: Mapping[str, nn.Module]) -> None:
    """Copy tensors that forward assigned to buffers into the original tensors, which become buffers again.

    Export tracks writes into tensors, but assignments only in the outermost module. Nothing reads the old
    values after the end of forward.
    """
    exchanged = []
    for place, was in before.items():
        buffers = vars(modules[place.module])["_buffers"] if was.kind == "buffer" else {}
        current = buffers.get(place.name)
        if current is not None and was.value is not None and current is not was.value:
            # A copy, because it may be another buffer's old value.
            exchanged.append((buffers, place.name, was.value, current.detach().clone()))
    for buffers, name, value, new in exchanged:
        value.copy_(new)
        buffers[name] = value


class _Data(TorchFunctionMode):
    """A mode that turns uses of ``.data``, which export does not see, into operators: a read becomes
    ``detach``, and a write becomes a copy without gradient."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (_GET, _SET):
            return func(*args, **(kwargs or {}))
        if func == _GET:
            return args[0].detach()
        changed, value = args
        stored = (*self.model.parameters(), *self.model.buffers())
        alike = changed.shape == value.shape and changed.dtype == value.dtype
        if not alike or not any(changed is tensor for tensor in stored):
            raise CaptureError(
                "the model sets .data of a tensor that is neither a parameter nor a buffer, or sets it to a "
                "value of another shape or type, which a graph cannot represent; compute a new tensor "
                "instead, and detach() the parts that should have no gradient"
            )
        with torch.no_grad():
            changed.copy_(value)
        return None


_GET, _SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
