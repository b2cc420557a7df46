"""Functions that find a line of the model's own code: the line that runs, failed, or made a traced node."""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from traceback import StackSummary, walk_tb
from types import FrameType, TracebackType
from typing import Any
from unittest import mock

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_MODELS = str(Path(__file__).parents[1] / "zoo") + os.sep
"""The folder of the zoo, whose files count as models; the other files of this package do not."""
_EXPORTING = str(Path(__file__).parent / "exporting.py")
_PYTHON = str(Path(sysconfig.get_path("stdlib"))) + os.sep


def is_ours(filename: str) -> bool:
    """Return whether a source file belongs to this package, without the models of the zoo."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_MODELS)


def is_own(filename: str) -> bool:
    """Return whether a source file may be a model's: it belongs neither to PyTorch, nor to this package
    (except the zoo), nor to Python's standard library.
    """
    if filename.startswith(_MODELS):
        return True
    inner = filename.startswith((_TORCH, _PACKAGE, "<"))
    return not inner and (not filename.startswith(_PYTHON) or "site-packages" in filename)


def calling_frame() -> FrameType | None:
    """Return the innermost frame of the model's code on the stack; None if an export runs no such code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        if frame.f_code.co_filename == _EXPORTING:
            return None
        frame = frame.f_back
    return frame


def asking_frame(*outside: str) -> FrameType | None:
    """Return the innermost frame that calls PyTorch, which may itself be PyTorch's code. Skipped are function
    modes, and files whose names begin with one of ``outside``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(outside)
    ):
        frame = frame.f_back
    return frame


def current_line() -> str:
    """Return ``FILE:LINE`` of the model's code that is currently running."""
    frame = calling_frame()
    return "the model" if frame is None else line_of(frame)


def line_of(frame: FrameType) -> str:
    """Return ``FILE:LINE`` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def quoted_line(frame: FrameType) -> str:
    """Return ``FILE:LINE (source)`` of a frame."""
    return _quoted(frame.f_code.co_filename, frame.f_lineno)


def first_line(function: Any) -> str:
    """Return ``FILE:LINE`` where the definition of a function, a method or a callable object begins."""
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "func", function)  # for a partial
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "no file" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def shown_error(error: BaseException) -> str:
    """Return the first line of an error's message, or its type name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def shown_names(names: Sequence[str], most: int) -> str:
    """Return a text with the first ``most`` names and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors from which it was raised, since PyTorch raises its errors from others."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield all frames that an error and its causes passed through, innermost first."""
    for cause in causes(error):
        yield from (frame for frame, _ in reversed([*walk_tb(cause.__traceback__)]))


def raised_by_model(error: BaseException) -> BaseException | None:
    """Return the error, or its cause, that a ``raise`` or ``assert`` in the model's code raised, or None."""
    for cause in causes(error):
        trace: TracebackType | None = cause.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or not is_own(trace.tb_frame.f_code.co_filename):
            continue
        # An own line may also call what raises in C++, which is PyTorch's refusal.
        if dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS":
            return cause
    return None


def failing_line(error: BaseException) -> str:
    """Return ``FILE:LINE (source)`` of the model's innermost line in an error's traceback, or ""."""
    for cause in causes(error):
        places = ((frame.f_code.co_filename, line) for frame, line in walk_tb(cause.__traceback__))
        if own := [place for place in places if is_own(place[0])]:
            return _quoted(*own[-1])
    # An error of a replayed graph has the line in its text alone.
    own = [place for cause in causes(error) for place in _places(str(cause)) if is_own(place[0])]
    return _quoted(*own[-1]) if own else ""


def _places(trace: str) -> list[tuple[str, int]]:
    found = re.findall(r'^\s*File "([^"\n]+)", line (\d+), in \S', trace, re.MULTILINE)
    return [(file, int(line)) for file, line in found]


def node_line(node: torch.fx.Node) -> str:
    """Return ``FILE:LINE (source)`` of the line that made a traced node, or ""."""
    places = _places(node.meta.get("stack_trace") or "")
    return _quoted(*places[-1]) if places else ""


def own_lines_kept() -> AbstractContextManager[object]:
    """While open, traced nodes record the model's innermost line, even in a helper function. PyTorch records
    only lines of functions called ``forward``."""

    def own(self: object, frames: StackSummary) -> StackSummary:
        return StackSummary.from_list([frame for frame in frames if is_own(frame.filename)][-1:])

    return mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", own)


def _quoted(file: str, number: int) -> str:
    line = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f" ({line})" if line else "")
