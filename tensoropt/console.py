"""What a person sees while the command line works: progress on stderr, a bar or plain lines."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

BAR_CELLS = 24
REDRAW_S = 0.1
LINE_EVERY_S = 10.0
"""In a log a long stage writes a line this often, so that it neither floods nor looks dead."""


class Progress:
    """Progress of named stages; callable as the pipeline's callbacks are: (stage, done, total, what).

    On a terminal one line is redrawn; elsewhere a stage writes a line when it begins, every few seconds, and
    when it ends.

    Args:
        stream: where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream if stream is not None else sys.stderr
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
        if not (begins or ends or now - self._shown >= (REDRAW_S if self.live else LINE_EVERY_S)):
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
        filled = BAR_CELLS * done // total if total else BAR_CELLS
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        text = f"{stage:14s} [{bar}] {done}/{total}  {tail}"
        width = shutil.get_terminal_size((100, 20)).columns
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
