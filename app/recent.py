"""A thread-safe cache of the most recently used values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recent:
    """The most recently used values by key; thread-safe."""

    size: int = 16
    _kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: Any, make: Any) -> Any:
        """Return the value of ``key``; if missing, make and cache it. Errors of ``make`` are not cached."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # Outside the lock: a frontier takes seconds to make, and other requests must not wait. Two
        # simultaneous requests both make it, which only costs time.
        value = make()
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > self.size:
                self._kept.popitem(last=False)
        return value
