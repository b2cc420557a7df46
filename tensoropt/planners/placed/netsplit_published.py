"""NetSplit's program as published, where operators may share a device in time; see :mod:`.netsplit`."""

from __future__ import annotations

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed import netsplit
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.placed.netsplit import NetSplit

DEFAULTS = NetSplit(as_published=True)


def place(
    problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: NetSplit = DEFAULTS
) -> PlacedAnswer:
    """Place as :func:`tensoropt.planners.placed.netsplit.place` does, with the program as published."""
    return netsplit.place(problem, memory_limit_bytes, seed, settings)
