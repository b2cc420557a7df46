"""Names that people give to explorations, kept in one file next to the jobs, never in their folders.

The file is read anew for every change, so that two dashboards keep each other's names. One that cannot be
read is left as it is and reported.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.files import check_size, write_text

FILE = "labels.json"
_SCHEMA = "tensoropt.labels/1"
_MOST_BYTES = 2**24
"""The most bytes of the file: about a hundred thousand explorations."""
_LONGEST = 80


class Labels:
    """Names by the identity of an exploration (:attr:`.library.Entry.identity`); safe between threads.

    Args:
        file: the file that keeps them; None keeps them in memory, for a dashboard that only shows.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._runs: dict[str, Any] = {}
        self.fault = ""
        """Why the file cannot be read, in a sentence; "" if it can."""

    def name(self, identity: str) -> str:
        """Return a person's name for an exploration; "" if it has none."""
        with self._lock:
            self._read()
            return _name(self._runs.get(identity))

    def rename(self, identity: str, text: str) -> None:
        """Give a name, or "" to restore the exploration's own title.

        Raises:
            TensorOptError: it is too long, or cannot be written down.
        """
        name = _plain(text)
        if len(name) > _LONGEST:
            raise TensorOptError(
                f"a name has at most {_LONGEST} characters, this one has {len(name)}; it is not changed"
            )
        with self._lock:
            self._read()
            if self.fault:
                raise TensorOptError(self.fault)
            run = self._runs.get(identity)
            runs = {**self._runs, identity: {**(run if isinstance(run, dict) else {}), "name": name}}
            if self._file is not None:
                write_text(self._file, json.dumps({"schema": _SCHEMA, "runs": runs}, indent=1) + "\n")
                self._stamp = _stamp(self._file)
            self._runs = runs

    def _read(self) -> None:
        """Read the file if it has changed. The caller holds the lock."""
        if self._file is None or self._stamp == (stamp := _stamp(self._file)):
            return
        self._stamp, self._runs, self.fault = stamp, {}, ""
        if stamp is None:
            return
        try:
            check_size(self._file, _MOST_BYTES)
            data = json.loads(self._file.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
                raise ValueError("it is of another kind or version")
            if not isinstance(data.get("runs"), dict):
                raise ValueError("it has no runs")
            self._runs = data["runs"]
        # RecursionError: nested more deeply than Python reads.
        except (OSError, ValueError, RecursionError, TensorOptError) as error:
            self.fault = (
                f"Names cannot be read from {self._file} ({str(error)[:200]}), nor changed until it is "
                "mended or moved away."
            )


def _plain(text: str) -> str:
    """Return a text on one line, without characters that could disturb a page or terminal."""
    # Cc and the marks that turn the direction of writing.
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", " ", text).split())


def _name(run: Any) -> str:
    name = run.get("name") if isinstance(run, Mapping) else ""
    return name if isinstance(name, str) else ""


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        state = file.stat()
    except OSError:
        return None
    # Also the inode: two files written within one tick of the clock may have the same size.
    return state.st_mtime_ns, state.st_ino
