"""Arrays of cost tables, kept between runs by what they depend on.

Tables of one mesh at the same prices share a file: an array is found in it by a hash of all that its numbers
follow from. So another allowed gap finds all of its tables, and a model with one changed layer those of the
layers that have not changed. Only numbers are kept; what they are of is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.files import written_whole

MOST_BYTES = 1 << 30
"""Kept in all; of more, the files that were not asked for longest are removed. An assumption."""
MOST_FILE_BYTES = 1 << 28
"""Of one mesh; larger ones are not kept: to read them takes about as long as to make them. An assumption."""


class KeptTables:
    """A folder of arrays of cost tables.

    Args:
        folder: is made when something is kept; None keeps nothing.
        code: of what makes the arrays, which are made anew by other code.
    """

    def __init__(self, folder: Path | None, code: str = ""):
        self.folder = folder
        self.code = code

    def at(self, prices: str) -> TableArrays:
        """The arrays of one mesh at its prices.

        Args:
            prices: all that decides them but what is said with each array.
        """
        if self.folder is None:
            return TableArrays(None)
        return TableArrays(self.folder / f"{_hash(self.code, prices)}.npz")

    def remove_old(self) -> None:
        """Remove the files that were not asked for longest, as far as there are more than are kept."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):  # another process may remove them too
            files = sorted(self.folder.glob("*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
            total = 0
            for path in files:
                total += path.stat().st_size
                if total > MOST_BYTES:
                    path.unlink(missing_ok=True)


class TableArrays:
    """The arrays of one mesh, each made once.

    Args:
        path: of the file that keeps them; None keeps nothing.
        in_memory: whether arrays that are in no file are kept as long as this is.
    """

    def __init__(self, path: Path | None, *, in_memory: bool = False):
        self.path = path
        self.in_memory = in_memory or path is not None
        self._arrays: dict[str, np.ndarray] = {}
        self._made = 0
        if path is not None:
            # Not there, or damaged: as if it were not there.
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
                with np.load(path, allow_pickle=False) as found:
                    self._arrays = {name: found[name] for name in found.files}
                os.utime(path)

    def once(self, depends_on: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array that is there, or is made now.

        Args:
            depends_on: all that its numbers follow from, beside what the file stands for.
        """
        if not self.in_memory:
            return make()
        key = _hash(depends_on())
        if key not in self._arrays:
            self._arrays[key] = make()
            self._made += 1
        return self._arrays[key]

    def save(self) -> None:
        """Write the file if anything was made; what cannot be written is made again the next time."""
        size = sum(array.nbytes for array in self._arrays.values())
        if self.path is None or not self._made or size > MOST_FILE_BYTES:
            return
        with contextlib.suppress(TensorOptError), written_whole(self.path) as path, open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays)
        self._made = 0


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
