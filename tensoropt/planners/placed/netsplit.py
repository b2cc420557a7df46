"""NetSplit: placement and schedule of forward and backward by an exact program.

NetSplit's program after node co-placement, with limits on groups and a rule of memory of ours
(:mod:`.common.contraction`, :mod:`.exact.rules`), solved by OR-tools' CP-SAT instead of Gurobi. As published,
nothing keeps a device from doing several things at a time (:mod:`.netsplit_shared`); this one has the rule.
Over the blocks of a large graph the program knows few placements, so :mod:`.local_search` goes on from its
answer and from the heuristics' placements.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.place import SHARE, ExactProgram, contracted, place_exactly
from tensoropt.planners.placed.exact.rules import Rules
from tensoropt.planners.placed.local_search import LocalSearch, simulated_places

_NAME = "netsplit"
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
        search_seconds: the effort of the search after it, in seconds of the machine where it was measured.
    """

    most_blocks: int = _MOST_BLOCKS
    seconds: float = _TIME_LIMIT_S
    search_seconds: float = _SEARCH_LIMIT_S


DEFAULTS = NetSplit()


def place(
    problem: PlacementProblem, memory_limit_bytes: float | None, seed: int, settings: NetSplit = DEFAULTS
) -> PlacedAnswer:
    """Return the fastest placement found in time.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: nothing found fits.
    """
    problem = limited(problem, memory_limit_bytes)
    contraction = contracted(problem, settings.most_blocks)
    blocks = len(contraction.groups)
    program = ExactProgram(
        name=_NAME,
        rules=Rules(),
        seconds=settings.seconds,
        note=f"{problem.size} operators contracted to {blocks} blocks by co-placement"
        if blocks < problem.size
        else "",
    )
    known, notes = list(heuristics(problem, seed)), tuple[str, ...]()
    try:
        exact = place_exactly(problem, contraction, seed, program)
    except InfeasibleError as refusal:
        notes = (f"its program found nothing that fits: {refusal}",)
    else:
        if exact.proven:
            return exact.placed
        known.append(("the program", exact.simulated.placement))
        notes = exact.notes
    share = SHARE if problem.micro_batches > 1 else 1.0
    search = LocalSearch(seconds=share * settings.search_seconds)
    found, searched = simulated_places(_NAME, problem, None, seed, search, known)
    return PlacedAnswer(found[-1].placement, (*notes, *searched))
