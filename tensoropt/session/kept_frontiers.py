"""Search results of single spaces, kept for explorations that search in the same way.

An interrupted exploration continues where it ended, and published planners are compared without a new search.
Every step of the search follows from the exploration's question, so its place among the steps identifies it.
Files are pickles of this package's own classes, in the folder of the profile store.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensoropt.costs.tables import CostTables
from tensoropt.errors import TensorOptError
from tensoropt.files import written_whole
from tensoropt.processes import in_forks
from tensoropt.session.one_space import SpacePart

READABLE = {
    "numpy": {"dtype", "ndarray"},
    # NumPy's own names for making an array from its bytes; `numpy.core` before version 2.
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "tensoropt.costs.variables": {"Variable"},
    "tensoropt.search.bands": {"BandBound"},
    "tensoropt.search.bounds": {"Highest", "Lowest", "Staircase"},
    "tensoropt.search.hull": {"Hull"},
    "tensoropt.search.reduced_graph": {"Caps"},
    "tensoropt.search.result": {"ChosenStrategies", "TrackedFrontier"},
    "tensoropt.session.one_space": {"SpacePart"},
    "tensoropt.session.simulations": {"Simulated"},
    "tensoropt.session.turns": {"Found"},
}
"""What a kept file may name, by module: only data, none of which does anything when it is created."""
MOST_BYTES = 1 << 30
"""The most bytes kept in total; beyond that, what was unused for longest is removed. An assumption."""


class PartReader(pickle.Unpickler):
    """Reads parts of a search and refuses everything else: a pickle may name any function to be called, and
    a folder for caches may be written by others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of :data:`READABLE`.

        Raises:
            pickle.UnpicklingError: the name is none of them.
        """
        if (module, name) == ("builtins", "getattr"):
            return _method
        if name not in READABLE.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a search")
        return super().find_class(module, name)


def _method(owner: Any, name: str) -> Any:
    """Return the method of an object on the list: those with which a frontier rebuilds its strategies and its
    bounds."""
    if name not in ("at", "bounds") or type(owner).__name__ not in READABLE.get(type(owner).__module__, ()):
        raise pickle.UnpicklingError(f"{name} of {type(owner).__name__} is no part of a search")
    return getattr(owner, name)


class KeptFrontiers:
    """The kept steps of one search.

    Args:
        folder: the folder of all searches; None keeps nothing.
        key: identifies everything that decides what this search finds.
    """

    def __init__(self, folder: Path | None = None, key: str = ""):
        self.all = folder
        self.folder = None if folder is None else folder / key
        self._step = 0

    def each(
        self, work: Callable[[int], SpacePart], numbers: Sequence[int], tables: Callable[[int], CostTables]
    ) -> list[SpacePart]:
        """Run ``work`` on each of some spaces, in forks; for kept spaces, return what was found then.

        Args:
            tables: returns the tables of a space; what was found in tables with other numbers (timed anew) is
                ignored.
        """
        self._step += 1
        self._tables = tables
        found = {number: self._read(number) for number in numbers}
        left = [number for number, part in found.items() if part is None]
        made = dict(zip(left, in_forks(self._kept(work), left), strict=True))
        return [found[number] or made[number] for number in numbers]

    def _kept(self, work: Callable[[int], SpacePart]) -> Callable[[int], SpacePart]:
        # Written where it was found, before the others of this step are: one of them may be interrupted.
        def kept(number: int) -> SpacePart:
            part = work(number)
            self._write(number, part)
            return part

        return kept

    def _path(self, number: int) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{self._step}-{number}-{self._tables(number).digest[:16]}.pickle.gz"

    def _read(self, number: int) -> SpacePart | None:
        path = self._path(number)
        if path is None:
            return None
        # Missing, or damaged in whatever way: treated as missing.
        with contextlib.suppress(Exception):
            with gzip.open(path) as file:
                part = PartReader(file).load()
            os.utime(path.parent)
            return part if isinstance(part, SpacePart) and part.number == number else None
        return None

    def _write(self, number: int, part: SpacePart) -> None:
        path = self._path(number)
        if path is None:
            return
        # What cannot be written is searched once more the next time. Costs of equal layers repeat: a fortieth
        # of the bytes is left, in a second per 500 MB.
        with (
            contextlib.suppress(TensorOptError),
            written_whole(path) as written,
            open(written, "wb") as file,
            gzip.GzipFile("", "wb", 1, file, 0) as packed,
        ):
            pickle.dump(part, packed, pickle.HIGHEST_PROTOCOL)

    def remove_old(self) -> None:
        """Remove the searches unused for longest, if there are more than may be kept."""
        if self.all is None:
            return
        with contextlib.suppress(OSError):  # another process may remove them too
            folders = sorted(self.all.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            total = 0
            for folder in folders:
                total += sum(path.stat().st_size for path in folder.iterdir())
                if total > MOST_BYTES:
                    shutil.rmtree(folder, ignore_errors=True)
