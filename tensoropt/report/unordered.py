"""The step of a placed plan with its order and without: what enforcing the order is worth.

FastT (Yi et al., Middleware 2020, section 6.3) compares the two: a framework without enforced orders lets
every device take whatever operator is ready first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.placement.simulate import simulate_placement
from tensoropt.plan.kinds import PLACED
from tensoropt.report.detail import step_of
from tensoropt.units import format_bytes, format_seconds


@dataclass(frozen=True)
class UnorderedStep:
    """The step in which every device takes what is ready first, beside the one in the plan's order.

    Attributes:
        time_s, memory_bytes: without the order; the bytes are those of the fullest device.
        enforced_time_s, enforced_memory_bytes: with it, as the point has them.
        fits: whether every device has the memory for the step without the order.
    """

    time_s: float
    memory_bytes: float
    enforced_time_s: float
    enforced_memory_bytes: float
    fits: bool

    @property
    def change(self) -> float:
        """The time without the order over that with it, less 1."""
        return self.time_s / self.enforced_time_s - 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return {**asdict(self), "change": self.change}

    def lines(self) -> list[str]:
        """Return both steps in words."""
        return [
            f"in its order: {format_seconds(self.enforced_time_s)} per step, "
            f"{format_bytes(self.enforced_memory_bytes)} on the fullest device",
            f"without its order, every device taking what is ready first: {format_seconds(self.time_s)} "
            f"({100 * self.change:+.1f} %), {format_bytes(self.memory_bytes)}"
            + ("" if self.fits else ", which a device does not have"),
        ]


def point_unordered(exploration: Exploration, index: int) -> UnorderedStep:
    """Return the step of point ``index`` of ``exploration.all_points`` without its order, at the costs that
    were saved with it.

    Raises:
        TensorOptError: there is no such point, it is not placed, or the exploration was saved without what
            this needs.
    """
    step = step_of(exploration, index)
    if step.point.kind is not PLACED:
        placed = [n for n, point in enumerate(exploration.all_points, 1) if point.kind is PLACED]
        shown = ", ".join(map(str, placed[:10])) + (", ..." if len(placed) > 10 else "")
        remedy = f"choose one of the placed points: {shown}"
        if not placed:
            remedy = "no point here is: explore with --placements always, or recost with --planners dpos"
        raise TensorOptError(
            "only the order of a placed plan can be left free, as ranks of other plans compute the same "
            f"operators at the same time; point {index + 1} is a {step.point.kind.name}; {remedy}"
        )
    enforced, point = step.evaluated, step.point
    free = simulate_placement(enforced.problem, enforced.placement, enforced=False)
    # What a process takes beside tensors is the same in any order.
    beside_bytes = point.memory_bytes - enforced.memory_bytes
    return UnorderedStep(
        free.time_s, free.memory_bytes + beside_bytes, point.time_s, point.memory_bytes, free.fits()
    )
