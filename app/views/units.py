"""Units and numbers for people: one unit per plot or column, three significant digits."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.frontier_table import units_of
from tensoropt.units import counted as plural
from tensoropt.units import share_words as percent
from tensoropt.units import without_zeros

__all__ = ["Unit", "Units", "digits", "percent", "plural", "time_unit", "unit_for"]


@dataclass(frozen=True)
class Unit:
    """A unit of memory or time, and its size in bytes or seconds."""

    name: str
    factor: float

    def of(self, value: float) -> float:
        """Convert bytes or seconds to this unit."""
        return value / self.factor

    def text(self, value: float) -> str:
        """Return ``11.3 GiB``, always in this unit, with grouped thousands."""
        return f"{digits(value / self.factor)} {self.name}"

    def limit(self, value: float) -> str:
        """Return ``24 GiB``, without trailing zeros, as users write limits."""
        return without_zeros(self.text(value))


@dataclass(frozen=True)
class Units:
    """The units of memory and of time."""

    memory: Unit
    time: Unit

    @classmethod
    def of(cls, exploration: Exploration) -> Units:
        """Return the units in which an exploration's memory and times are shown."""
        memory, time = units_of(exploration)
        return cls(Unit(*memory), Unit(*time))


def unit_for(size_bytes: float) -> Unit:
    """Return the largest binary unit (GiB, MiB, KiB, B) that is not above a size."""
    for name, factor in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if size_bytes >= factor:
            return Unit(name, factor)
    return Unit("B", 1.0)


def time_unit(seconds: float) -> Unit:
    """Return the unit (s, ms, µs) in which times of this size are shown."""
    return Unit("s", 1.0) if seconds >= 10 else Unit("ms", 1e-3) if seconds >= 1e-3 else Unit("µs", 1e-6)


def digits(value: float) -> str:
    """Format three significant digits, without an exponent, with grouped thousands and trailing zeros."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:#.3g}" if size >= 1e-4 else f"{value:.1e}"
