"""A method run repeatedly with less room, until its placement fits when simulated.

While a method works, it counts memory as the papers do, by summing what each operator holds for a whole step.
The simulator follows every tensor, so it sees what sums do not: received copies, gradients on their way, what
an operator needs while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.planners.placed.common.answer import PlacedAnswer
from tensoropt.planners.placed.common.memory import MemoryBook, NoRoomError, memory_limits
from tensoropt.planners.placed.common.units import Units
from tensoropt.types import Floats
from tensoropt.units import format_bytes

ATTEMPTS = 12
"""How many times a method is run with less room before it is refused; an assumption."""


Attempt = Callable[[MemoryBook], PlacedAnswer]
"""A method under given caps: returns its answer, or raises :class:`NoRoomError`."""


def place_within_memory(
    name: str, problem: PlacementProblem, units: Units, limit: float | None, attempt: Attempt
) -> PlacedAnswer:
    """Return a method's placement that fits when simulated.

    If counting what is in flight leaves no room, that is left to the simulator alone.

    Raises:
        InfeasibleError: no such placement was found.
    """
    # The bytes booked for tensors in flight can exceed what is there at once, so that a method finds no room
    # though its placement would fit.
    try:
        return _retry(name, problem, units, limit, attempt, True)
    except InfeasibleError:
        return _retry(name, problem, units, limit, attempt, False)


def _retry(
    name: str,
    problem: PlacementProblem,
    units: Units,
    limit: float | None,
    attempt: Attempt,
    counts_transients: bool,
) -> PlacedAnswer:
    """Return the placement of the first attempt that fits. If the simulator sees ``peak - booked`` more
    bytes than were booked on a device, and too many, the next attempt books that much less than the device's
    limit."""
    most = memory_limits(problem, limit)
    caps = most.copy()
    for number in range(ATTEMPTS):
        memory = MemoryBook.empty(caps.copy(), counts_transients)
        try:
            answer = attempt(memory)
        except NoRoomError as full:
            raise InfeasibleError(_refusal(name, problem, units, most, caps, full.unit)) from None
        if np.isinf(most).all():
            return answer
        peaks = np.array(simulate_placement(problem, answer.placement).peak_bytes)
        if (peaks <= most).all():
            return replace(answer, notes=(*answer.notes, *_tightened(most, caps, number)))
        # What the simulator sees beyond what was booked is taken off the cap, and never given back, so that
        # attempts do not go in circles.
        booked = memory.used + (memory.transient if counts_transients else 0.0)
        caps = np.where(peaks > most, np.minimum(caps, most - (peaks - booked)), caps)
    worst, in_all = int((peaks - most).argmax()), problem.devices.in_all
    raise InfeasibleError(
        f"{name} finds no plan within {format_bytes(in_all(most[worst]))}; after {ATTEMPTS} attempts, each "
        f"with less room to book, device {worst} still reaches {format_bytes(in_all(peaks[worst]))}"
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
    within = (
        "the devices' capacities"
        if len(set(most)) > 1
        else format_bytes(problem.devices.in_all(float(most[0])))
    )
    who = problem.names[units.members[unit][0]]
    others = len(units.members[unit]) - 1
    beside = f" and the {others} that belong to it" if others else ""
    reserved = float((most - caps).max())
    kept_free = (
        f", {format_bytes(reserved)} of which the simulator needs for what is in flight" if reserved else ""
    )
    return (
        f"{name} finds no plan within {within}{kept_free}: no device has room for the "
        f"{format_bytes(units.bytes[unit])} of {who}{beside}; the whole model holds "
        f"{format_bytes(float(units.bytes.sum()))}, use more devices or a higher limit"
    )
