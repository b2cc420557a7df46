"""NetSplit: placement and schedule of forward and backward by an exact program.

NetSplit's program after node co-placement, with limits on groups and a rule of memory of ours
(:mod:`.common.contraction`, :mod:`.exact.rules`), solved by OR-tools' CP-SAT instead of Gurobi. As published,
nothing keeps a device from doing several things at a time, so its schedules promise what no device does;
:mod:`.netsplit_shared` leaves it so, while this one has the rule, and a neighbourhood search after it. Every
answer is simulated and is its own: on a graph that has to be contracted a heuristic may be faster, and the
notes say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.place import place_exactly
from tensoropt.planners.placed.exact.rounds import ExactSettings
from tensoropt.planners.placed.exact.rules import Rules

_MOST_BLOCKS = 40
"""The most blocks that the program takes: over a few dozen it finds good schedules in a minute, over hundreds
hardly any.
"""
_TIME_LIMIT_S = 60.0
"""The solver's seconds; an assumption about how long a person waits."""
_SEARCH_LIMIT_S = 40.0
"""The search's seconds on the machine where its effort was measured; an assumption as well."""


@dataclass(frozen=True, kw_only=True)
class NetSplit:
    """The settings of the planner.

    Attributes:
        most_blocks: co-placement contracts larger graphs to so many blocks.
        seconds: the solver's time.
        search_seconds: the effort of the neighbourhood search, in seconds of the machine where it was
        measured.
        alpha: optimizer state per parameter byte in the memory rule, 2 for Adam; None for the model's.
            Every answer obeys it.
    """

    most_blocks: int = _MOST_BLOCKS
    seconds: float = _TIME_LIMIT_S
    search_seconds: float = _SEARCH_LIMIT_S
    alpha: float | None = None


DEFAULTS = NetSplit()


def place(
    problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: NetSplit = DEFAULTS
) -> PlacedAnswer:
    """Return the best placement found in time, with its proven gap in the notes.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: nothing found fits.
    """
    search = ExactSettings(
        name="netsplit",
        rules=Rules(alpha=settings.alpha),
        most_blocks=settings.most_blocks,
        seconds=settings.seconds,
        search_s=settings.search_seconds,
    )
    return place_exactly(limited(problem, memory_limit_bytes), seed, search)
