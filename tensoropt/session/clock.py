"""Seconds spent per stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StageClock:
    """A clock that notes how long each stage took.

    Attributes:
        seconds: by stage, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the seconds of the block under this name, beside those noted before."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
