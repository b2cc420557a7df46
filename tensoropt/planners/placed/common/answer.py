"""The answer of a placing method: a placement, and notes about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.placement import Placement


@dataclass(frozen=True)
class PlacedAnswer:
    """The answer of a placing method.

    Attributes:
        placement: the placement, within the capacity and the limit when simulated.
        notes: the method's remarks: what was approximated, tightened, or left unproven.
        expected_s: the method's own estimate of the step in seconds; None if it makes none.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
    expected_s: float | None = None


def orders_by_start(
    device: Sequence[int], starts: Sequence[float], count: int, *, backward: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return the operators of each device, ordered by their start; ties in the order of dependence."""
    orders: list[list[int]] = [[] for _ in range(count)]
    for operator in sorted(range(len(device)), key=lambda o: (starts[o], -o if backward else o)):
        orders[device[operator]].append(operator)
    return tuple(map(tuple, orders))
