"""The frontier as arrays in readable units, with what fits a device and words for what does not.

Throughput, MFU, hours and money of every row, as arrays; an unknown one has its reason. The axes of the plot:
memory and time, or the units by which people decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from tensoropt.costs.device_fit import room_bytes
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.notable import notable
from tensoropt.exploration.rates import HOUR_S, THOUSAND_STEPS, Amount, RatesOf, Tariff, amount_of
from tensoropt.exploration.recommended import recommended
from tensoropt.frontier import knee
from tensoropt.plan.facts_table import Fact
from tensoropt.plan.figures import BYTES, KEPT, SECONDS
from tensoropt.plan.plan_names import OWN, planner_title
from tensoropt.units import with_article

from ..state import USUAL_ACROSS, USUAL_UP, View, is_tautology, not_understood
from .units import Unit, Units, digits, percent, plural, unit_for

_ROOM_FOR_MARKS = 2.0
"""How many times the frontier's width and height other planners' plans may lie from it in the plot."""
_IN_VIEW = 2.5
"""A device's memory is shown if it is at most this many times the largest point (log: squared)."""


@dataclass(frozen=True, eq=False)
class FrontierData:
    """The points of one exploration as arrays in the order of ``all_points``; marks are points of other
    planners.

    Attributes:
        model: people's name for the model.
        axes: the plot's axes (:class:`Axes`); None outside the plot.
    """

    exploration: Exploration
    model: str
    units: Units
    axes: Any = None

    @classmethod
    def of(cls, exploration: Exploration, model: str = "") -> FrontierData:
        """Return the arrays of an exploration."""
        return cls(exploration, model or exploration.model.source, Units.of(exploration))

    def __len__(self) -> int:
        return len(self.exploration.all_points)

    def column(self, name: str) -> np.ndarray:
        """Return a figure of every row, by its name in :data:`~tensoropt.plan.figures.KEPT`."""
        return self.exploration.all_points.column(name)

    def shown(self, name: str) -> np.ndarray:
        """Return a figure of every row in the unit shown to people."""
        factors = {BYTES: self.units.memory.factor, SECONDS: self.units.time.factor}
        return self.column(name) / factors.get(KEPT[name].unit, 1.0)

    def facts(self, row: int) -> dict[str, Fact]:
        """Return the facts about a row, in the units of the page."""
        return facts(
            FigureRow.of(self.exploration, row), memory=self.units.memory.text, time=self.units.time.text
        )

    @property
    def needs(self) -> np.ndarray:
        """The bytes that every row needs of a device."""
        return self.exploration.needs

    @property
    def time(self) -> np.ndarray:
        """The seconds of every row."""
        return self.column("time_s")

    @cached_property
    def planner(self) -> tuple[str, ...]:
        """The planner that found each row."""
        return tuple(self.column("planner").tolist())

    @cached_property
    def mesh(self) -> tuple[str, ...]:
        """The mesh of every row."""
        labels = [space.mesh.label for space in self.exploration.spaces]
        return tuple(labels[space] for space in self.column("space"))

    @cached_property
    def micro(self) -> np.ndarray:
        """The micro-batch count of every row."""
        return np.array([s.micro_batches for s in self.exploration.spaces], dtype=int)[self.column("space")]

    @cached_property
    def devices(self) -> np.ndarray:
        """The device count of every row."""
        return np.array([s.devices for s in self.exploration.spaces], dtype=int)[self.column("space")]

    @cached_property
    def on_frontier(self) -> np.ndarray:
        """Whether each row is a point of the frontier, as bools."""
        # Also a planner's own plan that none beats: it is one of the points, as in the CSV.
        return np.arange(len(self)) < len(self.exploration.points)

    @cached_property
    def notable(self) -> dict[int, list[str]]:
        """The few points that a short table has, with what each is."""
        return notable(self.exploration)

    @cached_property
    def by_planners(self) -> np.ndarray:
        """Whether a published planner found each row, as bools."""
        return np.array([name not in OWN for name in self.planner], dtype=bool)

    def title(self, row: int) -> str:
        """Return ``Point 17 of 201``; for a mark its planner, and which of its plans: ``ZeRO 2 of 5``."""
        words = self.exploration.title(row)
        planner = self.planner[row]
        if row < len(self.exploration.points):
            return words.capitalize()
        return words.replace(planner, planner_title(planner), 1)

    def label(self, row: int) -> str:
        """Return the title, without the count."""
        title = self.title(row).partition(" of ")[0]
        return title.replace("Point", "point", 1) if row < len(self.exploration.points) else title

    def allowed(self, view: View) -> np.ndarray:
        """Return the numbers of the frontier's rows that the filters keep and that fit and lie within the
        target."""
        keep = self.passing(view) & self.on_frontier & (self.needs <= self.limit_bytes(view))
        if view.target_s is not None:
            keep &= self.time <= view.target_s
        rows: np.ndarray = np.flatnonzero(keep)
        return rows

    def special(self, view: View) -> dict[str, int]:
        """Return rows that have a name: ``leanest`` and ``fastest`` of those that are allowed, ``knee`` of
        all that are shown and fit the device; empty if none is allowed."""
        rows = self.allowed(view)
        if not len(rows):
            return {}
        # The knee is one of the frontier as it is shown, whatever limit is set.
        shown = self.allowed(replace(view, budget_bytes=None, target_s=None))
        shown = shown if len(shown) else rows
        middle = int(shown[knee(_Points(self.column("memory_bytes")[shown], self.time[shown]))])
        leanest = int(rows[np.argmin(self.needs[rows])])
        return {"leanest": leanest, "knee": middle, "fastest": int(rows[-1])}

    def asked_about(self, view: View) -> np.ndarray:
        """Return the numbers of the rows that the answer is about: those that the filters keep, of planners,
        too, whether their marks are shown or not."""
        rows: np.ndarray = np.flatnonzero(self.passing(replace(view, marks=True)))
        return rows

    def picked(self, view: View) -> int | None:
        """Return the row that the limits select: the recommended plan, or within a time alone the one that
        needs least; None if nothing is within them."""
        rows = self.asked_about(view)
        if view.target_s is not None:
            rows = rows[self.time[rows] <= view.target_s]
            fitting = rows[self.needs[rows] <= self.limit_bytes(view)]
            if view.budget_bytes is None:
                return int(fitting[np.argmin(self.needs[fitting])]) if len(fitting) else None
        found = recommended(self.exploration, self.limit_bytes(view), rows)
        return None if found is None else found.row

    @property
    def capacity_bytes(self) -> float:
        """The memory of the smallest device."""
        return _capacity_of(self.exploration.cluster)[0]

    @property
    def device(self) -> str:
        """The kind of the device with the least memory."""
        return _capacity_of(self.exploration.cluster)[1]

    @property
    def asked_bytes(self) -> float | None:
        """The memory budget of the run that made it, if it had one."""
        asked = self.exploration.settings.get("memory_bytes")
        return float(asked) if asked else None

    def near_capacity(self, largest_bytes: float, view: View) -> bool:
        """Return whether the device's memory is worth showing beside points of up to ``largest_bytes``."""
        return self.capacity_bytes <= largest_bytes * (_IN_VIEW**2 if view.log_x else _IN_VIEW)

    def limit_bytes(self, view: View) -> float:
        """Return the bytes that a plan may need of a device, by the view's budget and headroom
        (:func:`~tensoropt.costs.device_fit.usable_bytes`)."""
        return self.exploration.usable_bytes(view.budget_bytes, view.asked_headroom)

    def room_bytes(self, view: View) -> float:
        """Return the bytes that verdicts are about: the budget or the device, less a headroom that was asked
        for."""
        if view.asked_headroom is not None:
            return self.limit_bytes(view)
        return room_bytes(self.capacity_bytes, view.budget_bytes)

    def fitting(self, view: View) -> np.ndarray:
        """Return which rows fit, tightly or not, as bools; the others are greyed."""
        return np.asarray(self.needs <= self.room_bytes(view))

    def far_marks(self, view: View) -> np.ndarray:
        """Return which rows are other planners' plans so far from the frontier that a plot of them all would
        show it as a dot; none where axes are logarithmic, or that a person picked."""
        rows = np.flatnonzero(self.passing(view) & self.on_frontier)
        far = np.zeros(len(self), dtype=bool)
        if view.log_x or view.log_y or not len(rows):
            return far
        axes = axes_of(self, view)
        for values in (axes.x.values, axes.y.values):
            low, high = values[rows].min(), values[rows].max()
            room = _ROOM_FOR_MARKS * max(high - low, high / 4)
            far |= (values < low - room) | (values > high + room)
        far &= self.by_planners
        far[[row for row in (view.point, view.other) if row is not None]] = False
        return far

    def passing(self, view: View) -> np.ndarray:
        """Return the rows that the filters keep."""
        keep = np.ones(len(self), dtype=bool)
        if view.mesh:
            keep &= np.array([m == view.mesh for m in self.mesh])
        if view.micro:
            keep &= self.micro.astype(str) == view.micro
        if view.devices:
            keep &= self.devices.astype(str) == view.devices
        if not view.marks:
            keep &= self.on_frontier
        return keep

    def filters(self) -> dict[str, list[str]]:
        """Return the possible filters: the values that occur, in order."""
        return {
            "mesh": list(dict.fromkeys(self.mesh)),
            "micro": [str(m) for m in np.unique(self.micro)],
            "devices": [str(d) for d in np.unique(self.devices)],
        }

    def neighbour(self, view: View, step: int) -> int:
        """Return the row ``step`` rows along the frontier from the selected one, among those the filters
        keep."""
        rows = np.flatnonzero(self.passing(view) & self.on_frontier)
        if not len(rows):
            return view.point or 0
        at = int(np.searchsorted(rows, view.point or 0))
        if step > 0 and at < len(rows) and rows[at] != view.point:
            step -= 1  # standing between two rows, the next one is one step away
        return int(rows[min(max(at + step, 0), len(rows) - 1)])


class _Points:
    def __init__(self, memory: np.ndarray, time: np.ndarray):
        self.memory, self.time = memory, time


def _capacity_of(cluster: Mapping[str, Any]) -> tuple[float, str]:
    """Return (bytes, kind) of the device with the least memory, from a saved cluster."""
    # Every device has a part of a sharded plan, so the smallest one limits it.
    kind = min(cluster["kinds"], key=lambda k: k["memory_bytes"])
    return float(kind["memory_bytes"]), str(kind["name"])


def price_of(data: FrontierData, view: View) -> float | None:
    """Return money per device-hour: what the page says, otherwise the cluster's own (the dearest kind),
    otherwise None."""
    if view.price is not None:
        return view.price
    prices = [kind.get("price_per_hour") for kind in data.exploration.cluster["kinds"]]
    prices_known = [float(p) for p in prices if p is not None]
    # A cluster with one price missing has none: a sum of what is known would be too low.
    return max(prices_known) if prices_known and len(prices_known) == len(prices) else None


def money(amount: float, view: View) -> str:
    """Format money per thousand steps, as single steps cost fractions of a cent."""
    return f"{digits(1000 * amount)} {view.currency}".rstrip() + " per 1,000 steps"


def limit_sentence(data: FrontierData, view: View) -> str:
    """Say what the limits do to this frontier; "" if everything fits."""
    unit, time = data.units.memory, data.units.time
    rows = np.flatnonzero(data.passing(view) & data.on_frontier)
    if not len(rows):
        return ""  # filter_sentence says why
    smallest, fastest = float(data.needs[rows].min()), float(data.time[rows].min())
    limit = data.limit_bytes(view)
    if view.budget_bytes is not None and smallest > limit:
        return f"No plan fits {unit.limit(limit)}; the smallest needs {unit.text(smallest)}."
    if view.target_s is not None and fastest > view.target_s:
        return f"No plan takes at most {time.limit(view.target_s)}; the fastest takes {time.text(fastest)}."
    over = int(np.count_nonzero(~data.fitting(view)[rows]))
    if smallest > limit:
        room = f"{unit_for(limit).limit(limit)} that {with_article(data.device)} leaves"
        return (
            f"No plan fits the {room} with {percent(view.headroom)} headroom; the smallest needs "
            f"{unit.text(smallest)}. Use more devices, a smaller batch or bigger devices."
        )
    if over:
        most = data.room_bytes(view)
        more = f"{'your' if most == view.budget_bytes else 'the'} {unit_for(most).limit(most)}"
        more += f" of {with_article(data.device)}" if most != view.budget_bytes else ""
        needs = "needs more than {} and is" if over == 1 else "need more than {} and are"
        return f"{over:,} of {plural(len(rows), 'plan')} {needs.format(more)} greyed."
    return ""


def filter_sentence(data: FrontierData, view: View) -> str:
    """Return the sentence for filters that leave nothing."""
    if data.passing(view).any():
        return ""
    named = {"mesh": view.mesh, "micro-batches": view.micro, "devices": view.devices}
    chosen = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    return f"No point of this frontier has {chosen}; clear a filter to see points again."


def address_sentences(data: FrontierData, search: str) -> list[str]:
    """Say which parts of an address are not followed, and which points that it names do not exist."""
    found, said = View.from_query(search), not_understood(search)
    for name, row in (("point", found.point), ("other", found.other)):
        text = dict(parse_qsl(search.lstrip("?"))).get(name)
        if text is not None and (row is None or row >= len(data)):
            points = count_words(data, View())
            said.append(f"Point {text[:20]} does not exist: this frontier has {points}.")
    return said


def mark_sentence(data: FrontierData) -> str:
    """Return the sentence for a published method's point that lies below the line."""
    rows = np.flatnonzero(data.on_frontier)
    if not len(rows):
        return ""
    below = []
    memory = data.column("memory_bytes")
    for row in np.flatnonzero(~data.on_frontier):
        fitting = rows[memory[rows] <= memory[row]]
        best = data.time[fitting].min() if len(fitting) else np.inf
        if data.time[row] < best * (1 - 1e-9):
            below.append(planner_title(data.planner[row]))
    if not below:
        return ""
    return (
        f"{', '.join(dict.fromkeys(below))}: below the line. The search adds costs up, then every plan "
        "is simulated in time; a mark can come out better than the points that looked best before."
    )


def far_sentence(data: FrontierData, view: View) -> str:
    """Return the sentence for plans of other planners that are not in the plot."""
    count = int(np.count_nonzero(data.passing(view) & data.far_marks(view)))
    if not count:
        return ""
    return (
        f"{plural(count, 'plan')} of other planners need so much more memory or time that this plot leaves "
        "them out; the table of baselines has them, and logarithmic axes show them."
    )


def count_words(data: FrontierData, view: View) -> str:
    """Return ``36 of 201 points, 12 plans of other planners``: points are the frontier's, as everywhere."""
    kept = data.passing(view)
    points, marks = int((kept & data.on_frontier).sum()), int((kept & ~data.on_frontier).sum())
    whole = int(data.on_frontier.sum())
    words = plural(whole, "point") if points == whole else f"{points:,} of {plural(whole, 'point')}"
    return words + (f", {plural(marks, 'plan')} of other planners" if marks else "")


def tariff_of(view: View) -> Tariff:
    """Return the device prices of a view: the price of all devices, the currency."""
    return Tariff(view.price, currency=view.currency)


def amount_in(view: View) -> Amount:
    """Return the training that a view asks about; 1,000 steps if it names none."""
    return amount_of(view.amount) or THOUSAND_STEPS


@dataclass(frozen=True, eq=False)
class _RateArrays:
    """The rates of all rows; None if one is unknown, and then ``whys`` has the reason by its name.

    Attributes:
        unit: what ``rate`` counts: tokens if the model reads them, otherwise samples.
        rate: the rates per second.
        mfu: the MFU, as shares.
        hours, device_hours, cost: those of the amount that the view asks about.
        amount: that amount in words.
    """

    unit: str
    rate: np.ndarray | None
    mfu: np.ndarray | None
    hours: np.ndarray | None
    device_hours: np.ndarray | None
    cost: np.ndarray | None
    amount: str
    whys: dict[str, str]


def rate_arrays(data: FrontierData, view: View) -> _RateArrays:
    """Return the rates of all rows of a frontier."""
    table, amount, whys = RatesOf(data.exploration, tariff_of(view)), amount_in(view), dict[str, str]()
    work = table.work
    unit, per_step = ("tokens", work.tokens) if work.tokens is not None else ("samples", work.samples)
    if per_step is None:
        whys["rate"] = work.whys["samples"]
    # A plan's devices decide both; there are few different numbers of them.
    ideal_s, per_hour = np.zeros(len(data)), np.zeros(len(data))
    for count in np.unique(data.devices):
        rows = data.devices == count
        ideal, price, why = table.of_devices(int(count))
        ideal_s[rows] = np.nan if ideal is None else ideal
        per_hour[rows] = np.nan if price is None else price
        whys |= {{"per_hour": "cost"}.get(name, name): said for name, said in why.items()}
    hours = None
    try:
        hours = amount.steps(work) * data.time / HOUR_S
    except TensorOptError as error:
        whys |= dict.fromkeys(("hours", "device_hours", "cost"), str(error))
    return _RateArrays(
        unit=unit,
        rate=None if per_step is None else per_step / data.time,
        mfu=None if "mfu" in whys else ideal_s / data.time,
        hours=hours,
        device_hours=None if hours is None else hours * data.devices,
        cost=None if hours is None or "cost" in whys else hours * per_hour,
        amount=amount.words,
        whys=whys,
    )


TITLES = {
    "memory": "memory needed per device", "time": "time per step", "rate": "tokens/s or samples/s",
    "mfu": "MFU", "hours": "device-hours", "cost": "cost",
}  # fmt: skip
"""The titles of the figures that an axis can show."""


@dataclass(frozen=True, eq=False)
class _Axis:
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

    x: _Axis
    y: _Axis
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
    rates, refused = rate_arrays(data, view), []
    axes = []
    if is_tautology(view.across, view.up):
        refused.append(f"The plot cannot show {view.up} over {TITLES[view.across]}: both say the same.")
        view = replace(view, up=USUAL_UP)
    for name, usual in ((view.across, USUAL_ACROSS), (view.up, USUAL_UP)):
        axis = _usual(data, name) if name == usual else _of(data, view, rates, name)
        if axis is None:
            why = rates.whys.get({"hours": "device_hours"}.get(name, name), "it is unknown")
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


def _usual(data: FrontierData, name: str) -> _Axis:
    values, unit = (data.needs, data.units.memory) if name == "memory" else (data.time, data.units.time)
    return _axis(name, TITLES[name], unit, values)


def _axis(name: str, title: str, unit: Unit, values: np.ndarray) -> _Axis:
    said = f"{title}, {unit.name}" if unit.name else title
    return _Axis(name, said, unit.name, values / unit.factor)


def _of(data: FrontierData, view: View, rates: _RateArrays, name: str) -> _Axis | None:
    values = {
        "rate": rates.rate, "mfu": rates.mfu, "hours": rates.device_hours, "cost": rates.cost,
    }[name]  # fmt: skip
    if values is None:
        return None
    unit = Unit({"rate": f"{rates.unit}/s", "mfu": "%", "hours": "h", "cost": ""}[name], 1.0)
    title = {
        "rate": "throughput", "mfu": "MFU", "hours": f"device-hours for {rates.amount}",
        "cost": f"cost of {rates.amount}" + (f", {view.currency}" if view.currency else ""),
    }[name]  # fmt: skip
    if name == "mfu":
        unit = Unit("%", 0.01)
    return _axis(name, title, unit, values)
