"""How long an exploration still takes, from what its parts are like and how long those before them took.

Seconds that parts are expected to take are one machine's; another's pace comes out of the parts that are
done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tensoropt.costs.expected import search_s
from tensoropt.costs.tables import CostTables
from tensoropt.profiling.eta import rounded

START_S = 3.0
"""Seconds at the expected pace that count beside those of the parts that are done, so that the first part
does not decide alone; an assumption."""
LEAST_LEFT = 0.3
"""The share that is left at least of what was left when a part began that takes longer than expected; an
assumption."""
LIKE_OUTLINE = 8.0
"""A search takes at least so many times as long as its outline."""
LIKE_WIDEST = 2.0
"""The search of a wide mesh over several levels takes so many times as long as that of the widest other."""
SIMULATE_S = 0.02
"""Seconds per variable in which neighbours are simulated and points are made."""


class Remaining:
    """Seconds that are left of the parts that have been announced."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._left: dict[str, float] = {}
        self._done_s = self._took_s = START_S
        self._since = clock()

    def expect(self, part: str, seconds: float) -> None:
        """Seconds that are left of a part; less than before of a part where some of it was done since."""
        now = self._clock()
        done_s = self._left.get(part, 0.0) - seconds
        if done_s > 0:
            self._done_s += done_s
            self._took_s += now - self._since
        self._left[part] = seconds
        self._since = now

    @property
    def left_s(self) -> float:
        """Seconds that are left of all parts."""
        left_s = sum(self._left.values()) * self._took_s / self._done_s
        return max(left_s - (self._clock() - self._since), LEAST_LEFT * left_s)

    @property
    def words(self) -> str:
        """``about 20 s left``; nothing where nothing was announced."""
        return f"about {rounded(self.left_s)} left" if any(self._left.values()) else ""


def outlined_s(tables: CostTables, outline_s: float) -> float:
    """Seconds that the search of a space takes whose outline took so long."""
    return max(search_s(tables), LIKE_OUTLINE * outline_s)


def wide_s(levels: int, tables: Sequence[CostTables]) -> float:
    """Seconds that a space of a wide mesh takes, given the tables of the others."""
    # Inside one level it mostly brings nothing, so that it is outlined only.
    return (LIKE_WIDEST if levels > 1 else 1.0) * max(map(search_s, tables))


def simulate_s(tables: CostTables) -> float:
    """Seconds from the last search to the exploration."""
    return SIMULATE_S * len(tables.variables)
