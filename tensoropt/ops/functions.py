"""A model's own ``torch.autograd.Function`` classes as operators, which are never split.

The name of such an operator is the class's name with a hash of its code and non-tensor arguments, in the
namespace ``tensoropt_functions``.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tensoropt.errors import CaptureError
from tensoropt.ops.overloads import FUNCTIONS

_LIBRARY = torch.library.Library(FUNCTIONS, "FRAGMENT")
_SIMPLE = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout,
)  # fmt: skip


class NotConstant(Exception):  # noqa: N818 - says what an argument is; capture makes an error of it
    """Raised for an argument that cannot be written as a text which is equal in every process."""


@dataclass(frozen=True)
class Slot:
    """The position of a tensor among a function's arguments or results."""

    index: int


@dataclass
class FunctionCall:
    """A call of a ``torch.autograd.Function``, without its tensors.

    Attributes:
        leaves, spec: leaves and structure of the arguments' pytree, with a :class:`Slot` for each tensor.
        results: results of the call, with a :class:`Slot` for each tensor.
        single: whether the function returns one value, and not a tuple.
    """

    cls: type[torch.autograd.Function]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[Any] = ()
    single: bool = True

    @property
    def tensors(self) -> int:
        return sum(isinstance(leaf, Slot) for leaf in self.leaves)

    def run(self, tensors: Sequence[Any]) -> Any:
        """Call the function with ``tensors`` in place of the slots."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in self.leaves]
        return apply(self.cls, *pytree.tree_unflatten(leaves, self.spec))

    def returned(self, made: Sequence[torch.Tensor]) -> Any:
        """Return the function's result, with the tensors ``made`` in place of the slots."""
        results = [made[value.index] if isinstance(value, Slot) else value for value in self.results]
        return results[0] if self.single else tuple(results)

    def tensors_of(self, result: Any) -> list[torch.Tensor]:
        results = [result] if self.single else list(result)
        return [value for value, kept in zip(results, self.results, strict=True) if isinstance(kept, Slot)]


_calls: dict[str, FunctionCall] = {}
"""The last captured call by operator name; all calls of one name have equal code and constants."""


def _in_python(in_c: Any) -> Any:
    __class__ = in_c  # a closure cell that the code put in its place has, too: capture/custom_functions.py

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return __class__.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)


if not hasattr(torch.autograd.Function.apply, "__func__"):
    # From PyTorch 2.14 on it is written in C. Nothing can take the place of what `round = Round.apply` in a
    # model's file then holds, unless it holds a method in Python, as before.
    torch.autograd.Function.apply = _in_python(  # type: ignore[method-assign]
        torch.autograd.Function.__dict__["apply"]
    )
_ORIGINAL = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
apply: Callable[..., Any] = types.FunctionType(
    _ORIGINAL.__code__, _ORIGINAL.__globals__, "apply", None, _ORIGINAL.__closure__
)
"""PyTorch's own ``Function.apply``, which is also there while capture replaces it."""

_tracing = False


def set_tracing(tracing: bool) -> bool:
    """Set whether autograd sees each such operator as one node, as a trace needs; return the former value."""
    global _tracing
    before, _tracing = _tracing, tracing
    return before


class _TracedOperator(torch.autograd.Function):
    """An operator in a trace, whose gradients are never computed."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *tensors: torch.Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise CaptureError(
            "forward differentiates the result of a torch.autograd.Function, but a captured graph has one "
            "backward, that of the loss; remove the gradient penalty from forward, or do not differentiate "
            "through the function"
        )


def operator_of(call: FunctionCall) -> Any:
    """Return the operator for a call; raise NotConstant if its code or arguments have no comparable text."""
    words = re.sub(r"\W", "_", call.cls.__qualname__.replace("<locals>", "")).strip("_")
    name = f"{re.sub('_+', '_', words)}_{_digest(call)}"
    if name not in _calls:
        _define(name, call)
    _calls[name] = call
    return getattr(getattr(torch.ops, FUNCTIONS), name).default


def _define(name: str, call: FunctionCall) -> None:
    operands = ", ".join(f"Tensor t{index}" for index in range(call.tensors))
    count = sum(isinstance(value, Slot) for value in call.results)
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    _LIBRARY.define(f"{name}({operands}) -> {results}")

    def run(*tensors: torch.Tensor) -> Any:
        current_call = _calls[name]
        made = current_call.tensors_of(current_call.run(tensors))
        return made[0] if len(made) == 1 else tuple(made)

    def fake(*tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            made = run(*tensors)
        # In its own memory: for a trace, an operator's result is not a view of what it reads.
        own = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in ([made] if count == 1 else made)
        ]
        return own[0] if count == 1 else tuple(own)

    def differentiated(*tensors: torch.Tensor) -> Any:
        if not _tracing:
            return run(*tensors)
        return apply(_TracedOperator, getattr(getattr(torch.ops, FUNCTIONS), name).default, *tensors)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, differentiated, "Autograd")
    torch.library.register_fake(f"{FUNCTIONS}::{name}", fake, lib=_LIBRARY)


# -- names ----------------------------------------------------------------------------------------


def _digest(call: FunctionCall) -> str:
    results = [value if isinstance(value, Slot) else _constant_text(value) for value in call.results]
    arguments = [leaf if isinstance(leaf, Slot) else _constant_text(leaf) for leaf in call.leaves]
    structure = re.sub(r" at 0x[0-9a-f]+", "", repr(call.spec))
    payload = repr((list(_code_of(call.cls)), arguments, structure, results, call.single))
    return hashlib.sha256(payload.encode()).hexdigest()[:8]


def _constant_text(value: Any) -> str:
    """Return a text for a constant that is equal in every process; raise NotConstant if there is none."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_constant_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_constant_text(k)}: {_constant_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType, torch._ops.OpOverload)):
        return getattr(value, "__qualname__", getattr(value, "__name__", str(value)))
    if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
        return repr(list(_function_text(getattr(value, "__func__", value))))
    if is_dataclass(value) and not isinstance(value, type):
        values = (_constant_text(getattr(value, field.name)) for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(values)})"
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return repr(value)
    raise NotConstant(f"a {type(value).__qualname__}")


_OF_EVERY_CLASS = frozenset({
    "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__",
    "__static_attributes__", "_backward_cls", "_autograd_function_id", "_compiled_autograd_key",
})  # fmt: skip
"""Attributes that Python and PyTorch create for every class, and that do not affect its results."""


def _code_of(cls: type) -> Iterator[str]:
    """Yield the code of a class and of its bases as text, up to ``torch.autograd.Function``."""
    for base in cls.__mro__:
        if base is torch.autograd.Function:
            return
        yield base.__qualname__
        for name, value in vars(base).items():
            if name in _OF_EVERY_CLASS:
                continue
            try:
                yield f"{name}={_constant_text(value)}"
            except NotConstant as what:
                raise NotConstant(f"{what} as {name} of the class") from None


def _function_text(function: Any) -> Iterator[str]:
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        raise NotConstant(f"a {type(function).__qualname__}")
    yield from _code_text(code)
    for value in (getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)):
        yield _constant_text(value)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":
            continue
        try:
            yield f"{name}={_constant_text(cell.cell_contents)}"
        except ValueError:
            continue  # not filled yet
        except NotConstant as what:
            raise NotConstant(f"{what} called {name} in its closure") from None


def _code_text(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames[: code.co_argcount]))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_text(constant)
        else:
            yield repr(sorted(constant, key=repr)) if isinstance(constant, frozenset) else repr(constant)
