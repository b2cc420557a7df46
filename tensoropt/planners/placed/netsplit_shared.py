"""NetSplit's program of placement and schedule, in which operators may share a device in time.

As published, it times every operator by itself, forward and backward, and nothing keeps a device from doing
several things at a time. Otherwise than published: groups of operators that share a device are joined along
the heaviest edges within limits of ours (:func:`.common.contraction.share_devices`), at most two for each
device; memory is a rule of ours, the sum of what is stored and kept between forward and backward
(:mod:`.exact.rules`); CP-SAT solves it instead of Gurobi. The answer is the program's
(:mod:`.exact.place`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.contraction import contract, share_devices
from tensoropt.planners.placed.common.units import PlacedAnswer, limited
from tensoropt.planners.placed.exact.place import ExactProgram, place_exactly
from tensoropt.planners.placed.exact.rules import Rules

_GROUPS_PER_DEVICE = 2
"""As published, at most 2n groups. n is read as the number of devices; twice the operators would be no
limit."""


@dataclass(frozen=True, kw_only=True)
class NetSplitShared:
    """The settings of the planner.

    Attributes:
        seconds: the solver's time; an assumption about how long a person waits.
    """

    seconds: float = 60.0


DEFAULTS = NetSplitShared()


def place(
    problem: PlacementProblem,
    memory_limit_bytes: float | None,
    seed: int,
    settings: NetSplitShared = DEFAULTS,
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
        note = f"{problem.size} operators in {len(groups)} groups, each on one device"
        grouped = replace(problem, together=(*problem.together, *groups))
    program = ExactProgram(
        name="netsplit_shared",
        rules=Rules(exclusive=False),
        seconds=settings.seconds,
        promise="it lets operators share a device",
        note=note,
    )
    one_by_one = contract(grouped, [[o] for o in range(problem.size)])
    return place_exactly(problem, one_by_one, seed, program).placed
