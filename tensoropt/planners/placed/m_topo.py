"""m-TOPO: a topological order cut into as many pieces of equal memory as there are devices.

B. Jeon et al., *Baechi: Fast Device Placement of Machine Learning Graphs*, SoCC 2020, section 3.1 (m-TOPO).
Operators are taken in a topological order, here the model's own order of execution, and fill one device after
the other. Operators that must share a device are placed together with the first of them. If no later device
has its share free, because of pins or a limit below the share, operators go to the first device with room.
"""

from __future__ import annotations

import numpy as np

from tensoropt.placement import Placement, PlacementProblem
from tensoropt.planners.placed.common.units import (
    MemoryBook,
    NoRoomError,
    PlacedAnswer,
    place_within_memory,
)


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Cut the topological order into pieces of equal memory, one for each device.

    Raises:
        InfeasibleError: an operator has no room on any device when its turn comes.
    """

    def attempt(memory: MemoryBook) -> Placement:
        units = memory.units
        # A device's cap, section 3.1: an equal share of the memory, with the largest operator's on top.
        share = float(units.bytes.sum()) / problem.devices.count + float(units.bytes.max(initial=0.0))
        current = 0
        for unit in units.of:
            if memory.device[unit] >= 0:
                continue
            size, allowed = units.bytes[unit], units.allowed[unit]
            open_ones = np.flatnonzero(allowed & memory.room(unit)).tolist()
            next_ones = [d for d in open_ones if d >= current and memory.used[d] + size <= share]
            if not open_ones:
                raise NoRoomError(unit)
            chosen = (next_ones or open_ones)[0]
            memory.book(unit, chosen)
            # Operators pinned to a later device do not take the others with them.
            if allowed.all():
                current = max(current, chosen)
        return Placement.in_order((memory.device[unit] for unit in units.of), problem.devices.count)

    return place_within_memory("m_topo", problem, memory_limit_bytes, attempt)
