"""Published planners, to compare with the frontier, all with one signature and one simulator."""

from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.registry import ENTRIES, Entry, planner

PLANNERS: dict[str, str] = {
    "frontier": "frontier tracking: every trade-off of memory and time that no other strategy beats",
    **{name: entry.about for name, entry in ENTRIES.items()},
}

__all__ = ["ENTRIES", "PLANNERS", "Entry", "UnsuitableError", "planner"]
