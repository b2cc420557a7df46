"""Checks of values inside a model, answered at capture, when there are no values.

Models guard against overflow (``if not torch.isfinite(x).all(): x = torch.clamp(...)``, in the encoders of
DETR and its kin) and distributions validate their arguments. Export refuses to branch on a value. A step
whose numbers are not finite has no use, so such a question is answered "finite", and the graph notes where.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HEALTHY = {"isfinite": True, "isinf": False, "isnan": False}
"""Questions asked of every element -> the answer for finite numbers."""
_KEPT = frozenset({"all", "any"})
_ANSWER = "_tensoropt_answer"


class _Answers(TorchFunctionMode):
    """Follows the results of such questions, and answers where the model branches on one."""

    def __init__(self, notes: list[str]):
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        answer = getattr(args[0], _ANSWER, None) if args else None
        if name == "bool" and answer is not None:
            self._note()
            return answer
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and args:
            if name in _HEALTHY:
                setattr(result, _ANSWER, _HEALTHY[name])
            elif answer is not None and name in _KEPT:
                setattr(result, _ANSWER, answer)
            elif answer is not None and name in ("invert", "logical_not", "bitwise_not"):
                setattr(result, _ANSWER, not answer)
        return result

    def _note(self) -> None:
        where = _line_of_the_model()
        note = f"{where} branches on whether values are finite; the graph takes the branch for finite ones"
        if note not in self.notes:
            self.notes.append(note)


def _line_of_the_model() -> str:
    """Where the model's code is right now: the innermost frame outside PyTorch and this module."""
    own = (str(Path(torch.__file__).parent), __file__)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return "the model" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextlib.contextmanager
def valid_values() -> Iterator[list[str]]:
    """While a model is exported its values are taken to be finite and its distributions' arguments valid.

    Yields:
        Notes on the branches that were decided so, filled as the export goes.
    """
    notes: list[str] = []
    distribution = torch.distributions.Distribution
    validating = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        with _Answers(notes):
            yield notes
    finally:
        distribution.set_default_validate_args(validating)
