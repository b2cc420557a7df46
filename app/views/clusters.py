"""The step of one model on every cluster on which the library has it: time, money, and which cluster to
take.

The module also has the paper's profiling mode: devices × memory → time, over every exploration of one model's
step; and batch × memory → throughput, over those of its steps at other batches on the same cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tensoropt.errors import TensorOptError
from tensoropt.exploration.batch import refused_in
from tensoropt.exploration.cluster_offers import (
    Cell,
    ClusterCurve,
    ClusterOffer,
    ClusterQuestion,
    Offers,
    Profile,
    ProfileRow,
    offer_of,
    profile,
)
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import HOUR_S, StepWork
from tensoropt.units import format_number

from ..library import Entry, Library
from ..state import View, open_exploration
from .frontier import amount_in, money, tariff_of
from .units import Unit, Units, digits, unit_for


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


@dataclass(frozen=True, eq=False)
class OnCluster:
    """One exploration: its curve, and what it offers.

    Attributes:
        label: the cluster's name, with the key if several have the same name.
        point: the offered point; the leanest if none fits.
        money: what that point costs for the amount; device-hours if no cluster's price is known; None for a
            cluster without a price beside others that have one.
        words: what it is and costs, on lines.
    """

    entry: Entry
    label: str
    offer: ClusterOffer
    curve: ClusterCurve
    point: int
    money: float | None
    words: tuple[str, ...]

    @property
    def time_s(self) -> float:
        """The seconds of a step of the point."""
        return float(self.curve.time[self.point])


@dataclass(frozen=True, eq=False)
class ClustersData:
    """All explorations of the same step.

    Attributes:
        priced: whether any price is known; otherwise device-hours stand for money.
        refused: the clusters that could not be explored, with the reason.
        fault: why hours and money cannot be given for the requested amount, and are for 1,000 steps;
            otherwise "".
    """

    rows: tuple[OnCluster, ...]
    answer: tuple[str, ...]
    cheapest: int | None
    fastest: int | None
    time: Unit
    amount: str
    currency: str
    priced: bool
    refused: tuple[tuple[str, str], ...] = ()
    fault: str = ""

    @property
    def unbeaten(self) -> tuple[OnCluster, ...]:
        """The clusters within the limits that none of the others beats in both time and money, the fastest
        first."""
        offered = [row for row in self.rows if not row.offer.reason and row.money is not None]
        best: list[OnCluster] = []
        for row in sorted(offered, key=lambda row: (row.time_s, row.money)):
            if not best or (row.money or 0.0) < (best[-1].money or 0.0):
                best.append(row)
        return tuple(best)

    @property
    def money_title(self) -> str:
        """The name of what serves as money, with what it is for."""
        if not self.priced:
            return f"device-hours for {self.amount}"
        return f"cost of {self.amount}" + (f", {self.currency}" if self.currency else "")


def clusters_data(library: Library, view: View) -> ClustersData | None:
    """Return the content of the page of clusters for the view's model; None if it names no exploration that
    opens."""
    try:
        chosen = library.load(view.exploration)
    except TensorOptError:
        return None
    work, units = StepWork.of(chosen), Units.of(chosen)
    question, fault = _question(view, work)
    curves = list(library.alike(view.exploration).items())
    names = [curve.cluster for _, curve in curves]
    priced = any(curve.per_hour(question.tariff) is not None for _, curve in curves)
    rows = tuple(
        _row(entry, curve, work, question, units, priced=priced, alone=names.count(curve.cluster) == 1)
        for entry, curve in curves
    )
    offers = Offers(question, tuple(row.offer for row in rows))

    def place(offer: ClusterOffer | None) -> int | None:
        return next((i for i, row in enumerate(rows) if row.offer is offer), None)

    return ClustersData(
        rows=rows,
        answer=tuple(offers.sentences()),
        cheapest=place(offers.cheapest),
        fastest=place(offers.fastest),
        time=units.time,
        amount=question.amount.words,
        currency=view.currency,
        priced=priced,
        refused=tuple(_refused(curves).items()),
        fault=fault,
    )


def _question(view: View, work: StepWork) -> tuple[ClusterQuestion, str]:
    question = ClusterQuestion(
        time_s=view.within_s,
        cost=view.within_cost,
        memory_bytes=view.budget_bytes,
        headroom=view.asked_headroom,
        amount=amount_in(view),
        tariff=tariff_of(view),
    )
    try:
        question.amount.steps(work)
    except TensorOptError as error:
        return replace(question, amount=ClusterQuestion().amount), f"{question.amount.words}: {error}"
    return question, ""


def _row(
    entry: Entry,
    curve: ClusterCurve,
    work: StepWork,
    question: ClusterQuestion,
    units: Units,
    *,
    priced: bool,
    alone: bool,
) -> OnCluster:
    label = curve.cluster if alone else f"{curve.cluster} ({entry.key.removeprefix('opened-')})"
    named = replace(curve, cluster=label)
    offer = offer_of(named, work, question)
    point = int(curve.needs.argmin()) if offer.index is None else offer.index
    per_hour = curve.per_hour(question.tariff) if priced else float(sum(s.count for s in curve.devices))
    hours = question.amount.steps(work) * float(curve.time[point]) / HOUR_S
    cost = None if per_hour is None else hours * per_hour
    spent = "" if cost is None else question.tariff.words(cost) if priced else f"{digits(cost)} device-hours"
    figures = (
        f"{units.time.text(float(curve.time[point]))} a step, {units.memory.text(float(curve.needs[point]))}"
    )
    lines = (offer.devices, figures, spent and f"{spent} for {question.amount.words}", offer.reason)
    return OnCluster(entry, label, offer, named, point, cost, tuple(filter(None, lines)))


def _refused(curves: list[tuple[Entry, ClusterCurve]]) -> dict[str, str]:
    """Return what the folders of these explorations say about clusters without an exploration."""
    said: dict[str, str] = {}
    for folder in dict.fromkeys(entry.folder.parent for entry, _ in curves):
        said |= refused_in(folder)
    explored = {curve.cluster for _, curve in curves}
    return {name: why for name, why in said.items() if name not in explored}


def unpriced_kinds(data: ClustersData, view: View) -> list[str]:
    """Return kinds of devices without a price, once each."""
    tariff = tariff_of(view)
    unpriced = [s for row in data.rows for s in row.curve.devices if tariff.of_named(s.kind, s.price) is None]
    return list(dict.fromkeys(some.kind for some in unpriced))


def strange_prices(data: ClustersData, view: View) -> str:
    """Say that there are prices for kinds of devices which none of the clusters has, and which kinds they
    have; "" without such prices."""
    try:
        tariff_of(view).check(some.kind for row in data.rows for some in row.curve.devices)
    except TensorOptError as error:
        return str(error)
    return ""


def point_view(view: View, row: OnCluster, point: int) -> View:
    """Return the view that shows a point of one of the clusters, within the same budget."""
    opened = open_exploration(replace(view, exploration=""), row.entry.key)
    return replace(opened, point=point, budget_bytes=view.budget_bytes)
