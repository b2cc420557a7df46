"""Arrays of cost tables, kept between runs under everything they depend on.

Tables of one mesh at the same prices are one value of the profile store, in which an array is looked up by
a hash of everything that its numbers follow from. Another allowed gap therefore reuses all of its tables, and
a model with one changed layer reuses those of the unchanged layers. Only numbers are kept; the objects that
they describe are rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.profiling.store import ProfileStore

MOST_BYTES = 1 << 28
"""The most bytes kept per mesh; more is not kept, since reading takes about as long as building. An
assumption."""


class TableArrays:
    """The arrays of one mesh at its prices, each built once.

    Args:
        store: keeps them between runs; None for none.
        key: everything that determines them, except what is passed with each array.
        in_memory: whether arrays that are in no store are kept for the lifetime of this object.
    """

    def __init__(self, store: ProfileStore | None = None, key: str = "", *, in_memory: bool = False):
        self.store, self.key = store, _hash(key)
        self.in_memory = in_memory or store is not None
        self._arrays: dict[str, np.ndarray] = {}
        self._made = 0
        if store is not None:
            self._arrays = store.get(self.key, "tables") or {}

    def once(self, depends_on: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a stored array, or build it now.

        Args:
            depends_on: everything that its numbers follow from, in addition to the key.
        """
        if not self.in_memory:
            return make()
        key = _hash(depends_on())
        if key not in self._arrays:
            self._arrays[key] = make()
            self._made += 1
        return self._arrays[key]

    def save(self) -> None:
        """Store the arrays if any was built; those that cannot be stored are built again the next time."""
        size = sum(array.nbytes for array in self._arrays.values())
        if self.store is None or not self._made or size > MOST_BYTES:
            return
        with contextlib.suppress(TensorOptError):
            self.store.put(self.key, self._arrays, "tables")
        self._made = 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
