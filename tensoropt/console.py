"""Command-line options and output: answers go to stdout, progress (a bar or plain lines) to stderr."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TextIO, TypeVar

from tensoropt.errors import TensorOptError
from tensoropt.units import read_number, read_whole

_Value = TypeVar("_Value")

_BAR_CELLS = 24
_REDRAW_S = 0.1
_LINE_EVERY_S = 10.0
"""The seconds between a long stage's lines in a log."""


class OptionParser(argparse.ArgumentParser):
    """A parser of command-line options that reports errors in one sentence, without a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`TensorOptError` with argparse's message, and a remedy if the message lacks one."""
        said = message.removeprefix("argument ")
        remedied = "; " in said or "(choose from " in said
        raise TensorOptError(said if remedied else f"{said}; {self.prog} --help lists the options")


def option_type(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return a parsing function as the ``type`` of an option, so that argparse names the option in its
    errors."""

    def convert(text: str) -> _Value:
        try:
            return read(text)
        except TensorOptError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


WHOLE, NUMBER = option_type(read_whole), option_type(read_number)
"""The ``type`` of options that are numbers."""


def about(seconds: float) -> str:
    """Return an estimated duration in words: ``20 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class ProgressDisplay:
    """A display of the progress of long stages, on a terminal, in a notebook or in a log.

    A terminal or notebook shows one line with a bar, which is redrawn. In a log, a stage writes a line at its
    beginning, every ten seconds, and at its end.

    Args:
        stream: the stream for progress; by default standard error.
        answers: the stream for :meth:`say`; by default standard output.
    """

    def __init__(self, stream: TextIO | None = None, answers: TextIO | None = None):
        self.stream = stream if stream is not None else sys.stderr
        self.answers = answers if answers is not None else sys.stdout
        self.live = self.stream.isatty() or _in_notebook()
        self._stage = ""
        self._first = self._began = self._shown = 0.0
        self._drawn = 0

    def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        begins, ends = stage != self._stage, done >= total
        self._first = self._first or now
        if begins:
            self._stage, self._began, self._shown = stage, now, 0.0
        elapsed = now - self._began
        if not (begins or ends or now - self._shown >= (_REDRAW_S if self.live else _LINE_EVERY_S)):
            return
        self._shown = now
        if self.live:
            share = done / total if total else 1.0
            self._draw(share, f"{what}  ({stage} {done}/{total}, {elapsed:.0f} s)")
        else:
            tail = f"done in {elapsed:.1f} s" if ends else f"{done}/{total}"
            self._line(f"{stage}: {tail}" + (f"  {what}" if what else ""))
        if ends:
            self._stage = ""

    def _draw(self, share: float, tail: str) -> None:
        filled = int(_BAR_CELLS * share)
        text = f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}] {tail}"
        width = shutil.get_terminal_size((100, 20)).columns
        # One column stays free, as terminals wrap at the last one. Longer old text is overwritten with
        # blanks, as notebooks support only the carriage return.
        text = text[: width - 1]
        self.stream.write("\r" + text.ljust(self._drawn))
        self.stream.flush()
        self._drawn = len(text)

    def _line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Write a line of its own, below the bar."""
        self.close()
        self._line(text)

    def first(self, text: str) -> None:
        """Write the answer that usual strategies give, before the full search begins."""
        self.note(f"Before the search: {text}")

    def say(self, text: str) -> None:
        """Write an answer, or a part of it, to the stream for answers."""
        self.close()
        print(text, file=self.answers, flush=True)

    def close(self) -> None:
        """End the line with the bar, so that further text begins a new line."""
        if self._drawn:
            self.stream.write("\n")
            self.stream.flush()
            self._drawn = 0

    def end(self) -> None:
        """Fill the bar, with the time that everything took, and end its line."""
        if self._drawn:
            self._draw(1.0, f"done in {time.monotonic() - self._first:.0f} s")
            self.close()


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _is_watched() -> bool:
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def shows_progress(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that has an argument ``progress`` (:data:`~tensoropt.types.ProgressChoice`): if a
    bar is to be shown, the function gets a :class:`ProgressDisplay`, which ends with the call.

    Raises:
        TensorOptError: ``progress`` has another value.
    """

    @functools.wraps(function)
    def shown(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        choice: Any = kwargs.get("progress")
        if callable(choice):
            return function(*args, **kwargs)
        if choice not in (None, True, False):
            raise TensorOptError(
                f"progress={choice!r} is not valid; pass True, False, None or a function of "
                "(stage, done, total, what)"
            )
        if not (_is_watched() if choice is None else choice):
            kwargs["progress"] = False
            return function(*args, **kwargs)
        display = ProgressDisplay()
        kwargs["progress"] = display
        try:
            result = function(*args, **kwargs)
        except BaseException:
            display.close()
            raise
        display.end()
        return result

    return shown


def columns(rows: list[list[str]], *, left: tuple[int, ...] = ()) -> str:
    """Return rows of cells (first the header) as aligned lines; columns ``left`` are aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextlib.contextmanager
def reserved_stdout(*, for_good: bool) -> Iterator[TextIO]:
    """Yield standard output for a command's answer; everything else written to stdout goes to stderr.

    Commands run user code, which may print: from Python, from C++ to file descriptor 1, or from child
    processes. None of that may get into an answer that a machine reads. Only commands, which own their
    process, may call this, not functions called from a notebook.

    Args:
        for_good: whether stdout stays redirected afterwards, for a process about to end, whose exit handlers
            may print.
    """
    before = sys.stdout
    if before is None or sys.stderr is None:  # started with one of them closed: nothing to separate
        yield before or io.StringIO()
        return
    _flush(before)
    # Descriptor 1 itself is redirected, not only sys.stdout, as C++ and child processes write to the
    # descriptor.
    own = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors)
    os.dup2(_descriptor(sys.stderr, 2), 1)
    answers = own if _descriptor(before, -1) == 1 else before  # another stream, as in a test
    sys.stdout = sys.stderr
    try:
        yield answers
    finally:
        _flush(before)
        if not for_good:
            os.dup2(own.fileno(), 1)
            sys.stdout = before
        with contextlib.suppress(OSError):  # the answer's writer flushes it, and gets the error
            own.close()


def _descriptor(stream: TextIO, otherwise: int) -> int:
    try:
        return stream.fileno()
    except (AttributeError, io.UnsupportedOperation):  # not a file, as in a test or a notebook
        return otherwise


def _flush(stream: TextIO) -> None:
    import ctypes

    stream.flush()
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    # C's stdio buffers would be written after descriptor 1 is redirected. NULL means all streams.
    ctypes.CDLL(None).fflush(None)


def json_text(data: Any, *, indent: int | None = None) -> str:
    """Return data as JSON text, with null for infinity and NaN, which JSON does not have."""
    return json.dumps(_plain(data), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
