"""The seconds that parts of an exploration are expected to take."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.costs.expected import search_s
from tensoropt.costs.tables import CostTables

LIKE_OUTLINE = 8.0
"""The least factor by which a search takes longer than its outline."""
LIKE_WIDEST = 2.0
"""The factor by which the search of a wide mesh over several levels takes longer than that of the widest
other mesh."""
SIMULATE_S = 0.02
"""The seconds per variable to simulate neighbours and to make points."""


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
