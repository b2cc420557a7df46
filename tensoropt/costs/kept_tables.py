"""Arrays of cost tables, kept between runs under everything they depend on.

Tables of one mesh at the same prices share a file, in which an array is looked up by a hash of everything
that its numbers follow from. Another allowed gap therefore reuses all of its tables, and a model with one
changed layer reuses those of the unchanged layers. Only numbers are kept; the objects that they describe are
rebuilt.
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
"""The most bytes kept in total; beyond it, the least recently used files are removed. An assumption."""
MOST_FILE_BYTES = 1 << 28
"""The most bytes kept per mesh; more is not kept, since reading takes about as long as building. An
assumption."""


class KeptTables:
    """A folder of arrays of cost tables.

    Args:
        folder: created when something is kept; if None, nothing is kept.
        code: identifies the code that builds the arrays; different code builds them anew.
    """

    def __init__(self, folder: Path | None, code: str = ""):
        self.folder = folder
        self.code = code

    def at(self, prices: str) -> TableArrays:
        """The arrays of one mesh at its prices.

        Args:
            prices: everything that determines them, except what is passed with each array.
        """
        if self.folder is None:
            return TableArrays(None)
        return TableArrays(self.folder / f"{_hash(self.code, prices)}.npz")

    def remove_old(self) -> None:
        """Remove the least recently used files beyond the number of bytes that are kept."""
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
    """The arrays of one mesh, each built once.

    Args:
        path: the file that stores them; if None, nothing is stored.
        in_memory: whether arrays that are in no file are kept for the lifetime of this object.
    """

    def __init__(self, path: Path | None, *, in_memory: bool = False):
        self.path = path
        self.in_memory = in_memory or path is not None
        self._arrays: dict[str, np.ndarray] = {}
        self._made = 0
        if path is not None:
            # A damaged file is treated like a missing one.
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
                with np.load(path, allow_pickle=False) as found:
                    self._arrays = {name: found[name] for name in found.files}
                os.utime(path)

    def once(self, depends_on: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a stored array, or build it now.

        Args:
            depends_on: everything that its numbers follow from, in addition to what the file stands for.
        """
        if not self.in_memory:
            return make()
        key = _hash(depends_on())
        if key not in self._arrays:
            self._arrays[key] = make()
            self._made += 1
        return self._arrays[key]

    def save(self) -> None:
        """Write the file if anything was built; what cannot be written is built again the next time."""
        size = sum(array.nbytes for array in self._arrays.values())
        if self.path is None or not self._made or size > MOST_FILE_BYTES:
            return
        with contextlib.suppress(TensorOptError), written_whole(self.path) as path, open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **self._arrays)
        self._made = 0


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
