"""Modes that watch a model's PyTorch calls during export: they refuse calls, put tensors on the meta device,
and decide branches on values.

``torch.export`` refuses to branch on a tensor's value. Branches that do not affect what a step costs are
decided here, with a note for the user: guards that only raise or warn, tests of whether values are finite,
and layers that are dropped at random (LayerDrop, Fan et al., arXiv 1909.11556). A tensor that depends on no
input and no stored tensor has the same value in every call, so a branch on it is taken as in eager mode.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from tensoropt.capture.lines import asking_frame, calling_frame, is_own, line_of
from tensoropt.capture.unsupported import refuse_call

_HEALTHY = {"isfinite": True, "isinf": False, "isnan": False}
"""Elementwise tests, mapped to their results for finite numbers."""
_KEPT = frozenset({"all", "any"})
_ANSWER = "_tensoropt_answer"


_CHANCE = "_tensoropt_chance"
_FOLDER = str(Path(__file__).parent)
_META = torch.device("meta")
_WITH_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Calls that make tensors from Python values, which would be lost on the meta device."""
_MOVES = frozenset({"to", "cpu", "cuda"})

_BELOW = frozenset({"lt", "le", "less", "less_equal"})
_ABOVE = frozenset({"gt", "ge", "greater", "greater_equal"})


class _ForwardCalls(TorchFunctionMode):
    """A mode that handles all PyTorch calls in a model's ``forward``.

    Args:
        notes: list to which notes for the user are added during the export.
        on_meta: whether the model is exported on the meta device. Tensors that its code makes or moves are
            then placed there, whatever device the code names.
    """

    def __init__(self, notes: list[str], on_meta: bool):
        super().__init__()
        self.notes, self.on_meta = notes, on_meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # a traced graph is run, not the model's code
            return self._answered(func, args, kwargs)
        name = getattr(func, "__name__", "")
        refuse_call(name, args, kwargs)
        if self.on_meta:
            if func in _WITH_VALUES and not isinstance(args[0] if args else kwargs.get("data"), torch.Tensor):
                kwargs.pop("device", None)
                return self._answered(func, args, kwargs).to(_META)
            args, kwargs = self._placed(func, name, args, kwargs)
        return self._answered(func, args, kwargs)

    @staticmethod
    def _placed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if func in _device_constructors() or "device" in kwargs:
            return args, kwargs | {"device": _META}
        if name in _MOVES and isinstance(args[0], torch.Tensor):
            if name != "to":
                return args[:1], {}
            args = tuple(_META if isinstance(a, str | torch.device) else a for a in args)
        return args, kwargs

    def _answered(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        subject = args[0] if args else None
        answer = None
        # `if tensor:` and `tensor.item()` are the two ways in which Python reads a value to branch on.
        if name in ("equal", "allclose"):
            answer = self.passing(calling_frame())
        elif isinstance(subject, torch.Tensor) and (
            name == "bool" or (name == "item" and subject.dtype == torch.bool)
        ):
            answer = self._answer(subject)
        if answer is not None:
            return answer
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._follow(name, args, result)
        return result

    def _answer(self, subject: torch.Tensor) -> bool | None:
        frame = calling_frame()
        finite, chance = getattr(subject, _ANSWER, None), getattr(subject, _CHANCE, None)
        if finite is not None:
            return self.noted(
                frame, finite, "branches on whether values are finite", "the branch for finite ones"
            )
        if isinstance(chance, bool):
            reason = "decides at random (layers that are dropped)"
            return self.noted(frame, chance, reason, "the likelier branch")
        return self.passing(frame)

    def passing(self, frame: FrameType | None) -> bool | None:
        """Return the outcome of the current test that keeps a guard from acting; None if the test belongs to
        no guard. A guard is code of the model or of PyTorch that only raises or warns."""
        for asking in (asking_frame(_FOLDER), frame):
            answer = None if asking is None else _passing(asking)
            if answer is not None:
                return self.noted(frame, answer, "refuses some values", "the branch for those it accepts")
        return None

    def _follow(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        subject = args[0] if args else None
        finite, chance = getattr(subject, _ANSWER, None), getattr(subject, _CHANCE, None)
        if name in _HEALTHY:
            # On the tensor itself: marks live as long as it does, and fake tensors accept attributes.
            setattr(result, _ANSWER, _HEALTHY[name])
        elif finite is not None and name in _KEPT:
            setattr(result, _ANSWER, finite)
        elif finite is not None and name in ("invert", "logical_not", "bitwise_not"):
            setattr(result, _ANSWER, not finite)
        # A single uniform number is 0.5 on average: the likelier branch is the side of the threshold on which
        # that lies.
        elif name == "rand" and result.numel() == 1:
            setattr(result, _CHANCE, 0.5)
        elif isinstance(chance, float) and name in _BELOW | _ABOVE and isinstance(args[1], int | float):
            setattr(result, _CHANCE, (args[1] > chance) == (name in _BELOW))

    def noted(self, frame: FrameType | None, answer: bool, question: str, branch: str) -> bool:
        """Note for the user what the line of ``frame`` asks (``question``) and which ``branch`` the graph
        takes; return ``answer``."""
        where = "the model" if frame is None else line_of(frame)
        self.notes.append(f"{where} {question}; the graph takes {branch}")
        return answer


def _passing(frame: FrameType) -> bool | None:
    """Return the outcome of the test at a frame's current position that keeps a guard from raising or
    warning; None if the line belongs to no guard.

    A guard may combine tests with ``and``, ``or`` and ``not``. The position in the line identifies the test,
    and each test gets the outcome with which the whole guard does nothing.
    """
    for node in _guards(frame.f_code.co_filename):
        # Only the lines of the question: inside the body the model is past it.
        if node.lineno <= frame.f_lineno <= (node.test.end_lineno or node.lineno):
            passes = isinstance(node, ast.Assert)
            questions = list(_questions(node.test, passes))
            if len(questions) == 1:
                return questions[0][1]
            places = list(_places(frame))
            answers = [
                answer for place in places for question, answer in questions if _holds(question, place)
            ]
            return answers[0] if answers else None
    return None


def _questions(test: ast.expr, outcome: bool) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _questions(test.operand, not outcome)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _questions(part, outcome)
    else:
        yield test, outcome


def _places(frame: FrameType) -> Iterator[tuple[int, int]]:
    """Yield (line, column) of a frame's current instruction, then of the previous instruction. At a branch,
    the first is the position of the whole statement, and the second that of the test."""
    positions = list(frame.f_code.co_positions())
    for index in (frame.f_lasti // 2, frame.f_lasti // 2 - 1):
        line, _, column, _ = positions[index] if 0 <= index < len(positions) else (None,) * 4
        yield (line or frame.f_lineno, -1 if column is None else column)


def _holds(node: ast.expr, place: tuple[int, int]) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return start <= place < end


@cache
def _guards(filename: str) -> tuple[ast.Assert | ast.If, ...]:
    """Return the guards of a source file: assertions, and ``if`` statements that only raise or warn. Guards
    with a conditional expression in their test are left out.
    """
    try:
        tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises_or_warns(node)))
        # An answer to a part of a conditional, or of a comparison of two answers, would not decide the line.
        and not any(isinstance(part, ast.IfExp) for part in ast.walk(node.test))
    )


def _only_raises_or_warns(node: ast.If) -> bool:
    if node.orelse:
        return False
    return isinstance(node.body[-1], ast.Raise) or all(_warns(statement) for statement in node.body)


def _warns(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in {"print", "warn", "warning", "warning_once", "warn_once", "info", "debug", "error"}


def _guarded_numbers(answers: _ForwardCalls) -> contextlib.AbstractContextManager[object]:
    """While open, also pass guards that test numbers derived from values, as in ``if x.max().item() > 1``."""
    original = torch.SymBool.__bool__

    def answered(number: torch.SymBool) -> bool:
        # Sizes are known; anything unknown is derived from values.
        if not number.node.is_constant() and not number.node.has_hint():
            frame = asking_frame(_FOLDER)
            own = frame is not None and is_own(frame.f_code.co_filename)
            answer = answers.passing(frame) if own else None
            if answer is not None:
                return answer
        return original(number)

    return mock.patch.object(torch.SymBool, "__bool__", answered)


def _open_functions() -> contextlib.AbstractContextManager[object]:
    """While open, modes see the calls that functions of ``torch.nn.functional`` make, and the branches of
    their argument checks, instead of one call of the function. A tensor subclass with a
    ``__torch_function__`` of its own still handles the call itself."""

    def is_dispatched(*operands: Any) -> bool:
        plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
        leaves = pytree.tree_leaves(operands)
        return any(getattr(type(o), "__torch_function__", plain[0]) not in plain for o in leaves)

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    patched: dict[str, Any] = dict.fromkeys(names, is_dispatched)
    return mock.patch.multiple(torch.nn.functional, **patched)


def _is_causal(answers: _ForwardCalls) -> Any:
    """While open, layers of ``nn.Transformer`` do not test whether a mask is causal, and use it unchanged."""

    def is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and mask is not None:
            answers.noted(calling_frame(), False, "asks whether a mask is causal", "the mask as it is")
        return is_causal is True

    return mock.patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", is_causal_mask)


_RECIPE = "_tensoropt_recipe"
_FACTORIES = frozenset({"arange", "ones", "zeros", "full", "tensor", "scalar_tensor", "eye", "linspace"})
_RANDOM = (
    "rand", "bernoulli", "dropout", "normal", "multinomial", "poisson", "empty", "exponential", "rrelu",
)  # fmt: skip
"""Parts of the names of functions whose results differ from call to call."""
_READS = frozenset({"bool", "item", "int", "float", "index"})
"""The methods by which Python reads a tensor's number to branch on it."""
_ELEMENTS = 1 << 24
"""The number of elements above which a tensor's value is not computed: models branch on small tensors."""


@dataclass(frozen=True)
class _Recipe:
    function: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    version: int

    def value(self, results: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(self) not in results:

            def operand(leaf: Any) -> Any:
                return leaf.value(results) if isinstance(leaf, _Recipe) else leaf

            args, kwargs = pytree.tree_map(operand, (self.args, dict(self.kwargs)))
            if kwargs.get("device") is not None:
                kwargs["device"] = "cpu"
            results[id(self)] = self.function(*args, **kwargs)
        return results[id(self)]


class _KnownValues(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _READS and args and isinstance(args[0], torch.Tensor):
            value = _known_value(args[0])
            if value is not None and value.numel() == 1:
                with _without_tracing():
                    return func(value)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._follow(func, name, args, kwargs, result)
        return result

    @staticmethod
    def _follow(func: Any, name: str, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        if any(part in name for part in _RANDOM):
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A call that changes a tensor returns that tensor, which is then no longer known.
        if any(tensor is result for tensor in tensors) or (not tensors and name not in _FACTORIES):
            return
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
            return  # a number made of a value
        recipes = {id(tensor): _recipe_of(tensor) for tensor in tensors}
        # The size is checked last: for an input's view, export would record the question as a condition.
        if None in recipes.values() or result.numel() > _ELEMENTS:
            return
        steps = [recipes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(steps, spec)
        setattr(result, _RECIPE, _Recipe(func, args, kwargs, result._version))


def _recipe_of(tensor: torch.Tensor) -> _Recipe | None:
    recipe = getattr(tensor, _RECIPE, None)
    # Views share the version of their base: whatever changed the memory counts.
    return recipe if recipe is not None and recipe.version == tensor._version else None


def _known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    recipe = _recipe_of(tensor)
    if recipe is None:
        return None
    with _without_tracing():
        try:
            return recipe.value({})
        except Exception:  # a function that accepts no plain tensors: then the value is not known
            return None


@contextlib.contextmanager
def _without_tracing() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextlib.contextmanager
def known_values() -> Iterator[None]:
    """While open, allow an exported model to branch on values that are the same in every call.

    Models of ``transformers`` then make masks as in eager mode. The values of masks and positions among the
    inputs are unknown, and tensors computed from these inputs stay in the graph.
    """
    # It is not imported for this purpose: if it is not loaded, no model comes from it.
    masks = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            if hasattr(masks, name):
                stack.enter_context(mock.patch.object(masks, name, answer))
        stack.enter_context(_KnownValues())
        yield


def _is_tracing(tensor: torch.Tensor | None = None) -> bool:
    return tensor is not None and _known_value(tensor) is None


_ANSWERS: Mapping[str, Callable[..., bool]] = {
    "is_torchdynamo_exporting": lambda: False,
    "is_torchdynamo_compiling": lambda: False,
    "is_tracing": _is_tracing,
}


@contextlib.contextmanager
def followed_calls(on_meta: bool) -> Iterator[list[str]]:
    """While open, handle a model's PyTorch calls (:class:`_ForwardCalls`), assuming that values are finite
    and that inputs and arguments are valid.

    Yields:
        A list to which notes for the user are added during the export.
    """
    notes: list[str] = []
    calls = _ForwardCalls(notes, on_meta)
    # PyTorch validates arguments by branching on their values, which export refuses.
    unchecked = mock.patch.object(torch.distributions.Distribution, "_validate_args", False)
    with unchecked, _unseeded(notes), _guarded_numbers(calls), _open_functions(), _is_causal(calls), calls:
        yield notes


def _unseeded(notes: list[str]) -> contextlib.AbstractContextManager[object]:
    seed = torch.manual_seed

    def noted(value: Any) -> Any:
        frame = calling_frame()
        if frame is None:
            return seed(value)
        notes.append(f"{line_of(frame)} seeds the random numbers in forward; a plan ignores this seed")
        # The script's own random numbers continue as they would have.
        return torch.default_generator

    return mock.patch.object(torch, "manual_seed", noted)
