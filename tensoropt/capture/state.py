"""State that forward changes: what a graph can represent is recorded in it, the rest is refused or noted.

A graph gives buffers their new values, and nothing else. Export would silently lose anything that is assigned
to buffers (except the outermost module's), anything that is changed through ``.data``, and whatever a module
keeps outside its buffers (parameters, plain tensors, lists, Python numbers): every step of a plan sees it as
it was at capture. ``exporting.py`` detects changes that operators make internally.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tensoropt.capture.no_grad import codes
from tensoropt.capture.unsupported import asking_frame, current_line
from tensoropt.errors import CaptureError

_LIBRARY = str(Path(torch.__file__).parent)
_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""
_SCALARS = (int, float, complex, bool, str, type(None))
_CONTAINERS = (list, dict, set, tuple)
_LIBRARIES = frozenset({"torch", "transformers", "tensoropt", "numpy", "builtins", "functools"})
"""The libraries whose objects are not inspected."""
_REMEDY = "register it in __init__ with register_buffer if later steps read it"


# -- parameters --------------------------------------------------------------------------------------------


def _changed_parameters(changed: Mapping[str, torch.fx.Node]) -> CaptureError:
    """Return the error to raise for parameters that forward changes, given the nodes of their new values."""
    name, node = next(iter(changed.items()))
    more = f" and {len(changed) - 1} others" if len(changed) > 1 else ""
    renorm = "renorm" in f"{node.target} {node.meta.get('stack_trace')}"
    hint = " (Embedding's max_norm does that: leave it out, and call renorm_ on its weight instead)"
    return CaptureError(
        f"the model changes its parameter {name}{more} in forward, but in a plan only the optimizer changes "
        "parameters, on the ranks that store them. Change it between steps, under torch.no_grad() after "
        f"optimizer.step(){hint if renorm else ''}, or make it a buffer (register_buffer) if it is not "
        "trained"
    )


# -- what modules keep elsewhere ---------------------------------------------------------------------------


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
        reassigned: plain tensors of modules that were replaced.
        notes: notes on what a plan leaves unchanged.
    """

    reassigned: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def check(self, exported: Any, prefix: str) -> None:
        """Refuse parameters that forward changes, and anything that the graph computes from a value at
        capture that forward changes."""
        outputs, signature = exported.graph.output_node().args[0], exported.graph_signature
        changed = {
            spec.target.removeprefix(prefix): node
            for spec, node in zip(signature.output_specs, outputs, strict=True)
            if spec.kind.name == "PARAMETER_MUTATION"
        }
        if changed:
            raise _changed_parameters(changed)
        for spec in exported.graph_signature.input_specs:
            if spec.kind.name == "CONSTANT_TENSOR" and spec.target in self.reassigned:
                raise _plain_tensor(spec.target.removeprefix(prefix))


def _plain_tensor(name: str) -> CaptureError:
    return CaptureError(
        f"the model changes its tensor {name} in forward, but it is neither a buffer nor a "
        f"parameter, so every step of a plan would see it as it was at capture; {_REMEDY}"
    )


@contextlib.contextmanager
def watched(subject: nn.Module, prefix: str) -> Iterator[_Changes]:
    """While open, watch how runs of a model's forward change what modules keep outside buffers.

    ``.data`` is read and set in a way that export can see.

    Args:
        subject: the exported module.
        prefix: the prefix of the model's own names among those of ``subject``.

    Raises:
        CaptureError: forward makes or replaces a parameter, makes a buffer, or changes a plain tensor.
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
        _compare(before, _state(subject), modules, changes, prefix)
        _write_exchanged(before, modules)
        return result

    with mock.patch.object(type(subject), "forward", run), _Data(subject):
        try:
            yield changes
        except RuntimeError as error:
            if isinstance(error, CaptureError) or not (
                name := re.search(r"Constant (\S+) is mutated", str(error))
            ):
                raise
            anonymous = name[1].startswith("lifted_tensor")
            place = "in a list or variable" if anonymous else name[1].removeprefix(prefix)
            raise _plain_tensor(place) from error


def _state(model: nn.Module) -> dict[_Place, _Kept]:
    state: dict[_Place, _Kept] = {}
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for name, value in vars(module)[kind].items():
                state[_Place(path, name)] = _Kept(kind, value)
        for name, value in vars(module).items():
            if name not in _MODULE and not isinstance(value, nn.Module):
                state[_Place(path, name)] = _Kept("attribute", value, _content(value))
    return state


def _content(value: Any, depth: int = 2) -> Any:
    """Return the comparable content of a value that may be changed in place."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, torch.Tensor) or depth == 0:
        return id(value)
    if isinstance(value, dict):
        return [(repr(key)[:100], _content(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, _CONTAINERS):
        return [_content(item, depth - 1) for item in value]
    # An object of the model's own: its fields.
    if type(value).__module__.split(".")[0] in _LIBRARIES:
        return id(value)
    return [(name, _content(item, 0)) for name, item in getattr(value, "__dict__", {}).items()]


def _compare(
    before: Mapping[_Place, _Kept],
    after: Mapping[_Place, _Kept],
    modules: Mapping[str, nn.Module],
    changes: _Changes,
    prefix: str,
) -> None:
    alike: dict[tuple[type, str], list[tuple[_Place, _Kept | None]]] = {}
    for place, current in after.items():
        was, module = before.get(place), modules[place.module]
        if was is not None and was.value is current.value and was.content == current.content:
            continue
        shown = str(place).removeprefix(prefix)
        if current.kind == "_parameters":
            raise CaptureError(
                f"the model makes its parameter {shown} in forward, where no optimizer knows it; make it in "
                "__init__, and change it between steps only"
            )
        if current.kind == "_buffers":
            if was is None:
                del vars(module)["_buffers"][place.name]
            _check_buffer(shown, None if was is None else was.value, current.value)
            continue
        if was is not None and isinstance(was.value, torch.Tensor):
            # A value that is overwritten before it is read (weights that hooks compute) carries nothing over.
            changes.reassigned.add(str(place))
        elif _carries_over(type(module), place.name, was, current):
            alike.setdefault((type(module), place.name), []).append((place, was))
    changes.notes += [_note(same_changes, prefix) for same_changes in alike.values()]


def _check_buffer(name: str, previous: torch.Tensor | None, current: torch.Tensor | None) -> None:
    if previous is None or current is None:
        raise CaptureError(
            f"the model makes its buffer {name} in forward, so that the next step finds another model; "
            "give it a tensor in __init__ (register_buffer)"
        )
    if previous.shape != current.shape or previous.dtype != current.dtype:
        shapes = (
            f"{list(current.shape)} of {current.dtype} instead of {list(previous.shape)} of {previous.dtype}"
        )
        raise CaptureError(
            f"the model gives its buffer {name} another shape or type in forward ({shapes}), so that "
            "the next step finds another model; keep both, with padding where a part is empty"
        )


def _write_exchanged(before: Mapping[_Place, _Kept], modules: Mapping[str, nn.Module]) -> None:
    """Write what forward has assigned to buffers into the original tensors, and put these back.

    Export tracks writes, and of assignments only those of the outermost module. At the end of forward nothing
    reads the old values any more.
    """
    exchanged = []
    for place, was in before.items():
        buffers = vars(modules[place.module])["_buffers"] if was.kind == "_buffers" else {}
        current = buffers.get(place.name)
        if current is not None and was.value is not None and current is not was.value:
            # A copy, because it may be another buffer's old value.
            exchanged.append((buffers, place.name, was.value, current.detach().clone()))
    for buffers, name, value, new in exchanged:
        value.copy_(new)
        buffers[name] = value


def _carries_over(owner: type, name: str, previous: _Kept | None, current: _Kept) -> bool:
    """Return whether the next forward may depend on what this one leaves behind."""
    # A newly made container carries over no more than a number that is set.
    in_place = previous is not None and previous.value is current.value
    loads = _loads(owner)
    return in_place or name in loads


@cache
def _loads(owner: type) -> frozenset[str]:
    """Return the attributes that a class's methods (except ``__init__``) read."""
    kinds = [kind for kind in owner.__mro__ if kind.__module__.split(".")[0] not in ("torch", "builtins")]
    members = [getattr(m, "fget", m) for kind in kinds for n, m in vars(kind).items() if n != "__init__"]
    functions = [inspect.unwrap(member) for member in members if inspect.isfunction(member)]
    return frozenset(
        read.argval
        for function in functions
        for code in codes(function.__code__)
        for read in dis.get_instructions(code)
        if read.opname in ("LOAD_ATTR", "LOAD_METHOD")
    )


def _note(same_changes: list[tuple[_Place, _Kept | None]], prefix: str) -> str:
    place, previous = same_changes[0]
    more = f" and {len(same_changes) - 1} others alike" if len(same_changes) > 1 else ""
    value = "" if previous is None or not isinstance(previous.value, _SCALARS) else f" ({previous.value!r})"
    return (
        f"forward changes {str(place).removeprefix(prefix)}{more}, which is no buffer: every step of a plan "
        f"finds it as it was at capture{value}; {_REMEDY}"
    )


class _Data(TorchFunctionMode):
    """A mode that turns ``.data`` into operators, because it bypasses autograd and is invisible to export: a
    read becomes ``detach``, a write becomes a copy without gradient."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_GET, _SET) and _is_the_models():
            return args[0].detach() if func == _GET else self._set(*args)
        return func(*args, **(kwargs or {}))

    def _set(self, changed: torch.Tensor, value: torch.Tensor) -> None:
        stored = (*self.model.parameters(), *self.model.buffers())
        alike = changed.shape == value.shape and changed.dtype == value.dtype
        if not alike or not any(changed is tensor for tensor in stored):
            assignment = "a tensor that is no buffer" if alike else "a tensor to one of another shape or type"
            raise CaptureError(
                f"the model sets .data of {assignment} at {current_line()}, which a graph cannot hold; "
                "compute a new tensor instead, and detach() whatever should have no gradient"
            )
        with torch.no_grad():
            changed.copy_(value)


_GET, _SET = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _is_the_models() -> bool:
    """Return whether the current caller of PyTorch is the model's code, or that of PyTorch's modules."""
    frame = asking_frame()
    file = "" if frame is None else frame.f_code.co_filename
    return not file.startswith(_LIBRARY) or file.startswith(f"{_LIBRARY}/nn/")
