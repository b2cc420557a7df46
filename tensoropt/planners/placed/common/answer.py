"""What a placing method answers: a placement, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.placement import Placement


@dataclass(frozen=True)
class PlacedAnswer:
    """What a placing method answers.

    Attributes:
        placement: within the capacity and the limit under the simulator.
        notes: what the method says of it: what was approximated, tightened, or left unproven.
        expected_s: the method's own estimate of the step; None where it makes none.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
    expected_s: float | None = None


def orders_by_start(
    device: Sequence[int], starts: Sequence[float], count: int, *, backward: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Per device its operators by their start; ties in the order of dependence."""
    orders: list[list[int]] = [[] for _ in range(count)]
    for operator in sorted(range(len(device)), key=lambda o: (starts[o], -o if backward else o)):
        orders[device[operator]].append(operator)
    return tuple(map(tuple, orders))
