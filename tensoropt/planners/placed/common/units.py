"""Units: operators that must share a device, treated as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem
from tensoropt.types import Floats


@dataclass(frozen=True)
class Units:
    """Operators that must share a device, treated as one.

    Attributes:
        of: the unit of each operator.
        members: the operators of each unit, ascending.
        allowed: (units, devices) where each may lie, by the pins of all members and the devices that can run
            them all.
        bytes: (units,) the bytes each adds to its device for a whole step.
        transient_bytes: (units,) the bytes that its largest operator needs on top while it runs.
    """

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    allowed: NDArray[np.bool_]
    bytes: Floats
    transient_bytes: Floats

    @cached_property
    def choices(self) -> tuple[NDArray[np.intp], ...]:
        """The devices that each unit may lie on, ascending."""
        return tuple(np.flatnonzero(row) for row in self.allowed)


def units_of(problem: PlacementProblem) -> Units:
    """Return the units of a problem.

    Raises:
        InfeasibleError: operators that belong together have no common device; the message names them.
    """
    root = list(range(problem.size))

    def find(operator: int) -> int:
        while root[operator] != operator:
            # Path halving keeps union-find nearly linear.
            root[operator] = root[root[operator]]
            operator = root[operator]
        return operator

    for group in problem.together:
        for other in group[1:]:
            # The first operator stands for its unit, so that units come in the order of execution.
            a, b = sorted((find(group[0]), find(other)))
            root[b] = a
    heads = [find(operator) for operator in range(problem.size)]
    number = {head: i for i, head in enumerate(dict.fromkeys(heads))}
    of = tuple(number[head] for head in heads)
    members: list[list[int]] = [[] for _ in number]
    for operator, unit in enumerate(of):
        members[unit].append(operator)
    lasting, transient = np.zeros(len(members)), np.zeros(len(members))
    for operator, unit in enumerate(of):
        lasting[unit] += problem.step_bytes(operator)
        transient[unit] = max(transient[unit], transient_bytes(problem, operator))
    return Units(of, tuple(map(tuple, members)), _allowed(problem, members), lasting, transient)


def transient_bytes(problem: PlacementProblem, operator: int) -> float:
    """Return the bytes that an operator needs while it runs, beside what it adds for the whole step.

    In forward these are the tensors at its ends that nobody keeps, in backward the gradients at its ends.
    """
    ends = [problem.tensors[t] for t in (*problem.read[operator], *problem.made[operator])]
    passing = (t for t in ends if not t.kept_by and not (t.stored and t.producer == operator))
    forward = problem.forward_peak_bytes[operator] + sum(t.bytes for t in passing)
    backward = problem.backward_peak_bytes[operator] + sum(t.bytes for t in ends if t.gradient)
    return float(max(forward, backward if problem.training else 0.0))


def _allowed(problem: PlacementProblem, members: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    # Times of inf say that a device cannot run an operator.
    possible = np.isfinite(problem.forward_s + problem.backward_s + problem.update_s)
    pins = np.ones_like(possible)
    for operator, devices in problem.pinned:
        mask = np.zeros(problem.devices.count, bool)
        mask[list(devices)] = True
        pins[operator] &= mask
    both = possible & pins
    # This is the usual case; a search over cuts prices hundreds of graphs.
    if both.all():
        return np.ones((len(members), problem.devices.count), bool)
    allowed = np.array([both[list(m)].all(axis=0) for m in members])
    for unit, operators in enumerate(members):
        if not allowed[unit].any():
            sides = "; ".join(
                f"{problem.names[o]} on {_devices(np.flatnonzero(possible[o] & pins[o]))}"
                for o in operators
                if not (possible[o] & pins[o]).all()
            )
            raise InfeasibleError(
                f"no device is allowed to all operators that belong together: {sides}; "
                "loosen a pin or take them apart"
            )
    return allowed


def _devices(numbers: Sequence[int] | NDArray[np.intp]) -> str:
    return "device " + ", ".join(map(str, numbers)) if len(numbers) else "no device"
