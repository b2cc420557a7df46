"""The paper's profiling mode: devices × memory → time, over every exploration of one model's step."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.errors import TensorOptError
from tensoropt.plan.device_sweep import Cell, profile

from ..library import Library
from ..state import View
from .frontier import money
from .units import Units, unit_for


@dataclass(frozen=True)
class ProfileCell:
    """The fastest time within a budget, its price if one is known, and the view that shows that point."""

    time: str
    cost: str
    view: View


@dataclass(frozen=True)
class ProfileRow:
    """A number of devices; ``current``: whether the exploration that is shown now has this number."""

    label: str
    cells: tuple[ProfileCell | None, ...]
    current: bool


@dataclass(frozen=True)
class ProfileTable:
    """The fastest time by device count (rows) within a memory budget per device (columns)."""

    head: tuple[str, ...]
    rows: tuple[ProfileRow, ...]


def devices_by_memory(library: Library, view: View) -> ProfileTable | None:
    """Return the table for the view's model; None while only one number and kind of devices is known."""
    try:
        chosen = library.load(view.exploration)
    except TensorOptError:
        return None
    alike = library.alike(view.exploration)
    entries = sorted(alike, key=lambda entry: entry.key != view.exploration)
    if not entries or entries[0].key != view.exploration:
        return None
    # From the index: none of the others is opened for it.
    curves = [alike[entry] for entry in entries]
    table = profile(curves)
    if len(table.rows) < 2:
        return None
    units, own = Units.of(chosen), (curves[0].count, curves[0].smallest.kind)

    def cell(of: Cell | None, budget: float) -> ProfileCell | None:
        if of is None:
            return None
        entry = entries[of.exploration]
        price = library.head_of(entry).price if view.price is None else view.price
        devices = int(library.costs_of(entry).devices[of.point])
        shown = View(
            exploration=entry.key,
            point=of.point,
            budget_bytes=float(round(budget)),
            headroom=view.headroom,
            price=view.price,
        )
        cost = "" if price is None else money(of.time_s / 3600.0 * devices * price)
        return ProfileCell(units.time.text(of.time_s), cost, shown)

    return ProfileTable(
        tuple(unit_for(b).text(b) for b in table.budgets_bytes),
        tuple(
            ProfileRow(
                f"{row.devices} × {row.kind}",
                tuple(cell(c, b) for c, b in zip(row.cells, table.budgets_bytes, strict=True)),
                (row.devices, row.kind) == own,
            )
            for row in table.rows
        ),
    )
