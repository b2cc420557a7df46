"""Where the code of a model is, as ``FILE:LINE``, for messages and notes."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
"""What is no model's code: PyTorch, capture itself, and what has no file."""
_PYTHONS = str(Path(inspect.__file__).parent)


def frame_of_model() -> FrameType | None:
    """The innermost frame of the code that runs now which is a model's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_library(filename: str) -> bool:
    """Whether a file is no model's code: PyTorch's, capture's or of Python itself."""
    pythons = filename.startswith(_PYTHONS) and "-packages" not in filename
    return pythons or filename.startswith(_LIBRARIES)


def place_of_model() -> str:
    """``FILE:LINE`` of the model's code that runs now."""
    frame = frame_of_model()
    return "the model" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_code(function: Any) -> str:
    """``FILE:LINE`` where a function, a method or a callable object begins."""
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "func", function)  # of a partial
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "no file" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def shown_error(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
