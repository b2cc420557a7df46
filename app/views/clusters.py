"""The step of one model on every cluster on which the library has it: time, money, and which cluster to
take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.plan.cluster_offers import ClusterCurve, ClusterOffer, ClusterQuestion, Offers, offer_of
from tensoropt.plan.rates import HOUR_S
from tensoropt.plan.step_work import StepWork
from tensoropt.shopping import refused_in

from ..library import Entry, Library
from ..state import View, open_exploration
from .rates import amount_in, tariff_of
from .units import Unit, Units


@dataclass(frozen=True, eq=False)
class OnCluster:
    """One exploration: its curve, and what it offers.

    Attributes:
        label: the cluster's name, with the key if several have the same name.
        fitting: for each point, whether a device has room for it.
        money: the money of each point for the amount; device-hours if no cluster's price is known; None for a
            cluster without a price beside others that have one.
    """

    entry: Entry
    label: str
    offer: ClusterOffer
    curve: ClusterCurve
    fitting: np.ndarray
    money: np.ndarray | None


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
    asked, fault = _question(view, work)
    found = list(library.alike(view.exploration).items())
    names = [curve.cluster for _, curve in found]
    priced = any(curve.per_hour(asked.tariff) is not None for _, curve in found)
    rows = tuple(
        _row(entry, curve, work, asked, priced=priced, alone=names.count(curve.cluster) == 1)
        for entry, curve in found
    )
    offers = Offers(asked, tuple(row.offer for row in rows))

    def place(offer: ClusterOffer | None) -> int | None:
        return next((i for i, row in enumerate(rows) if row.offer is offer), None)

    return ClustersData(
        rows=rows,
        answer=tuple(offers.sentences()),
        cheapest=place(offers.cheapest),
        fastest=place(offers.fastest),
        time=units.time,
        amount=asked.amount.words,
        currency=view.currency,
        priced=priced,
        refused=tuple(_refused(found).items()),
        fault=fault,
    )


def _question(view: View, work: StepWork) -> tuple[ClusterQuestion, str]:
    asked = ClusterQuestion(
        time_s=view.within_s,
        cost=view.within_cost,
        headroom=view.headroom,
        amount=amount_in(view),
        tariff=tariff_of(view),
    )
    try:
        asked.amount.steps(work)
    except TensorOptError as error:
        return replace(asked, amount=ClusterQuestion().amount), f"{asked.amount.words}: {error}"
    return asked, ""


def _row(
    entry: Entry, curve: ClusterCurve, work: StepWork, asked: ClusterQuestion, *, priced: bool, alone: bool
) -> OnCluster:
    label = curve.cluster if alone else f"{curve.cluster} ({entry.key.removeprefix('opened-')})"
    named = replace(curve, cluster=label)
    per_hour = curve.per_hour(asked.tariff) if priced else float(sum(s.count for s in curve.devices))
    hours = asked.amount.steps(work) * curve.time / HOUR_S
    return OnCluster(
        entry=entry,
        label=label,
        offer=offer_of(named, work, asked),
        curve=named,
        fitting=curve.fitting(asked),
        money=None if per_hour is None else hours * per_hour,
    )


def _refused(found: list[tuple[Entry, ClusterCurve]]) -> dict[str, str]:
    """Return what the folders of these explorations say about clusters without an exploration."""
    said: dict[str, str] = {}
    for folder in dict.fromkeys(entry.folder.parent for entry, _ in found):
        said |= refused_in(folder)
    known = {curve.cluster for _, curve in found}
    return {name: why for name, why in said.items() if name not in known}


def unpriced_kinds(data: ClustersData, view: View) -> list[str]:
    """Return kinds of devices without a price, once each."""
    tariff = tariff_of(view)
    found = [s for row in data.rows for s in row.curve.devices if tariff.of_named(s.kind, s.price) is None]
    return list(dict.fromkeys(some.kind for some in found))


def strange_prices(data: ClustersData, view: View) -> str:
    """Say that there are prices for kinds of devices which none of the clusters has, and which kinds they
    have; "" without such prices."""
    try:
        tariff_of(view).check(some.kind for row in data.rows for some in row.curve.devices)
    except TensorOptError as error:
        return str(error)
    return ""


def point_view(view: View, row: OnCluster, point: int) -> View:
    """Return the view that shows a point of one of the clusters."""
    return replace(open_exploration(replace(view, exploration=""), row.entry.key), point=point)
