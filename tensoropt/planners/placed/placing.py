"""What the placing planners share.

    place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer

Every placing method is a module with this function: numbers in, devices and orders out. The judge
(:func:`tensoropt.placement.simulate_placement`) plays what comes out; nobody prices itself.

While a method works it counts memory as the papers do, by adding up what each operator holds for a whole
step. The judge follows every tensor, so it sees what sums do not: received copies, gradients on their way,
what an operator needs while it runs. :func:`settle` asks again with less room until both agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, simulate_placement
from tensoropt.units import format_bytes

Floats = NDArray[np.float64]

ATTEMPTS = 12
"""How often a method is asked again with less room, before its refusal."""


@dataclass(frozen=True)
class PlacedAnswer:
    """What a placing method answers.

    Attributes:
        placement: within the capacity and the limit under the judge.
        notes: what the method says of it: what was approximated, tightened, or left unproven.
        expected_s: the method's own estimate of the step; None where it makes none.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
    expected_s: float | None = None


@dataclass(frozen=True)
class Units:
    """Operators that must share a device, as one.

    Attributes:
        of: per operator its unit.
        members: per unit its operators, ascending.
        allowed: (units, devices) where it may lie: pins of all members, and devices that can run them all.
        bytes: (units,) what it holds for a whole step.
        flight_bytes: (units,) what its largest operator needs on top while it runs.
    """

    of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    allowed: NDArray[np.bool_]
    bytes: Floats
    flight_bytes: Floats

    @cached_property
    def choices(self) -> tuple[NDArray[np.intp], ...]:
        """Per unit the devices it may lie on, ascending."""
        return tuple(np.flatnonzero(row) for row in self.allowed)


def units_of(problem: PlacementProblem) -> Units:
    """The units of a problem.

    Raises:
        InfeasibleError: operators that belong together may lie on no common device; names them.
    """
    root = list(range(problem.size))

    def find(operator: int) -> int:
        while root[operator] != operator:
            root[operator] = root[root[operator]]
            operator = root[operator]
        return operator

    for group in problem.together:
        for other in group[1:]:
            a, b = sorted((find(group[0]), find(other)))
            root[b] = a
    heads = [find(operator) for operator in range(problem.size)]
    number = {head: i for i, head in enumerate(dict.fromkeys(heads))}
    of = tuple(number[head] for head in heads)
    members: list[list[int]] = [[] for _ in number]
    for operator, unit in enumerate(of):
        members[unit].append(operator)
    held, flight = np.zeros(len(members)), np.zeros(len(members))
    for operator, unit in enumerate(of):
        held[unit] += problem.step_bytes(operator)
        flight[unit] = max(flight[unit], flight_bytes(problem, operator))
    return Units(of, tuple(map(tuple, members)), _allowed(problem, members), held, flight)


def flight_bytes(problem: PlacementProblem, operator: int) -> float:
    """What an operator needs while it runs, beside what is held for the step.

    In forward the tensors at its ends that nobody keeps, in backward the gradients at its ends.
    """
    ends = [problem.tensors[t] for t in (*problem.read[operator], *problem.made[operator])]
    passing = (t for t in ends if not t.kept_by and not (t.stored and t.producer == operator))
    forward = problem.forward_peak_bytes[operator] + sum(t.bytes for t in passing)
    backward = problem.backward_peak_bytes[operator] + sum(t.bytes for t in ends if t.gradient)
    return float(max(forward, backward if problem.training else 0.0))


def _allowed(problem: PlacementProblem, members: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
    possible = np.isfinite(problem.forward_s + problem.backward_s + problem.update_s)
    pins = np.ones_like(possible)
    for operator, devices in problem.pinned:
        mask = np.zeros(problem.devices.count, bool)
        mask[list(devices)] = True
        pins[operator] &= mask
    both = possible & pins
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


@dataclass
class Memory:
    """What devices hold while a method places.

    Attributes:
        caps: (devices,) what may be booked.
        used: (devices,) what is held for the step.
        flight: (devices,) the largest that an operator needs on top. As Baechi counts (SoCC 2020, section 4):
            lasting memory adds up, of passing memory the largest counts.
        flies: False leaves that to the judge.
    """

    caps: Floats
    used: Floats
    flight: Floats
    flies: bool = True

    @classmethod
    def empty(cls, caps: Floats, flies: bool = True) -> Memory:
        return cls(caps, np.zeros(len(caps)), np.zeros(len(caps)), flies)

    def copy(self) -> Memory:
        return Memory(self.caps, self.used.copy(), self.flight.copy(), self.flies)

    @property
    def unlimited(self) -> bool:
        return bool(np.isinf(self.caps).all())

    def room(self, units: Units, unit: int) -> NDArray[np.bool_]:
        """(devices,) where a unit fits."""
        return self.rooms(units.bytes[unit], units.flight_bytes[unit])

    def rooms(self, held: Floats, flight: Floats) -> NDArray[np.bool_]:
        """(..., devices) where so much fits.

        Args:
            held, flight: (..., 1), or scalars.
        """
        if not self.flies:
            return self.used + held <= self.caps
        return self.used + held + np.maximum(self.flight, flight) <= self.caps

    def book(self, units: Units, unit: int, device: int) -> None:
        self.used[device] += units.bytes[unit]
        self.flight[device] = max(self.flight[device], units.flight_bytes[unit])


class NoRoomError(Exception):
    """A method found no device with room for a unit; :func:`settle` says it to people."""

    def __init__(self, unit: int):
        super().__init__(unit)
        self.unit = unit


def ceilings(problem: PlacementProblem, limit: float | None) -> Floats:
    """(devices,) what each may hold: its capacity, and the limit."""
    capacity = problem.devices.capacity_bytes.astype(float)
    return capacity if limit is None else np.minimum(capacity, limit)


Attempt = Callable[[Memory], PlacedAnswer]
"""A method under given caps: its answer, or :class:`NoRoomError`."""


def settle(
    name: str, problem: PlacementProblem, units: Units, limit: float | None, attempt: Attempt
) -> PlacedAnswer:
    """A method's placement that fits under the judge.

    Where counting what is in flight leaves no room, it is left to the judge alone.

    Raises:
        InfeasibleError: none was found.
    """
    try:
        return _settle(name, problem, units, limit, attempt, True)
    except InfeasibleError:
        return _settle(name, problem, units, limit, attempt, False)


def _settle(
    name: str, problem: PlacementProblem, units: Units, limit: float | None, attempt: Attempt, flies: bool
) -> PlacedAnswer:
    """A device on which the judge sees ``peak - booked`` more than was booked, and too much, is booked that
    much below its limit in the next attempt.
    """
    most = ceilings(problem, limit)
    caps = most.copy()
    for number in range(ATTEMPTS):
        memory = Memory.empty(caps.copy(), flies)
        try:
            answer = attempt(memory)
        except NoRoomError as full:
            raise InfeasibleError(_refusal(name, problem, units, most, caps, full.unit)) from None
        if np.isinf(most).all():
            return answer
        peaks = np.array(simulate_placement(problem, answer.placement).peak_bytes)
        if (peaks <= most).all():
            return replace(answer, notes=(*answer.notes, *_tightened(most, caps, number)))
        booked = memory.used + (memory.flight if flies else 0.0)
        caps = np.where(peaks > most, np.minimum(caps, most - (peaks - booked)), caps)
    worst = int((peaks - most).argmax())
    raise InfeasibleError(
        f"{name} finds no plan within {format_bytes(most[worst])}; after {ATTEMPTS} attempts, each with less "
        f"room to book, device {worst} still reaches {format_bytes(peaks[worst])}"
    )


def _tightened(most: Floats, caps: Floats, attempts: int) -> tuple[str, ...]:
    if not attempts:
        return ()
    worst = int((most - caps).argmax())
    return (
        f"what is in flight does not add up: booked at most {format_bytes(max(0.0, caps[worst]))} of "
        f"{format_bytes(most[worst])} on device {worst}, attempt {attempts + 1}",
    )


def _refusal(
    name: str, problem: PlacementProblem, units: Units, most: Floats, caps: Floats, unit: int
) -> str:
    within = "the devices' capacities" if len(set(most)) > 1 else format_bytes(float(most[0]))
    who = problem.names[units.members[unit][0]]
    others = len(units.members[unit]) - 1
    beside = f" and the {others} that belong to it" if others else ""
    reserved = float((most - caps).max())
    held = f", {format_bytes(reserved)} of which the judge needs for what is in flight" if reserved else ""
    return (
        f"{name} finds no plan within {within}{held}: no device has room for the "
        f"{format_bytes(units.bytes[unit])} of {who}{beside}; the whole model holds "
        f"{format_bytes(float(units.bytes.sum()))}, use more devices or a higher limit"
    )


def in_time(
    device: Sequence[int], starts: Sequence[float], count: int, *, backward: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Per device its operators by their start; ties in the order of dependence."""
    orders: list[list[int]] = [[] for _ in range(count)]
    for operator in sorted(range(len(device)), key=lambda o: (starts[o], -o if backward else o)):
        orders[device[operator]].append(operator)
    return tuple(map(tuple, orders))
