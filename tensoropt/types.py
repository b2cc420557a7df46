"""Types that several stages share: arrays by element type, sources of seconds, reports of progress."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

SOURCES = MEASURED, FITTED, DATA_SHEET = "measured", "fitted", "data sheet"
"""The sources that seconds can have, the most trusted first."""


class Progress(Protocol):
    """Is called while a long stage goes on, so that people see how far it is."""

    def __call__(self, stage: str, done: int, total: int, what: str, /) -> None:
        """Take note that ``done`` of ``total`` parts of a stage are finished.

        Args:
            stage: the stage's name, the same in all its reports.
            done: 0 in the first report, ``total`` in the last.
            total: how many parts there are.
            what: what is worked on now, or what was found, in words.
        """


def silent(stage: str, done: int, total: int, what: str, /) -> None:
    """Show nothing; a :class:`Progress` for callers that nobody watches."""
