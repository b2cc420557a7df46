"""The paper's profiling mode: devices × memory → time, over every exploration of one model's step; and
batch × memory → throughput, over those of its steps at other batches on the same cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensoropt.errors import TensorOptError
from tensoropt.exploration.cluster_offers import Cell, ClusterCurve, Profile, ProfileRow, profile
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import HOUR_S, StepWork
from tensoropt.units import format_number

from ..library import Entry, Library
from ..state import View
from .frontier import money
from .units import Units, unit_for


@dataclass(frozen=True)
class _ProfileCell:
    """The fastest time within a budget, its price if one is known, and the view that shows that point."""

    time: str
    cost: str
    view: View


@dataclass(frozen=True)
class _ProfileRow:
    """A number of devices; ``current``: whether the exploration that is shown now has this number."""

    label: str
    cells: tuple[_ProfileCell | None, ...]
    current: bool


@dataclass(frozen=True)
class ProfileTable:
    """The best by device count or batch (rows) within a memory budget per device (columns).

    Attributes:
        corner: the heading of the rows' labels: what the figures are.
    """

    head: tuple[str, ...]
    rows: tuple[_ProfileRow, ...]
    corner: str = "within"


def devices_by_memory(library: Library, view: View) -> ProfileTable | None:
    """Return the fastest times for the view's model; None while only one number and kind of devices is
    known."""
    opened = _opened(library, view, library.alike)
    if opened is None:
        return None
    chosen, curves = opened
    table, own = profile(list(curves.values())), curves[next(iter(curves))]
    if len(table.rows) < 2:
        return None
    units = Units.of(chosen)

    def cell(of: Cell | None, budget: float) -> _ProfileCell | None:
        if of is None:
            return None
        entry = list(curves)[of.exploration]
        price = library.head_of(entry).price if view.price is None else view.price
        found = curves[entry].found
        devices = found.spaces[found.all_points[of.point].space].devices
        cost = "" if price is None else money(of.time_s / HOUR_S * devices * price, view)
        return _ProfileCell(units.time.text(of.time_s), cost, _shown(view, entry, of, budget))

    return _profile_table(
        table,
        [
            (f"{row.devices} × {row.kind}", (row.devices, row.kind) == (own.count, own.smallest.kind))
            for row in table.rows
        ],
        lambda row, of, budget: cell(of, budget),
    )


def batches_by_memory(library: Library, view: View) -> ProfileTable | None:
    """Return the highest throughputs for the view's model on its cluster, in tokens or samples per second;
    None while only one batch is known."""
    opened = _opened(library, view, library.at_other_batches)
    if opened is None:
        return None
    chosen, curves = opened
    table, own = profile(list(curves.values())), curves[next(iter(curves))]
    if not table.of_batches:
        return None
    work = StepWork.of(chosen)
    tokens = (work.tokens or 0) / (work.samples or 1)

    def cell(row: ProfileRow, of: Cell | None, budget: float) -> _ProfileCell | None:
        if of is None or row.batch is None:
            return None
        entry, rate = list(curves)[of.exploration], (tokens or 1.0) * row.batch / of.time_s
        return _ProfileCell(format_number(rate), "", _shown(view, entry, of, budget))

    return _profile_table(
        table,
        [(f"batch {row.batch}", row.batch == own.batch) for row in table.rows],
        cell,
        "tokens/s within" if tokens else "samples/s within",
    )


def _opened(
    library: Library, view: View, others: Callable[[str], dict[Entry, ClusterCurve]]
) -> tuple[Exploration, dict[Entry, ClusterCurve]] | None:
    """Return the view's exploration, and the curves that ``others`` knows beside it, its own first; None if
    it does not open or has no curve."""
    try:
        chosen = library.load(view.exploration)
    except TensorOptError:
        return None
    known = others(view.exploration)
    entries = sorted(known, key=lambda entry: entry.key != view.exploration)
    if not entries or entries[0].key != view.exploration:
        return None
    return chosen, {entry: known[entry] for entry in entries}


def _shown(view: View, entry: Entry, of: Cell, budget: float) -> View:
    """Return the view that shows a cell's point."""
    return View(
        exploration=entry.key,
        point=of.point,
        budget_bytes=float(round(budget)),
        headroom=view.headroom,
        price=view.price,
        currency=view.currency,
    )


def _profile_table(
    table: Profile,
    labels: list[tuple[str, bool]],
    cell: Callable[[ProfileRow, Cell | None, float], _ProfileCell | None],
    corner: str = "within",
) -> ProfileTable:
    return ProfileTable(
        tuple(unit_for(b).text(b) for b in table.budgets_bytes),
        tuple(
            _ProfileRow(
                label,
                tuple(cell(row, c, b) for c, b in zip(row.cells, table.budgets_bytes, strict=True)),
                current,
            )
            for row, (label, current) in zip(table.rows, labels, strict=True)
        ),
        corner,
    )
