"""Bounds: a time that no strategy within a memory budget can beat.

The hull's lines are one kind of bound (:mod:`tensoropt.search.hull`). A staircase is another, once a search
has shown that nothing lies below it; and bounds for parts of the strategies can be combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.types import Floats

ROUNDING = 1e-3
"""The share of an allowed gap that is reserved for rounding costs to the grid (``bands.RESOLUTION``), so that
the proven gap does not exceed the allowed one."""


class Bound(Protocol):
    """A bound that no strategy can beat."""

    def bounds(self, memory: Floats) -> Floats:
        """(n,) a time that no strategy within each of these budgets can beat; inf if none fits."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Staircase:
    """A staircase as a bound; ``memory`` (n,) ascends, ``time`` (n,) strictly descends; its points need not
    be strategies."""

    memory: Floats
    time: Floats

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the time of the last step within each budget; inf below the first."""
        return np.append(np.inf, self.time)[np.searchsorted(self.memory, memory, side="right")]


@dataclass(frozen=True, eq=False, slots=True)
class Highest:
    """The highest of several bounds of the same strategies."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the highest of the parts' bounds."""
        return np.max([part.bounds(memory) for part in self.parts], axis=0)


@dataclass(frozen=True, eq=False, slots=True)
class Lowest:
    """The lowest of the bounds of separate sets of strategies."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the lowest of the parts' bounds."""
        return np.min([part.bounds(memory) for part in self.parts], axis=0)


def lowered(known: Points, epsilon: float) -> Staircase:
    """The staircase below which only those strategies lie that are faster than the known ones by more than
    the share ``epsilon``, within their memory."""
    return Staircase(known.memory, known.time / (1.0 + epsilon * (1.0 - ROUNDING)))
