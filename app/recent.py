"""A memory of the last few values that were used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recent:
    """The last few values that were used, by key; safe between threads."""

    size: int = 16
    _kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Any, make: Any) -> Any:
        """Return the value of ``key``, made now if necessary; a value that cannot be made is not
        remembered."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # Outside the lock: a frontier takes seconds to make, and other requests must not wait for it. Two
        # that ask at once both make it, which costs time but no harm.
        value = make()
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)
        return value

    def forget(self, key: Any) -> None:
        """Forget the value of ``key``, if it is remembered."""
        with self._lock:
            self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)
