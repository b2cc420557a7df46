"""What a command writes, and where: its answer on stdout, and progress (a bar or plain lines) on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

_BAR_CELLS = 24
_REDRAW_S = 0.1
_LINE_EVERY_S = 10.0
"""In a log a long stage writes a line this often, so that it neither floods nor looks dead."""


class ProgressDisplay:
    """A display of the progress of named stages; a :class:`~tensoropt.types.Progress` that is called with
    (stage, done, total, what).

    On a terminal one line is redrawn; elsewhere a stage writes a line when it begins, every few seconds, and
    when it ends.

    Args:
        stream: where to write; standard error by default.
        answers: where :meth:`say` writes; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None, answers: TextIO | None = None):
        self.stream = stream if stream is not None else sys.stderr
        self.answers = answers if answers is not None else sys.stdout
        self.live = self.stream.isatty()
        self._stage = ""
        self._began = self._shown = 0.0
        self._drawn = False

    def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
        now = time.monotonic()
        begins, ends = stage != self._stage, done >= total
        if begins:
            self.close()
            self._stage, self._began, self._shown = stage, now, 0.0
        elapsed = now - self._began
        if not (begins or ends or now - self._shown >= (_REDRAW_S if self.live else _LINE_EVERY_S)):
            return
        self._shown = now
        if self.live:
            self._draw(stage, done, total, f"{elapsed:.0f}s  {what}")
            if ends:
                self.close()
        else:
            tail = f"done in {elapsed:.1f} s" if ends else f"{done}/{total}"
            self._line(f"{stage}: {tail}" + (f"  {what}" if what else ""))
        if ends:
            self._stage = ""

    def _draw(self, stage: str, done: int, total: int, tail: str) -> None:
        filled = _BAR_CELLS * done // total if total else _BAR_CELLS
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        text = f"{stage:14s} [{bar}] {done}/{total}  {tail}"
        width = shutil.get_terminal_size((100, 20)).columns
        # Carriage return and "erase to the end of the line"; one column is left free, as terminals wrap at
        # the last.
        self.stream.write("\r\x1b[K" + text[: width - 1])
        self.stream.flush()
        self._drawn = True

    def _line(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """A line of its own."""
        self.close()
        self._line(text)

    def say(self, text: str) -> None:
        """A part of the answer that is known already, while the rest goes on."""
        self.close()
        print(text, file=self.answers, flush=True)

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._drawn:
            self.stream.write("\n")
            self.stream.flush()
            self._drawn = False


def columns(rows: list[list[str]], *, left: tuple[int, ...] = ()) -> str:
    """Rows (the first is the header) as aligned text: to the right, but columns in ``left`` to the left."""
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
    """Gives standard output for a command's own answer; whatever else is written there goes to stderr.

    A command runs code of its user: a model is imported, built, captured and run. What that prints, what its
    C++ writes to file descriptor 1 and what processes that it starts write must not end up in an answer that
    a machine reads. Only what owns its process may do this: commands, not functions that a notebook calls.

    Args:
        for_good: leave it so at the end, for a process that ends as well: exit handlers print, too.
    """
    before = sys.stdout
    if before is None or sys.stderr is None:  # started with one of them closed: nothing to keep apart
        yield before or io.StringIO()
        return
    _flush(before)
    # Descriptor 1 itself is turned to stderr, not only sys.stdout: C++ and child processes write to the
    # descriptor.
    own = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors)
    os.dup2(_descriptor(sys.stderr, 2), 1)
    answers = own if _descriptor(before, -1) == 1 else before  # a test, for instance, has put another there
    sys.stdout = sys.stderr
    try:
        yield answers
    finally:
        _flush(before)
        if not for_good:
            os.dup2(own.fileno(), 1)
            sys.stdout = before
        with contextlib.suppress(OSError):  # whoever writes an answer flushes it, and hears why that failed
            own.close()


def _descriptor(stream: TextIO, otherwise: int) -> int:
    try:
        return stream.fileno()
    except (AttributeError, io.UnsupportedOperation):  # no file, as under a test or in a notebook
        return otherwise


def _flush(stream: TextIO) -> None:
    """Write what is still in buffers for file descriptor 1, C's among them, to where that leads now."""
    import ctypes

    stream.flush()
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    # C's stdio has buffers of its own, which would come out after descriptor 1 leads elsewhere. NULL means
    # all streams.
    ctypes.CDLL(None).fflush(None)


def json_text(data: Any, *, indent: int | None = None) -> str:
    """The data as JSON, which has neither infinity nor NaN: null stands for both."""
    return json.dumps(_plain(data), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
