"""Questions about values inside a model, answered at capture, when there are no values.

Export refuses to branch on a value. Three kinds of branches say nothing of what a step costs, and the graph
notes where it took them:

- models guard against overflow (``if not torch.isfinite(x).all(): x = torch.clamp(...)``, in the encoders of
  DETR and its kin), distributions validate their arguments: a step of numbers that are not finite has no use;
- models assert what their inputs must be, or raise an error: a step that ends so has no use either;
- models drop whole layers at random (LayerDrop, Fan et al., arXiv 1909.11556): the likelier branch is taken.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HEALTHY = {"isfinite": True, "isinf": False, "isnan": False}
"""Questions asked of every element -> the answer for finite numbers."""
_KEPT = frozenset({"all", "any"})
_ANSWER = "_tensoropt_answer"


_CHANCE = "_tensoropt_chance"
_BELOW, _ABOVE = (
    frozenset({"lt", "le", "less", "less_equal"}),
    frozenset({"gt", "ge", "greater", "greater_equal"}),
)


class _Answers(TorchFunctionMode):
    """Follows the results of such questions, and answers where the model branches on one."""

    def __init__(self, notes: list[str]):
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        subject = args[0] if args else None
        # `if tensor:` and `tensor.item()`: the two ways in which Python gets at a value to branch on.
        asked = name == "bool" or (name == "item" and getattr(subject, "dtype", None) == torch.bool)
        if asked and isinstance(subject, torch.Tensor):
            answer = self._answer(subject)
            if answer is not None:
                return answer
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._follow(name, args, result)
        return result

    def _answer(self, subject: torch.Tensor) -> bool | None:
        """What a branch on this tensor is told, or None for its value."""
        frame = _frame_of_the_model()
        finite, chance = getattr(subject, _ANSWER, None), getattr(subject, _CHANCE, None)
        if finite is not None:
            return self._noted(
                frame, finite, "branches on whether values are finite", "the branch for finite ones"
            )
        if isinstance(chance, bool):
            return self._noted(
                frame, chance, "decides at random (layers that are dropped)", "the likelier branch"
            )
        passing = _passing(frame)
        if passing is not None:
            return self._noted(frame, passing, "refuses some values", "the branch for those it accepts")
        return None

    @staticmethod
    def _follow(name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        subject = args[0] if args else None
        finite, chance = getattr(subject, _ANSWER, None), getattr(subject, _CHANCE, None)
        if name in _HEALTHY:
            # On the tensor itself: marks live as long as it does, and fake tensors take attributes.
            setattr(result, _ANSWER, _HEALTHY[name])
        elif finite is not None and name in _KEPT:
            setattr(result, _ANSWER, finite)
        elif finite is not None and name in ("invert", "logical_not", "bitwise_not"):
            setattr(result, _ANSWER, not finite)
        # A single uniform number is 0.5 on average: the likelier branch is the side of the limit on which
        # that lies.
        elif name == "rand" and result.numel() == 1:
            setattr(result, _CHANCE, 0.5)
        elif isinstance(chance, float) and name in _BELOW | _ABOVE and isinstance(args[1], int | float):
            setattr(result, _CHANCE, (args[1] > chance) == (name in _BELOW))

    def _noted(self, frame: FrameType | None, answer: bool, what: str, taken: str) -> bool:
        where = "the model" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        note = f"{where} {what}; the graph takes {taken}"
        if note not in self.notes:
            self.notes.append(note)
        return answer


def _frame_of_the_model() -> FrameType | None:
    """Where the model's code is right now: the innermost frame outside PyTorch and capture."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return frame


def _passing(frame: FrameType | None) -> bool | None:
    """The answer with which the line ``frame`` is at goes on, if that line only decides whether to raise."""
    if frame is None:
        return None
    for node in _guards(frame.f_code.co_filename):
        # Only the lines of the question: inside the body the model is past it.
        if node.lineno <= frame.f_lineno <= (node.test.end_lineno or node.lineno):
            negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            return isinstance(node, ast.Assert) != negated
    return None


@cache
def _guards(filename: str) -> tuple[ast.Assert | ast.If, ...]:
    """Assertions and ``if ...: raise`` of a source file, of one question each."""
    try:
        tree = ast.parse(Path(filename).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node)))
        # Of one question: with `and`, `or` or a conditional an answer to one part would not decide the line.
        and not any(isinstance(part, ast.BoolOp | ast.IfExp) for part in ast.walk(node.test))
    )


def _only_raises(node: ast.If) -> bool:
    return isinstance(node.body[-1], ast.Raise) and not node.orelse


@contextlib.contextmanager
def valid_values() -> Iterator[list[str]]:
    """While a model is exported its values are taken to be finite and its inputs and arguments valid.

    Yields:
        Notes on the branches that were decided so, filled as the export goes.
    """
    notes: list[str] = []
    distribution = torch.distributions.Distribution
    validating = distribution._validate_args
    # PyTorch validates arguments by branching on their values, which export refuses.
    distribution.set_default_validate_args(False)
    try:
        with _Answers(notes):
            yield notes
    finally:
        distribution.set_default_validate_args(validating)
