"""A point in words and figures, and two points side by side.

Points whose plans were run have predictions next to measurements. The basis of the figures is shown too:
settings, defaults, sources, and what was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.costs.device_fit import FAILS, TIGHT
from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import FIT, LISTED_NAMES, noted, rate_facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.notes import notes_of
from tensoropt.exploration.verified import Verified
from tensoropt.plan.facts_table import Fact, named
from tensoropt.plan.figures import KEPT, LISTED
from tensoropt.plan.point import FRONTIER, Point
from tensoropt.question.settings import settings_fields
from tensoropt.report.ran import ran_words
from tensoropt.report.step_parts import COMPUTING, HOST, IDLE, WAITING, waits_of
from tensoropt.report.table import timing_words
from tensoropt.simulate.recording import MEMORY_KINDS
from tensoropt.units import with_article

from ..state import View
from .frontier import FrontierData, amount_in, price_of, tariff_of
from .units import digits, percent, signed, unit_for

_MOST_LISTED = 4
NOT_YET = "not verified yet; the last command of the Export page does it"


def of_point(data: FrontierData, row: int, verified: Sequence[Verified]) -> Verified | None:
    """Return what is known about one point."""
    return next((v for v in verified if v.is_of(data.exploration, row)), None)


def verified_words(run: Verified, data: FrontierData) -> str:
    """Return what running a plan showed, in the page's units."""
    return ran_words(run, data.exploration.cluster, data.units.memory.text, data.units.time.text)


def verified_lines(data: FrontierData, verified: Sequence[Verified]) -> tuple[str, ...]:
    """Return a line per point that was run, ascending; :data:`NOT_YET` if none was."""
    rows = [(row, of_point(data, row, verified)) for row in range(len(data))] if verified else []
    runs = [(row, run) for row, run in rows if run is not None]
    lines = [
        f"{data.label(row)}: {verified_words(run, data)} ({run.checked_on})"
        for row, run in runs[:_MOST_LISTED]
    ]
    if len(runs) > _MOST_LISTED:
        lines.append(f"and {len(runs) - _MOST_LISTED} more")
    return tuple(lines) or (NOT_YET,)


NOTE, ORIGIN = "note", "origin"
"""The labels of each sentence about what was left out or not timed, and about where figures come from."""


def assumptions(
    data: FrontierData, view: View, verified: Sequence[Verified] = (), fault: str = ""
) -> tuple[Fact, ...]:
    """Return labels and values, in the order in which people ask.

    Args:
        verified: what is known about plans that were run.
        fault: why that cannot be read, "" if it can.
    """
    exploration = data.exploration
    settings = exploration.settings
    whole = unit_for(data.capacity_bytes)
    price = price_of(data, view)
    facts = [
        Fact("model", f"{data.model}, {_count(exploration.model.parameters)} parameters"),
        Fact("batch", _batch_words(exploration)),
        Fact(
            "cluster", f"{exploration.cluster['name']}, {len(exploration.cluster['devices'])} × {data.device}"
        ),
        Fact("memory of a device", f"{whole.text(data.capacity_bytes)}, {percent(view.headroom)} kept free"),
        *settings_facts(exploration),
        Fact("price", "unknown" if price is None else f"{digits(price)} per device-hour"),
        Fact("figures", timing_words(exploration)),
        *(
            Fact("predicted / measured", line)
            for line in ((fault,) if fault else verified_lines(data, verified))
        ),
    ]
    if settings.get("constraints"):
        facts.append(Fact("constraints", "as given; constraints.json on the Export page has them"))
    facts += [Fact(NOTE, text) for text in (*noted(exploration), *notes_of(exploration, missing=True))]
    facts += [Fact(ORIGIN, text) for text in notes_of(exploration, missing=False)]
    return tuple(facts)


def settings_facts(exploration: Exploration) -> list[Fact]:
    """Return what was chosen about an exploration, and what its figures are.

    Of settings that say little at their default there is a row where something else was chosen.
    """
    chosen = exploration.settings
    rows = []
    for setting in settings_fields():
        value = chosen.get(setting.name, setting.default)
        if (setting.assumed or value != setting.default) and setting.name != "constraints":
            rows.append(Fact(setting.label[:1].lower() + setting.label[1:], setting.row(value)))
    return [
        *rows,
        Fact("time", "one simulated step: compute, communication it waits for, idle"),
        Fact("memory", "simulated peak of the largest device; inputs and buffers left out"),
    ]


def _batch_words(exploration: Exploration) -> str:
    """Say the global batch, as far as it is known."""
    model = exploration.model
    return str(model.batch or _first_size(model.call) or "the model's own")


def _first_size(call: Any) -> int | None:
    """Return the first size of the first tensor that the model was called with."""
    if not isinstance(call, Mapping):
        return None
    for value in [*call.get("args", []), *dict(call.get("kwargs", {})).values()]:
        if isinstance(value, Mapping) and value.get("tensor"):
            return int(value["tensor"][0])
    return None


def _count(number: int) -> str:
    for name, factor in (("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{digits(number / factor)} {name}"
    return f"{number:,}"


KIND_TITLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "kept": "kept activations",
    "transient": "buffers in flight",
    "constants": "constants",
    "process": "what a process takes beside tensors",
}
PROCESS = "process"
PROVEN = "proven"
SHOWN = (
    *("mesh", "micro-batches", FIT, "range", "compute", "communication"), *LISTED_NAMES,
    "figures", PROVEN,
)  # fmt: skip
"""The facts on the card, in order."""
TITLES = {"communication_s": "communication"}
"""The titles, in the table of two points, of figures with a shorter label in a column."""


@dataclass(frozen=True)
class PointCard:
    """The card beside the plot, with the facts about a point.

    Attributes:
        title: ``Point 17 of 201``.
        name: what people call its plan.
        memory, time: the two figures that matter, what it needs of a device and its step, with units.
        verdict: whether it fits the device, in words.
        mark: the same as a class of the style sheet: ``fits``, ``tight`` or ``over``.
        dominant: where most of the memory and of the time goes.
    """

    title: str
    name: str
    memory: str
    time: str
    mark: str
    verdict: str
    dominant: str
    facts: tuple[Fact, ...]


def point_card(data: FrontierData, view: View, row: int, verified: Sequence[Verified] = ()) -> PointCard:
    """Return the card of one point, with what running its plan showed if it was run."""
    point = data.exploration.all_points[row]
    unit, time = data.units.memory, data.units.time
    mark, verdict = _verdict_words(data, view, row)
    limit = _limit_words(data, view)
    marks = [word if word == "knee" else word + limit for word, at in data.special(view).items() if at == row]
    facts = data.facts(row)
    ran = of_point(data, row, verified)
    said = [
        *named(facts, *(["planner"] if point.planner != FRONTIER else []), *SHOWN),
        *_rates_of(data, view, row),
        *([Fact("verified", verified_words(ran, data))] if ran is not None else []),
    ]
    return PointCard(
        title=data.title(row) + (f" · {', '.join(marks)}" if marks else ""),
        name=data.exploration.names[row],
        memory=unit.text(data.needs[row]),
        time=time.text(point.time_s),
        mark=mark,
        verdict=verdict,
        dominant=dominant_words(data.exploration, row),
        facts=tuple(said),
    )


def _limit_words(data: FrontierData, view: View) -> str:
    """Return `` within 24 GiB``: among what a point is the fastest or the leanest."""
    units, limits = data.units, (view.budget_bytes, view.target_s)
    words = (unit.limit(at) for unit, at in zip((units.memory, units.time), limits, strict=True) if at)
    return "".join(f" within {limit}" for limit in words)


def _verdict_words(data: FrontierData, view: View, row: int) -> tuple[str, str]:
    """Return whether a plan fits the budget, and what the device leaves, as a mark and in words about the one
    that counts."""
    unit, room, budget = data.units.memory, data.room_bytes(view), view.budget_bytes
    fit, capacity = data.exploration.fit(row, room), data.capacity_bytes
    needs, card = fit.needed_bytes, with_article(data.device)
    if fit.verdict == FAILS:
        over = unit.text(needs - room)
        if room == budget:
            return "over", f"Needs {over} more than your {unit.limit(room)}."
        size = unit_for(room).limit(room)
        left = (
            f"its {size}" if room == capacity else f"the {size} that {percent(view.headroom)} headroom leaves"
        )
        return "over", f"Does not fit {card}: needs {over} more than {left}."
    mark, fits = ("tight", "Just fits") if fit.verdict == TIGHT else ("fits", "Fits")
    if room == budget:
        return mark, f"{fits} your {unit.limit(room)} ({percent(needs / room)})."
    whole = unit_for(capacity).limit(capacity)
    return mark, f"{fits} {card} ({percent(needs / capacity)} of its {whole})."


def _rates_of(data: FrontierData, view: View, row: int) -> list[Fact]:
    """Return throughput, MFU, and the time and cost of the training that the view asks about."""
    rated, amount = FigureRow.of(data.exploration, row, tariff_of(view)), amount_in(view)
    try:
        return rate_facts(rated, amount)
    except TensorOptError as error:
        # Kept from an exploration whose model reads tokens.
        return [*rate_facts(rated), Fact(amount.words, None, note=str(error))]


def beside_tensors(point: Point) -> dict[str, float]:
    """Return the bytes of what is not a tensor of the step, by kind."""
    constants = point.terms.get(CONSTANTS, 0.0)
    return {CONSTANTS: constants, PROCESS: sum(point.terms.values()) - constants}


def sizes_of(point: Point) -> dict[str, float]:
    """Return the bytes at the peak by kind: tensors, then what is not a tensor of the step."""
    return {**dict(zip(MEMORY_KINDS, point.memory, strict=True)), **beside_tensors(point)}


def dominant_words(exploration: Exploration, row: int) -> str:
    """Say where most of the memory and most of the time goes."""
    point = exploration.all_points[row]
    sizes = sizes_of(point)
    total = sum(sizes.values()) or 1.0
    kind, size = max(sizes.items(), key=lambda item: item[1])
    memory = f"Memory is mostly {KIND_TITLES[kind]} ({percent(size / total)})"
    waits = waits_of(point)
    key = max(waits, key=lambda name: waits[name])
    return f"{memory}; {_MOSTLY[key]} ({percent(waits[key] / (point.time_s or 1.0))})."


_MOSTLY = {
    COMPUTING: "time is mostly compute",
    WAITING: "time is mostly communication",
    HOST: "the device mostly waits for its host",
    IDLE: "the device mostly waits for others",
}
"""Words for what most of a step consists of."""


@dataclass(frozen=True)
class _Difference:
    """One figure of two points; ``change`` is empty if there is nothing to subtract."""

    label: str
    first: str
    second: str
    change: str


def differences(data: FrontierData, row: int, other: int) -> tuple[_Difference, ...]:
    """Return what differs between the selected point and the one it is compared with; equal figures are left
    out."""
    a, b = data.exploration.all_points[row], data.exploration.all_points[other]
    unit, time = data.units.memory.text, data.units.time.text
    times = ((name, KEPT[name].label) for name in ("time_s", "compute_s", "communication_s", "exposed_s"))
    rows = [
        _changed("needs", data.needs[row], data.needs[other], unit),
        _changed("memory", a.memory_bytes, b.memory_bytes, unit),
        *(
            _changed(TITLES.get(name, label), getattr(a, name), getattr(b, name), time)
            for name, label in times
        ),
    ]
    rows += [
        _Difference("host", a.kind.host or time(a.host_s), b.kind.host or time(b.host_s), "")
        if a.kind.host or b.kind.host
        else _changed("host", a.host_s, b.host_s, time),
        *(_changed(KIND_TITLES[kind], size, sizes_of(b)[kind], unit) for kind, size in sizes_of(a).items()),
    ]
    for figure in LISTED:
        if figure.name in a.figures and figure.name in b.figures:
            rows.append(
                _changed(figure.label, a.figures[figure.name], b.figures[figure.name], figure.unit.words)
            )
    first, second = data.facts(row), data.facts(other)
    for name in ("plan", "mesh", "micro-batches", "devices", "planner"):
        rows.append(_Difference(name, str(first[name].value), str(second[name].value), ""))
    return tuple(d for d in rows if d.first != d.second)


def _changed(label: str, first: float, second: float, text: Callable[[float], str]) -> _Difference:
    change = second - first
    relative = f" ({signed(change, percent(abs(change) / first))})" if first else ""
    return _Difference(label, text(first), text(second), signed(change, text(abs(change))) + relative)
