"""Units (sets of operators that must share a device), and placing them within the devices' memory.

Methods estimate memory as the papers do: the sum of the bytes held for a whole step, plus the largest
transient bytes (Baechi: Jeon et al., SoCC 2020, section 4). The simulator follows every tensor and may find
more memory, so a method runs with lower and lower caps until its placement fits when simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, simulate_placement
from tensoropt.placement.problem import common_devices
from tensoropt.types import Floats
from tensoropt.units import format_bytes


@dataclass(frozen=True)
class Units:
    """Sets of operators that must share a device, each set treated as one.

    Attributes:
        of: the unit of each operator.
        members: the operators of each unit, ascending.
        allowed: whether each unit may lie on each device, (units, devices): pins permit all members there,
            and the device can run them.
        bytes: the bytes that each unit takes on its device for a whole step, (units,).
        transient_bytes: the further bytes that a unit's largest operator needs while it runs, (units,).
        by_priority: the devices on which each unit may lie, best first.
    """

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    allowed: NDArray[np.bool_]
    bytes: Floats
    transient_bytes: Floats
    by_priority: tuple[tuple[int, ...], ...]


def units_of(problem: PlacementProblem) -> Units:
    """Return the units of a placement problem: the sets of operators that must share a device.

    Raises:
        InfeasibleError: no device can hold all operators of a unit. The message names the operators.
    """
    joined = nx.Graph()
    joined.add_nodes_from(range(problem.size))
    for group in problem.together:
        nx.add_path(joined, group)
    # By their first operators, so that units come in the order of execution.
    members = sorted(map(sorted, nx.connected_components(joined)))
    unit_of = [0] * problem.size
    for unit, operators in enumerate(members):
        for operator in operators:
            unit_of[operator] = unit
    lasting, transient = np.zeros(len(members)), np.zeros(len(members))
    for operator, unit in enumerate(unit_of):
        lasting[unit] += problem.step_bytes(operator)
        transient[unit] = max(transient[unit], _transient_bytes(problem, operator))
    pins: dict[int, list[tuple[int, ...]]] = {}
    for operator, devices in problem.pinned:
        pins.setdefault(unit_of[operator], []).append(devices)
    allowed, order = _allowed(problem, members, unit_of), problem.devices.best_first
    by_priority = tuple(
        tuple(device for device in common_devices(pins.get(unit, [order]), order) if row[device])
        for unit, row in enumerate(allowed.tolist())
    )
    return Units(tuple(unit_of), tuple(map(tuple, members)), allowed, lasting, transient, by_priority)


def _transient_bytes(problem: PlacementProblem, operator: int) -> float:
    """Return the bytes that an operator needs only while it runs: in forward its workspace, inputs and
    outputs that backward does not need; in backward its workspace and gradients.
    """
    ends = [problem.tensors[t] for t in (*problem.read[operator], *problem.made[operator])]
    passing = (t for t in ends if not t.kept_by and not (t.stored and t.producer == operator))
    forward = problem.forward_peak_bytes[operator] + sum(t.bytes for t in passing)
    backward = problem.backward_peak_bytes[operator] + sum(t.bytes for t in ends if t.gradient)
    return float(max(forward, backward if problem.training else 0.0))


def _allowed(
    problem: PlacementProblem, members: Sequence[Sequence[int]], unit_of: Sequence[int]
) -> NDArray[np.bool_]:
    allowed = np.ones((len(members), problem.devices.count), bool)
    np.logical_and.at(allowed, unit_of, problem.allowed)
    for unit in np.flatnonzero(~allowed.any(axis=1)).tolist():
        sides = "; ".join(
            f"{problem.names[o]} on {_devices(np.flatnonzero(problem.allowed[o]))}"
            for o in members[unit]
            if not problem.allowed[o].all()
        )
        raise InfeasibleError(
            f"no device can hold all of these operators, which must share a device: {sides}; loosen a pin "
            "or let the operators be on different devices"
        )
    return allowed


def _devices(numbers: Sequence[int] | NDArray[np.intp]) -> str:
    return "device " + ", ".join(map(str, numbers)) if len(numbers) else "no device"


class MemoryBook:
    """The estimated memory of each device while a method places operators.

    Attributes:
        units: the units (sets of operators that share a device) to place.
        caps: the bytes that may be used on each device, (devices,).
        device: the device of each unit; -1 if it has none yet.
        used: the bytes used on each device for the whole step, (devices,).
        transient: the most further bytes that an operator on each device needs while it runs, (devices,).
        counts_transients: whether ``transient`` counts against the caps, or only the simulator checks it.
    """

    def __init__(self, units: Units, caps: Floats, counts_transients: bool = True):
        self.units, self.caps, self.counts_transients = units, caps, counts_transients
        self.device = [-1] * len(units.members)
        self.used, self.transient = np.zeros(len(caps)), np.zeros(len(caps))

    def copy(self) -> MemoryBook:
        """Return an independent copy, in which a method can try placements."""
        copied = MemoryBook(self.units, self.caps, self.counts_transients)
        copied.device = self.device.copy()
        copied.used, copied.transient = self.used.copy(), self.transient.copy()
        return copied

    def room(self, unit: int) -> NDArray[np.bool_]:
        """Return whether a unit fits on each device, (devices,)."""
        return self.rooms(self.units.bytes[unit], self.units.transient_bytes[unit])

    def rooms(self, lasting: Floats, transient: Floats) -> NDArray[np.bool_]:
        """Return whether the given bytes fit on each device, (..., devices).

        Args:
            lasting, transient: (..., 1), or scalars; bytes for the whole step, and while an operator runs.
        """
        # The second try of place_within_memory, which leaves transient memory to the simulator.
        if not self.counts_transients:
            return self.used + lasting <= self.caps
        return self.used + lasting + np.maximum(self.transient, transient) <= self.caps

    def book(self, unit: int, device: int) -> None:
        self.device[unit] = device
        self.used[device] += self.units.bytes[unit]
        self.transient[device] = max(self.transient[device], self.units.transient_bytes[unit])


class NoRoomError(Exception):
    """No device has room for a unit. :func:`place_within_memory` turns this into an InfeasibleError."""

    def __init__(self, unit: int):
        super().__init__(unit)
        self.unit = unit


def limited(problem: PlacementProblem, memory_limit_bytes: float | None) -> PlacementProblem:
    """Return the problem with each device's capacity lowered to the memory limit of a process."""
    if memory_limit_bytes is None:
        return problem
    capacity = problem.devices.within(memory_limit_bytes)
    return replace(problem, devices=replace(problem.devices, capacity_bytes=capacity))


@dataclass(frozen=True)
class PlacedAnswer:
    """A placement that a planner found.

    Attributes:
        placement: the placement, whose simulated memory fits the devices and the limit.
        notes: the planner's remarks on what is approximated or unproven.
    """

    placement: Placement
    notes: tuple[str, ...] = ()


_ATTEMPTS = 12
"""The most runs of a method with less and less room before it is refused; an assumption."""


def place_within_memory(
    name: str, problem: PlacementProblem, limit: float | None, attempt: Callable[[MemoryBook], Placement]
) -> PlacedAnswer:
    """Run a method with lower and lower caps until its placement fits when simulated.

    If this fails, the method runs again without counting transient memory, which the simulator checks anyway.

    Args:
        attempt: the method: it records the units that it places in the given book.

    Raises:
        InfeasibleError: no such placement was found.
    """
    # The bytes booked for tensors in flight can exceed those alive at once, so that a method finds no room
    # though its placement would fit, and is run without them.
    most, units = problem.devices.within(limit), units_of(problem)

    def retry(counts_transients: bool) -> PlacedAnswer:
        caps = most.copy()
        for _ in range(_ATTEMPTS):
            memory = MemoryBook(units, caps.copy(), counts_transients)
            try:
                placement = attempt(memory)
            except NoRoomError as full:
                raise InfeasibleError(_refusal(name, problem, units, most, full.unit)) from None
            peaks = np.array(simulate_placement(problem, placement).peak_bytes)
            if (peaks <= most).all():
                return PlacedAnswer(placement)
            # The excess that the simulator sees over the booked bytes is taken off the cap, and never given
            # back, so that attempts do not go in circles.
            booked = memory.used + (memory.transient if counts_transients else 0.0)
            caps = np.where(peaks > most, np.minimum(caps, most - (peaks - booked)), caps)
        worst, in_all = int((peaks - most).argmax()), problem.devices.in_all
        raise InfeasibleError(
            f"{name} finds no plan within {format_bytes(in_all(most[worst]))}; after {_ATTEMPTS} attempts "
            f"with less room, device {worst} still reaches {format_bytes(in_all(peaks[worst]))}; raise the "
            "limit"
        )

    try:
        return retry(True)
    except InfeasibleError:
        return retry(False)


def _refusal(name: str, problem: PlacementProblem, units: Units, most: Floats, unit: int) -> str:
    in_all = problem.devices.in_all
    within = "the devices' capacities" if len(set(most)) > 1 else format_bytes(in_all(float(most[0])))
    first, *others = units.members[unit]
    suffix = f" and the {len(others)} operators that share its device" if others else ""
    return (
        f"{name} finds no plan within {within}: no device has room for the "
        f"{format_bytes(units.bytes[unit])} of {problem.names[first]}{suffix}; the whole model needs "
        f"{format_bytes(float(units.bytes.sum()))}; use more devices or a higher limit"
    )
