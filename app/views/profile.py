"""The paper's profiling mode: devices × memory → time, over every exploration of one model's step."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration
from tensoropt.plan.device_sweep import Cell, Profile, profile, same_step

from ..library import Library
from ..state import View
from .frontier import FrontierData, money, price_of, step_cost, unit_for
from .units import Units


@dataclass(frozen=True)
class ProfileCell:
    """The fastest time within a budget, its price where one is known, and the view that shows that point."""

    time: str
    cost: str
    view: View


@dataclass(frozen=True)
class ProfileRow:
    """One number of devices; ``current``: the exploration that is shown now is of it."""

    label: str
    cells: tuple[ProfileCell | None, ...]
    current: bool


@dataclass(frozen=True)
class ProfileTable:
    """Fastest time per device count (rows) within a memory budget per device (columns)."""

    head: tuple[str, ...]
    rows: tuple[ProfileRow, ...]


def devices_by_memory(library: Library, view: View) -> ProfileTable | None:
    """The table for the view's model; None while only one number and kind of devices is known."""
    known = _alike(library, view.exploration)
    found = profile([exploration for _, exploration in known])
    if len(found.rows) < 2:
        return None
    return _worded(found, known, view)


def _alike(library: Library, key: str) -> list[tuple[str, Exploration]]:
    """The explorations of the same step, the one called ``key`` first."""
    try:
        chosen = library.load(key)
    except TensorOptError:
        return []
    found = [(key, chosen)]
    for entry in library.entries():
        if entry.key == key:
            continue
        try:
            other = library.load(entry.key)
        except TensorOptError:  # its own page says what is wrong with it
            continue
        if same_step(other) == same_step(chosen):
            found.append((entry.key, other))
    return found


def _worded(found: Profile, known: list[tuple[str, Exploration]], view: View) -> ProfileTable:
    units, chosen = Units.of(known[0][1]), FrontierData.of(known[0][1])
    data = [FrontierData.of(exploration) for _, exploration in known]

    def cell(of: Cell | None, budget: float) -> ProfileCell | None:
        if of is None:
            return None
        cost = step_cost(data[of.exploration], of.point, price_of(data[of.exploration], view))
        shown = View(
            exploration=known[of.exploration][0],
            point=of.point,
            budget_bytes=float(round(budget)),
            headroom=view.headroom,
            price=view.price,
        )
        return ProfileCell(units.time.text(of.time_s), "" if cost is None else money(cost), shown)

    return ProfileTable(
        tuple(unit_for(b).text(b) for b in found.budgets_bytes),
        tuple(
            ProfileRow(
                f"{row.devices} × {row.kind}",
                tuple(cell(c, b) for c, b in zip(row.cells, found.budgets_bytes, strict=True)),
                (row.devices, row.kind) == (chosen.exploration.devices, chosen.device),
            )
            for row in found.rows
        ),
    )
