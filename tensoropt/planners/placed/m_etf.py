"""m-ETF: earliest task first, with a memory cap per device.

B. Jeon et al., *Baechi: Fast Device Placement of Machine Learning Graphs*, SoCC 2020, section 3.1 (m-ETF).
"""

from __future__ import annotations

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.earliest import earliest_first
from tensoropt.planners.placed.common.units import MemoryBook, PlacedAnswer, place_within_memory, units_of


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Place forward by earliest task first.

    Raises:
        InfeasibleError: an operator has no room on any device when its turn comes.
    """
    units = units_of(problem)

    def attempt(memory: MemoryBook) -> PlacedAnswer:
        return PlacedAnswer(earliest_first(problem, units, memory).placement(problem.devices.count))

    return place_within_memory("m_etf", problem, units, memory_limit_bytes, attempt)
