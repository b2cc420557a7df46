"""What devices hold while a method places: the additive count of the papers.

Baechi (Jeon et al., SoCC 2020, section 4) adds up what lasts for a step, and of what passes counts the
largest. The simulator follows every tensor instead; :mod:`.retry` brings the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensoropt.placement import PlacementProblem
from tensoropt.planners.placed.common.units import Units
from tensoropt.types import Floats


@dataclass
class MemoryBook:
    """What devices hold while a method places.

    Attributes:
        caps: (devices,) what may be booked.
        used: (devices,) what is booked for the whole step.
        transient: (devices,) the largest that an operator needs on top. As Baechi counts (SoCC 2020, section
            4): lasting memory adds up, of passing memory the largest counts.
        counts_transients: False leaves those to the simulator.
    """

    caps: Floats
    used: Floats
    transient: Floats
    counts_transients: bool = True

    @classmethod
    def empty(cls, caps: Floats, counts_transients: bool = True) -> MemoryBook:
        """The book of devices on which nothing lies."""
        return cls(caps, np.zeros(len(caps)), np.zeros(len(caps)), counts_transients)

    def copy(self) -> MemoryBook:
        """A book of its own with the same entries, for trying."""
        # Caps are never written to while a method places.
        return MemoryBook(self.caps, self.used.copy(), self.transient.copy(), self.counts_transients)

    @property
    def unlimited(self) -> bool:
        """Whether everything fits everywhere."""
        return bool(np.isinf(self.caps).all())

    def room(self, units: Units, unit: int) -> NDArray[np.bool_]:
        """(devices,) where a unit fits."""
        return self.rooms(units.bytes[unit], units.transient_bytes[unit])

    def rooms(self, lasting: Floats, transient: Floats) -> NDArray[np.bool_]:
        """(..., devices) where so much fits.

        Args:
            lasting, transient: (..., 1), or scalars; for the whole step, and while it runs.
        """
        # The second try of retry.py, in which what passes is left to the simulator.
        if not self.counts_transients:
            return self.used + lasting <= self.caps
        return self.used + lasting + np.maximum(self.transient, transient) <= self.caps

    def book(self, units: Units, unit: int, device: int) -> None:
        """Note that a unit lies on a device."""
        self.used[device] += units.bytes[unit]
        self.transient[device] = max(self.transient[device], units.transient_bytes[unit])


class NoRoomError(Exception):
    """A method found no device with room for a unit; :func:`place_within_memory` says it to people."""

    def __init__(self, unit: int):
        super().__init__(unit)
        self.unit = unit


def memory_limits(problem: PlacementProblem, limit: float | None) -> Floats:
    """(devices,) what each may hold of tensors: its capacity, and the limit."""
    return problem.devices.within(limit)
