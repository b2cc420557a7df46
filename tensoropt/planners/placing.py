"""What the placing planners share.

    place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer

Every placing method is a module with this function: numbers in, devices and orders out. The judge
(:func:`tensoropt.plan.placed.play_placement`) plays what comes out; nobody prices itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.plan.placed import Placement


@dataclass(frozen=True)
class PlacedAnswer:
    """What a placing method answers.

    Attributes:
        placement: within the capacity and the limit under the judge.
        notes: what the method says of it: what was approximated, tightened, or left unproven.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
