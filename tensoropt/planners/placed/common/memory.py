"""The memory of devices while a method places operators: the additive count of the papers.

Baechi (Jeon et al., SoCC 2020, section 4) sums what lasts for a step, and counts the largest of what is
transient. The simulator follows every tensor instead; :mod:`.retry` reconciles the two.
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
    """The memory booked on devices while a method places operators.

    Attributes:
        caps: (devices,) the bytes that may be booked.
        used: (devices,) the bytes booked for the whole step.
        transient: (devices,) the most bytes that an operator needs on top. This is how Baechi counts (SoCC
            2020, section 4): lasting memory adds up; of transient memory, the largest counts.
        counts_transients: False leaves transient memory to the simulator.
    """

    caps: Floats
    used: Floats
    transient: Floats
    counts_transients: bool = True

    @classmethod
    def empty(cls, caps: Floats, counts_transients: bool = True) -> MemoryBook:
        """Return the book of devices on which nothing lies."""
        return cls(caps, np.zeros(len(caps)), np.zeros(len(caps)), counts_transients)

    def copy(self) -> MemoryBook:
        """Return a separate book with the same entries, for trying."""
        # Caps are never written to while a method places.
        return MemoryBook(self.caps, self.used.copy(), self.transient.copy(), self.counts_transients)

    @property
    def unlimited(self) -> bool:
        """Return whether everything fits everywhere."""
        return bool(np.isinf(self.caps).all())

    def room(self, units: Units, unit: int) -> NDArray[np.bool_]:
        """Return (devices,) where a unit fits."""
        return self.rooms(units.bytes[unit], units.transient_bytes[unit])

    def rooms(self, lasting: Floats, transient: Floats) -> NDArray[np.bool_]:
        """Return (..., devices) where so much fits.

        Args:
            lasting, transient: (..., 1), or scalars; bytes for the whole step, and while it runs.
        """
        # The second attempt of retry.py, in which transient memory is left to the simulator.
        if not self.counts_transients:
            return self.used + lasting <= self.caps
        return self.used + lasting + np.maximum(self.transient, transient) <= self.caps

    def book(self, units: Units, unit: int, device: int) -> None:
        """Record that a unit lies on a device."""
        self.used[device] += units.bytes[unit]
        self.transient[device] = max(self.transient[device], units.transient_bytes[unit])


class NoRoomError(Exception):
    """A method found no device with room for a unit; :func:`place_within_memory` reports it to people."""

    def __init__(self, unit: int):
        super().__init__(unit)
        self.unit = unit


def memory_limits(problem: PlacementProblem, limit: float | None) -> Floats:
    """Return (devices,) the bytes of tensors that each may hold, by its capacity and the limit."""
    return problem.devices.within(limit)
