"""NetSplit as published: its program (5-11)–(5-18) over the groups of its Algorithm 3.

Node co-placement leaves at most two groups for each device: the operators of a group share a device and
nothing else, as the program times every operator by itself, forward and backward. Nothing keeps a device from
doing several things at a time, and memory is the program's own rule (5-18), which sums what is alive between
forward and backward. CP-SAT solves it instead of Gurobi. The answer is the program's
(:mod:`.exact.published`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.contraction import contract, share_devices
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.published import PublishedProgram, place_as_published
from tensoropt.planners.placed.exact.rules import Rules

_GROUPS_PER_DEVICE = 2
"""Algorithm 3: at most 2n groups. n is read as the number of devices; twice the operators would be no
limit."""


@dataclass(frozen=True, kw_only=True)
class NetSplitPublished:
    """The settings of the planner.

    Attributes:
        seconds: the solver's time; an assumption about how long a person waits.
        alpha: optimizer state per parameter byte in the memory rule (5-18), 2 for Adam; None for the model's.
    """

    seconds: float = 60.0
    alpha: float | None = None


DEFAULTS = NetSplitPublished()


def place(
    problem: PlacementProblem,
    memory_limit_bytes: float | None,
    seed: int,
    settings: NetSplitPublished = DEFAULTS,
) -> PlacedAnswer:
    """Return the program's own answer; the notes say what it promises, and which heuristic is faster.

    Raises:
        MissingExtraError: OR-tools is not installed.
        InfeasibleError: the program finds nothing that fits when simulated.
    """
    problem = grouped = limited(problem, memory_limit_bytes)
    most = _GROUPS_PER_DEVICE * problem.devices.count
    note = ""
    if problem.size > most:
        groups = share_devices(problem, most)
        note = f"{problem.size} operators in {len(groups)} groups, each on one device (Algorithm 3)"
        grouped = replace(problem, together=(*problem.together, *groups))
    published = PublishedProgram(
        name="netsplit_published",
        rules=Rules(exclusive=False, alpha=settings.alpha),
        seconds=settings.seconds,
        knows_memory=True,
        promise="it lets operators share a device",
        note=note,
    )
    one_by_one = contract(grouped, [[o] for o in range(problem.size)])
    return place_as_published(problem, one_by_one, seed, published)
