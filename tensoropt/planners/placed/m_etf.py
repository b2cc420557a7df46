"""m-ETF: earliest task first, with a cap of memory per device.

B. Jeon et al., *Baechi: Fast Device Placement of Machine Learning Graphs*, SoCC 2020, section 3.1 (m-ETF).
"""

from __future__ import annotations

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.earliest import Forward, earliest_first
from tensoropt.planners.placed.placing import Memory, PlacedAnswer, in_time, settle, units_of
from tensoropt.planners.placed.timetable import backward_starts


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Forward by earliest task first; backward where forward is, as it becomes ready.

    Raises:
        InfeasibleError: an operator has no room on any device when its turn comes.
    """
    units = units_of(problem)

    def attempt(memory: Memory) -> PlacedAnswer:
        return PlacedAnswer(placement_of(problem, earliest_first(problem, units, memory)))

    return settle("m_etf", problem, units, memory_limit_bytes, attempt)


def placement_of(problem: PlacementProblem, forward: Forward) -> Placement:
    """Orders from a schedule of forward."""
    device, count = forward.device, problem.devices.count
    backward = None
    if problem.training:
        starts = backward_starts(problem, device, forward.free_s)
        backward = in_time(device, starts, count, backward=True)
    return Placement(device, in_time(device, forward.starts, count), backward)
