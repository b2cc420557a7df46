"""Bounds: a time that no strategy within a memory budget can beat.

The hull's lines are one (:mod:`tensoropt.search.hull`). A staircase is another where a search has shown that
nothing lies below it, and bounds of parts of the strategies are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tensoropt.frontier.tools import Points
from tensoropt.types import Floats

ROUNDING = 1e-3
"""Of an allowed gap: so much of it is left for rounding of costs to the grid (``bands.RESOLUTION``), so that
what is proven is not above what was allowed."""


class Bound(Protocol):
    """What no strategy can beat."""

    def bounds(self, memory: Floats) -> Floats:
        """(n,) a time that no strategy within each of these budgets can beat; inf where none fits."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Staircase:
    """``memory`` (n,) ascending, ``time`` (n,) strictly descending; not always strategies."""

    memory: Floats
    time: Floats

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the time of the last step within each budget; inf below the first."""
        return np.append(np.inf, self.time)[np.searchsorted(self.memory, memory, side="right")]


@dataclass(frozen=True, eq=False, slots=True)
class Highest:
    """Bounds of the same strategies, of which the highest counts."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the highest of the parts' bounds."""
        return np.max([part.bounds(memory) for part in self.parts], axis=0)


@dataclass(frozen=True, eq=False, slots=True)
class Lowest:
    """Bounds of strategies apart from each other, of which the lowest counts."""

    parts: Sequence[Bound]

    def bounds(self, memory: Floats) -> Floats:
        """(n,) the lowest of the parts' bounds."""
        return np.min([part.bounds(memory) for part in self.parts], axis=0)


def lowered(known: Points, epsilon: float) -> Staircase:
    """The staircase that only strategies lie below which are faster than the known ones by more than the
    share ``epsilon``, within their memory."""
    return Staircase(known.memory, known.time / (1.0 + epsilon * (1.0 - ROUNDING)))
