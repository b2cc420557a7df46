"""The axes of the frontier's plot: memory and time, or the units by which people decide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..state import USUAL_ACROSS, USUAL_UP, View
from .frontier import FrontierData
from .rates import RateArrays, rate_arrays
from .units import Unit

TITLES = {
    "memory": "memory per device", "time": "time per step", "rate": "tokens/s or samples/s", "mfu": "MFU",
    "hours": "device-hours", "cost": "cost",
}  # fmt: skip
"""The titles of what an axis can show, as choices."""


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis of the plot.

    Attributes:
        name: a key of :data:`TITLES`.
        title: its title with the unit, as on the axis.
        unit: its unit, as in a tooltip.
        values: the values of every row, in the unit shown.
    """

    name: str
    title: str
    unit: str
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Axes:
    """Both axes, and why one of them is not the requested one."""

    x: Axis
    y: Axis
    refused: str = ""

    @property
    def over_memory(self) -> bool:
        """Whether lines of devices' memory and a budget's veil have a place."""
        return self.x.name == "memory"

    @property
    def up_time(self) -> bool:
        """Whether a target's veil, and the parts of a step's time, have a place."""
        return self.y.name == "time"

    @property
    def key(self) -> str:
        """A key that identifies a pair of axes."""
        return f"{self.x.name}/{self.y.name}"


def axes_of(data: FrontierData, view: View) -> Axes:
    """Return the axes that a view asks for; the usual one, with the reason, if its figures are unknown."""
    if (view.across, view.up) == (USUAL_ACROSS, USUAL_UP):
        return Axes(_usual(data, USUAL_ACROSS), _usual(data, USUAL_UP))
    found, refused = rate_arrays(data, view), []
    axes = []
    for name, usual in ((view.across, USUAL_ACROSS), (view.up, USUAL_UP)):
        axis = _usual(data, name) if name == usual else _of(data, view, found, name)
        if axis is None:
            why = found.whys.get({"hours": "device_hours"}.get(name, name), "it is unknown")
            refused.append(f"The plot cannot show {TITLES[name]}: {why}.")
        axes.append(axis or _usual(data, usual))
    return Axes(axes[0], axes[1], " ".join(dict.fromkeys(refused)))


def axis_sentence(axes: Axes, view: View) -> str:
    """Say what is switched off while other units are shown, and what could not be shown; "" for the usual
    axes."""
    off = []
    if not axes.over_memory:
        off.append("what a device has")
        off += ["the memory budget, which still selects a point"] if view.budget_bytes is not None else []
    if not axes.up_time:
        off += ["the time target, which still selects a point"] if view.target_s is not None else []
        off += ["compute and network"] if view.lines else []
    words = f"Not drawn over these axes: {'; '.join(off)}." if off else ""
    return " ".join(filter(None, (axes.refused, words)))


def _usual(data: FrontierData, name: str) -> Axis:
    values, unit = (data.memory, data.units.memory) if name == "memory" else (data.time, data.units.time)
    return _axis(name, TITLES[name], unit, values)


def _axis(name: str, title: str, unit: Unit, values: np.ndarray) -> Axis:
    said = f"{title}, {unit.name}" if unit.name else title
    return Axis(name, said, unit.name, values / unit.factor)


def _of(data: FrontierData, view: View, found: RateArrays, name: str) -> Axis | None:
    values = {
        "rate": found.rate, "mfu": found.mfu, "hours": found.device_hours, "cost": found.cost,
    }[name]  # fmt: skip
    if values is None:
        return None
    unit = Unit({"rate": f"{found.unit}/s", "mfu": "%", "hours": "h", "cost": ""}[name], 1.0)
    title = {
        "rate": "throughput", "mfu": "MFU", "hours": f"device-hours for {found.amount}",
        "cost": f"cost of {found.amount}" + (f", {view.currency}" if view.currency else ""),
    }[name]  # fmt: skip
    if name == "mfu":
        unit = Unit("%", 0.01)
    return _axis(name, title, unit, values)
