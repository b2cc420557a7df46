"""Numbers as people read them: one unit for a whole plot or column, three significant figures."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.plan import Exploration
from tensoropt.plan.frontier_table import units_of


@dataclass(frozen=True)
class Unit:
    """A unit and how many bytes or seconds it has."""

    name: str
    factor: float

    def of(self, value: float) -> float:
        """A number of bytes or seconds in this unit."""
        return value / self.factor

    def text(self, value: float) -> str:
        """``11.3 GiB``, in this unit whatever the size; thousands are grouped."""
        return f"{digits(value / self.factor)} {self.name}"


@dataclass(frozen=True)
class Units:
    """Of memory, of time."""

    memory: Unit
    time: Unit

    @classmethod
    def of(cls, exploration: Exploration) -> Units:
        """The units in which all of an exploration is shown."""
        memory, time = units_of(exploration)
        return cls(Unit(*memory), Unit(*time))


def digits(value: float) -> str:
    """Three significant figures without an exponent, thousands grouped, no trailing zeros lost."""
    size = abs(value)
    if size >= 99.95 or value == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:#.3g}" if size >= 1e-4 else f"{value:.1e}"


LEAST = 1e-5
"""Shares below it are told apart from nothing, not from each other."""


def percent(share: float) -> str:
    """``12 %``; small shares keep a figure, so that nothing reads as zero that isn't."""
    if share == 0:
        return "0 %"
    if abs(share) < LEAST:
        return "under 0.001 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0095 else f"{100 * share:.1g} %"


def at_most(share: float) -> str:
    """A bound, for ``within ...``: ``0.001 %`` stands for all smaller ones."""
    return percent(max(share, LEAST)) if share else "0 %"


def signed(value: float, text: str) -> str:
    """``+`` before what grows, a real minus sign before what shrinks."""
    return f"+{text}" if value > 0 else f"−{text.lstrip('-')}" if value < 0 else "±0"


def plural(count: int, word: str) -> str:
    """``1 plan``, ``2,000 plans``."""
    return f"{count:,} {word}" + ("" if count == 1 else "s")
