"""The seconds spent per stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StageClock:
    """A clock that records how long each stage took.

    Attributes:
        seconds: the seconds of each stage, in the order in which the stages ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those recorded under this name."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
