"""The paper's profiling mode: devices × memory → time, over every exploration of one model's step."""

from __future__ import annotations

from dataclasses import dataclass

from tensoropt.errors import TensorOptError
from tensoropt.plan.device_sweep import Cell, Curve, profile_of

from ..library import Entry, Library
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
    entries = _alike(library, library.entry(view.exploration))
    if not entries or entries[0].key != view.exploration:
        return None
    # From the index: none of the others is opened for it.
    heads = [library.head_of(entry) for entry in entries]
    found = [library.costs_of(entry) for entry in entries]
    curves = [
        Curve(int(curve.devices[0]), head.kind, curve.memory, curve.time)
        for head, curve in zip(heads, found, strict=True)
    ]
    table = profile_of(curves)
    if len(table.rows) < 2:
        return None
    units, own = Units.of(chosen), (curves[0].devices, curves[0].kind)

    def cell(of: Cell | None, budget: float) -> ProfileCell | None:
        if of is None:
            return None
        price = heads[of.exploration].price if view.price is None else view.price
        devices = int(found[of.exploration].devices[of.point])
        shown = View(
            exploration=entries[of.exploration].key,
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


def _alike(library: Library, chosen: Entry) -> list[Entry]:
    """Return the explorations of the same step that have points, the chosen one first."""
    step = library.head_of(chosen).step
    others = [e for e in library.entries() if e != chosen and library.head_of(e).step == step]
    return [e for e in (chosen, *others) if len(library.costs_of(e).memory)]
