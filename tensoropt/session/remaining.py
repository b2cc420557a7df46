"""The remaining time of an exploration, from the kind of its parts and from how long the previous ones took.

The seconds that parts are expected to take are one machine's; the pace of another machine follows from the
finished parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tensoropt.costs.expected import search_s
from tensoropt.costs.tables import CostTables
from tensoropt.profiling.eta import rounded

START_S = 3.0
"""Seconds at the expected pace that are added to those of the finished parts, so that the first part does not
decide alone; an assumption."""
LEAST_LEFT = 0.3
"""When a part takes longer than expected, at least this share of what was left at its beginning is reported
as left; an assumption."""
LIKE_OUTLINE = 8.0
"""The least factor by which a search takes longer than its outline."""
LIKE_WIDEST = 2.0
"""The factor by which the search of a wide mesh over several levels takes longer than that of the widest
other mesh."""
SIMULATE_S = 0.02
"""The seconds per variable to simulate neighbours and to make points."""


class Remaining:
    """The remaining seconds of the announced parts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left: dict[str, float] = {}
        self._done_s = self._took_s = START_S
        self._since = clock()

    def expect(self, part: str, seconds: float) -> None:
        """Announce the remaining seconds of a part; fewer than before if some of it was done since."""
        now = self._clock()
        done_s = self._left.get(part, 0.0) - seconds
        if done_s > 0:
            self._done_s += done_s
            self._took_s += now - self._since
        self._left[part] = seconds
        self._since = now

    @property
    def left_s(self) -> float:
        """Return the remaining seconds of all parts."""
        left_s = sum(self._left.values()) * self._took_s / self._done_s
        return max(left_s - (self._clock() - self._since), LEAST_LEFT * left_s)

    @property
    def words(self) -> str:
        """Return ``about 20 s left``; empty if nothing was announced."""
        return f"about {rounded(self.left_s)} left" if any(self._left.values()) else ""


def outlined_s(tables: CostTables, outline_s: float) -> float:
    """Return the seconds that the search of a space takes, given those of its outline."""
    return max(search_s(tables), LIKE_OUTLINE * outline_s)


def wide_s(levels: int, tables: Sequence[CostTables]) -> float:
    """Return the seconds that a space of a wide mesh takes, given the tables of the others."""
    # Inside one level it mostly brings nothing, so that it is outlined only.
    return (LIKE_WIDEST if levels > 1 else 1.0) * max(map(search_s, tables))


def simulate_s(tables: CostTables) -> float:
    """Return the seconds from the last search to the exploration."""
    return SIMULATE_S * len(tables.variables)
