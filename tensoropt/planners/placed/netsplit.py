"""NetSplit: placement and schedule of forward and backward by an exact program.

NetSplit's program (5-11)–(5-18) after node co-placement (Algorithm 3), solved by OR-tools' CP-SAT instead of
Gurobi. As published, nothing keeps a device from doing several things at a time, so its schedules promise
what no device does; :mod:`.netsplit_published` is that program, while this one has the rule. Every answer is
simulated, and is never slower in the simulation than the best heuristic's.
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


@dataclass(frozen=True, kw_only=True)
class NetSplit:
    """The settings of the planner.

    Attributes:
        as_published: whether to leave out the rule that a device and a lane do one thing at a time.
        most_blocks: co-placement contracts larger graphs to so many blocks.
        seconds: the solver's time.
        alpha: optimizer state per parameter byte in the memory rule (5-18), 2 for Adam; None for the model's.
            Every answer obeys it, including the heuristics' placements.
    """

    as_published: bool = False
    most_blocks: int = _MOST_BLOCKS
    seconds: float = _TIME_LIMIT_S
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
        name="netsplit_published" if settings.as_published else "netsplit",
        rules=Rules(exclusive=not settings.as_published, alpha=settings.alpha),
        most_blocks=settings.most_blocks,
        seconds=settings.seconds,
    )
    return place_exactly(limited(problem, memory_limit_bytes), seed, search)
