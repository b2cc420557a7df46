"""m-ETF: earliest task first, with a memory cap per device.

B. Jeon et al., *Baechi: Fast Device Placement of Machine Learning Graphs*, SoCC 2020, section 3.1 (m-ETF).
"""

from __future__ import annotations

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.earliest import EarliestFirst
from tensoropt.planners.placed.common.units import PlacedAnswer, place_within_memory


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Place operators by earliest task first, within memory caps.

    Raises:
        InfeasibleError: an operator has no room on any device when its turn comes.
    """
    return place_within_memory(
        "m_etf", problem, memory_limit_bytes, lambda memory: EarliestFirst(problem, memory).placement()
    )
