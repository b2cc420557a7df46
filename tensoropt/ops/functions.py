"""Functions with a backward of their own (``torch.autograd.Function``) as operators, each kept whole.

A graph knows such a call by a target of the namespace ``tensoropt_functions``: the class's name and a hash of
its code and of the arguments that are no tensors, so that every process that captures the same model gives
it the same name. The operator calls the class itself; autograd gets the class's own backward.
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
    """A value that two processes cannot be told to have alike."""


@dataclass(frozen=True)
class Place:
    """Where a tensor goes among the arguments, or comes from among the results, of a function."""

    index: int


@dataclass
class FunctionCall:
    """A call of a function with everything but its tensors.

    Attributes:
        cls: the class that is called.
        leaves, spec: pytree of its arguments, a :class:`Place` for each tensor.
        results: its results, a :class:`Place` for each tensor.
        single: whether it returns its result itself, not a tuple.
    """

    cls: type[torch.autograd.Function]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[Any] = ()
    single: bool = True

    @property
    def tensors(self) -> int:
        """How many tensors it reads."""
        return sum(isinstance(leaf, Place) for leaf in self.leaves)

    def run(self, tensors: Sequence[Any]) -> Any:
        """What the function itself returns for these tensors; autograd takes its own backward."""
        leaves = [tensors[leaf.index] if isinstance(leaf, Place) else leaf for leaf in self.leaves]
        return apply(self.cls, *pytree.tree_unflatten(leaves, self.spec))

    def returned(self, made: Sequence[torch.Tensor]) -> Any:
        """What the function returns, from the tensors among its results."""
        results = [made[value.index] if isinstance(value, Place) else value for value in self.results]
        return results[0] if self.single else tuple(results)

    def tensors_of(self, result: Any) -> list[torch.Tensor]:
        """The tensors among the results of a call."""
        results = [result] if self.single else list(result)
        return [value for value, kept in zip(results, self.results, strict=True) if isinstance(kept, Place)]


_calls: dict[str, FunctionCall] = {}
"""By the operator's name. The last one that was captured counts: its code and constants are those of the ones
before, or its name would be another one."""

_ORIGINAL = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
apply: Callable[..., Any] = types.FunctionType(
    _ORIGINAL.__code__, _ORIGINAL.__globals__, "apply", None, _ORIGINAL.__closure__
)
"""``Function.apply`` as PyTorch has it, also while capture puts another one in its place."""

_tracing = False


def set_tracing(tracing: bool) -> bool:
    """Keep the operators whole under autograd, as a trace needs them; returns what was set before."""
    global _tracing
    before, _tracing = _tracing, tracing
    return before


class _Untold(torch.autograd.Function):
    """An operator in a trace: its results have gradients, which nobody computes there."""

    @staticmethod
    def forward(ctx: Any, operator: Any, *tensors: torch.Tensor) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise CaptureError(
            "forward takes gradients of what a torch.autograd.Function gives; a graph has one backward, that "
            "of the loss: take that penalty out of forward, or leave the function out of what it "
            "differentiates"
        )


def operator_of(call: FunctionCall) -> Any:
    """The operator that makes this call, defined where it is not yet.

    Raises:
        NotConstant: an argument, or what the class's code holds, cannot be told from others by its text.
    """
    words = re.sub(r"\W", "_", call.cls.__qualname__.replace("<locals>", "")).strip("_")
    name = f"{re.sub('_+', '_', words)}_{_digest(call)}"
    known = name in _calls
    _calls[name] = call
    packet = getattr(torch.ops, FUNCTIONS)
    if not known:
        _define(name, call)
    return getattr(packet, name).default


def _define(name: str, call: FunctionCall) -> None:
    operands = ", ".join(f"Tensor t{index}" for index in range(call.tensors))
    count = sum(isinstance(value, Place) for value in call.results)
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    _LIBRARY.define(f"{name}({operands}) -> {results}")

    def run(*tensors: torch.Tensor) -> Any:
        now = _calls[name]
        made = now.tensors_of(now.run(tensors))
        return made[0] if len(made) == 1 else tuple(made)

    def fake(*tensors: torch.Tensor) -> Any:
        with torch.no_grad():
            made = run(*tensors)
        # In memory of its own: an operator's result is no view of what it reads, as far as a trace is
        # concerned.
        own = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in _listed(made)
        ]
        return own[0] if count == 1 else tuple(own)

    def differentiated(*tensors: torch.Tensor) -> Any:
        return (
            apply(_Untold, getattr(getattr(torch.ops, FUNCTIONS), name).default, *tensors)
            if _tracing
            else run(*tensors)
        )

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, differentiated, "Autograd")
    torch.library.register_fake(f"{FUNCTIONS}::{name}", fake, lib=_LIBRARY)


def _listed(made: Any) -> list[torch.Tensor]:
    return [made] if isinstance(made, torch.Tensor) else list(made)


# -- names ----------------------------------------------------------------------------------------


def _digest(call: FunctionCall) -> str:
    results = [value if isinstance(value, Place) else constant_text(value) for value in call.results]
    arguments = [leaf if isinstance(leaf, Place) else constant_text(leaf) for leaf in call.leaves]
    payload = repr((list(_code_of(call.cls)), arguments, _structure(call.spec), results, call.single))
    return hashlib.sha256(payload.encode()).hexdigest()[:8]


def _structure(spec: pytree.TreeSpec) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(spec))


def constant_text(value: Any) -> str:
    """A constant argument as text, equal in every process that has an equal one.

    Raises:
        NotConstant: no text tells the value from another one.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(constant_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{constant_text(k)}: {constant_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType, torch._ops.OpOverload)):
        return getattr(value, "__qualname__", getattr(value, "__name__", str(value)))
    if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
        return repr(list(_function_text(getattr(value, "__func__", value))))
    if is_dataclass(value) and not isinstance(value, type):
        values = (constant_text(getattr(value, field.name)) for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(values)})"
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return repr(value)
    raise NotConstant(f"a {type(value).__qualname__}")


def _code_of(cls: type) -> Iterator[str]:
    """What the class and its bases, up to PyTorch's, are made of."""
    for base in cls.__mro__:
        if base is torch.autograd.Function:
            return
        yield base.__qualname__
        for name, value in vars(base).items():
            # Made by Python and by PyTorch for every class, and not part of what it computes.
            if name in (
                "__module__",
                "__doc__",
                "__dict__",
                "__weakref__",
                "__annotations__",
                "_backward_cls",
            ):
                continue
            if name in (
                "__firstlineno__",
                "__static_attributes__",
                "_autograd_function_id",
                "_compiled_autograd_key",
            ):
                continue
            try:
                yield f"{name}={constant_text(value)}"
            except NotConstant as what:
                raise NotConstant(f"{what} as {name} of the class") from None


def _function_text(function: Any) -> Iterator[str]:
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        raise NotConstant(f"a {type(function).__qualname__}")
    yield from _code_text(code)
    for value in (getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)):
        yield constant_text(value)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name == "__class__":
            continue
        try:
            yield f"{name}={constant_text(cell.cell_contents)}"
        except ValueError:
            continue  # not filled yet
        except NotConstant as what:
            raise NotConstant(f"{what} called {name} from around it") from None


def _code_text(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames[: code.co_argcount]))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_text(constant)
        else:
            yield repr(sorted(constant, key=repr)) if isinstance(constant, frozenset) else repr(constant)
