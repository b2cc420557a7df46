"""Types that several stages share: arrays, sources of predicted durations, callbacks for progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

SOURCES = MEASURED, FITTED, DATA_SHEET = "measured", "fitted", "data sheet"
"""The sources of predicted durations, the most trusted first."""


_Content = TypeVar("_Content")


@dataclass(frozen=True, eq=False)
class Itself(Generic[_Content]):
    """A cache key for an object that is slow or impossible to compare: equal only for the same object."""

    content: _Content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.content is self.content

    def __hash__(self) -> int:
        return id(self.content)


class Progress(Protocol):
    """The type of callbacks through which long stages report progress."""

    def __call__(self, stage: str, done: int, total: int, what: str, /) -> None:
        """Report that ``done`` of ``total`` parts of a stage are finished.

        Args:
            stage: the stage's name, the same in all its reports.
            done: 0 in the first report, ``total`` in the last.
            total: the number of parts.
            what: the current work, or its result, in words.
        """


def silent(stage: str, done: int, total: int, what: str, /) -> None:
    """Report no progress: the :class:`Progress` callback that does nothing."""


ProgressChoice = Progress | bool | None
"""How to show progress: a callback; True for a bar, False for nothing, None for a bar if a person is watching
(:func:`tensoropt.console.shows_progress`)."""


def heard(progress: ProgressChoice) -> Progress:
    """Return the given callback for progress, or :func:`silent` for True, False or None."""
    return progress if callable(progress) else silent
