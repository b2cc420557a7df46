"""The texts and figures of one plan, and the assumptions behind them.

Plans that were run show measurements beside predictions. Assumptions include what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from tensoropt.costs.device_fit import FAILS, TIGHT
from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import FIT, LISTED_NAMES, noted, rate_facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.notes import notes_of
from tensoropt.exploration.rates import Tariff
from tensoropt.exploration.verified import Verified
from tensoropt.plan.facts_table import Fact, named
from tensoropt.plan.point import FRONTIER, Point
from tensoropt.question.settings import settings_fields
from tensoropt.report.ran import ran_words
from tensoropt.report.step_parts import COMPUTING, HOST, IDLE, WAITING, waits_of
from tensoropt.report.table import timing_words
from tensoropt.simulate.recording import MEMORY_KINDS

from ..library import first_size
from ..state import View
from .frontier import FrontierData
from .result import amount_in
from .units import digits, percent, unit_for

_MOST_LISTED = 4
NOT_YET = "not verified yet; run the last command of Export"


def of_point(data: FrontierData, row: int, verified: Sequence[Verified]) -> Verified | None:
    """Return the verification (results of a run) of one point; None if its plan was not run."""
    return next((v for v in verified if v.is_of(data.exploration, row)), None)


def verified_words(run: Verified, data: FrontierData) -> str:
    """Return the results of running a plan, in the page's units."""
    return ran_words(run, data.exploration.cluster, data.units.memory.text, data.units.time.text)


def verified_lines(data: FrontierData, verified: Sequence[Verified]) -> tuple[str, ...]:
    """Return a line per point that was run, in order; :data:`NOT_YET` if there is none."""
    found = [(run.point_of(data.exploration), run) for run in verified]
    runs = sorted(((row, run) for row, run in found if row is not None), key=itemgetter(0))
    lines = [
        f"{data.title(row)}: {verified_words(run, data)} ({run.checked_on})"
        for row, run in runs[:_MOST_LISTED]
    ]
    if len(runs) > _MOST_LISTED:
        lines.append(f"and {len(runs) - _MOST_LISTED} more")
    return tuple(lines) or (NOT_YET,)


NOTE, ORIGIN = "note", "origin"
"""Labels of notes on what was left out or not timed, and on the sources of figures."""


def assumptions(
    data: FrontierData, view: View, verified: Sequence[Verified] = (), fault: str = ""
) -> tuple[Fact, ...]:
    """Return the assumptions as labelled values: what figures rest on, memory, then model, batch, cluster,
    settings, price and notes.

    Args:
        verified: the verifications (results of runs) of plans.
        fault: why the verifications cannot be read; "" if they can.
    """
    exploration = data.exploration
    settings = exploration.settings
    whole = unit_for(data.capacity_bytes)
    price = _price(data, view)
    facts = [
        Fact("figures", timing_words(exploration)),
        *(
            Fact("predicted / measured", line)
            for line in ((fault,) if fault else verified_lines(data, verified))
        ),
        Fact(
            "memory of a device",
            f"{whole.limit(data.capacity_bytes)}, of which a plan may need {data.limit_words(view)}",
        ),
        Fact("model", f"{data.model}, {_count(exploration.model.parameters)} parameters"),
        Fact("batch", _batch_words(exploration)),
        Fact(
            "cluster", f"{exploration.cluster['name']}, {len(exploration.cluster['devices'])} × {data.device}"
        ),
        *settings_facts(exploration),
        Fact("price", "unknown" if price is None else f"{digits(price)} per device-hour"),
    ]
    if settings.get("constraints"):
        facts.append(Fact("constraints", "as given; constraints.json in Export has them"))
    facts += [Fact(NOTE, text) for text in (*noted(exploration), *notes_of(exploration, missing=True))]
    facts += [Fact(ORIGIN, text) for text in notes_of(exploration, missing=False)]
    return tuple(facts)


def _price(data: FrontierData, view: View) -> float | None:
    """Return the price per device-hour: the one on the page, else the cluster's highest one, else None."""
    if view.price is not None:
        return view.price
    prices = [kind.get("price_per_hour") for kind in data.exploration.cluster["kinds"]]
    # If one price is missing the cluster has none: the sum of the rest would be too low.
    return None if None in prices or not prices else max(map(float, prices))


def settings_facts(exploration: Exploration) -> list[Fact]:
    """Return the settings of an exploration, then what its time and memory mean, as labelled values.

    Some settings are listed only if they differ from their default.
    """
    chosen = exploration.settings
    rows = []
    for setting in settings_fields():
        value = chosen.get(setting.name, setting.default)
        if (setting.assumed or value != setting.default) and setting.name != "constraints":
            rows.append(Fact(setting.label[:1].lower() + setting.label[1:], setting.row(value)))
    return [
        *rows,
        Fact("time", "one simulated step: compute, exposed communication and idle time"),
        Fact("memory", "simulated peak of the largest device; inputs and buffers left out"),
    ]


def _batch_words(exploration: Exploration) -> str:
    model = exploration.model
    return str(model.batch or first_size(model.call) or "the model's own")


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
    "process": "process memory beside tensors",
}
PROCESS = "process"
_PROVEN = "proven"
SHOWN = (
    *("mesh", "micro-batches", FIT, "range", "compute", "communication"), *LISTED_NAMES,
    "figures", _PROVEN,
)  # fmt: skip
"""The names of the facts on a card, in order."""


@dataclass(frozen=True)
class PointCard:
    """The card of a point, beside the plot.

    Attributes:
        title: ``Point 17 of 201``.
        name: the plan's name.
        memory, time: the memory that the plan needs on a device and its step time, with units.
        verdict: whether the plan fits the device, in words.
        mark: the verdict's CSS class: ``fits``, ``tight`` or ``over``.
        dominant: where most of the plan's memory and time goes.
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
    """Return a point's card, with verification results if any."""
    point = data.exploration.all_points[row]
    unit, time = data.units.memory, data.units.time
    facts = data.facts(row)
    ran = of_point(data, row, verified)
    said = [
        *named(facts, *(["planner"] if point.planner != FRONTIER else []), *SHOWN),
        *_rates_of(data, view, row),
        *([Fact("verified", verified_words(ran, data))] if ran is not None else []),
    ]
    return PointCard(
        title=data.title(row),
        name=data.exploration.names[row],
        memory=unit.text(data.needs[row]),
        time=time.text(point.time_s),
        mark=data.mark(view, row),
        verdict=_verdict_words(data, view, row),
        dominant=dominant_words(data.exploration, row),
        facts=tuple(said),
    )


def _verdict_words(data: FrontierData, view: View, row: int) -> str:
    """Return in a sentence whether a plan fits the view's budget, or the device."""
    unit, room = data.units.memory, data.room_bytes(view)
    needs, verdict = float(data.needs[row]), data.verdict(view, row)
    size = unit_for(room).limit(room)
    of = f"one {data.device} of {size}" if room == data.capacity_bytes else f"the budget of {size}"
    if verdict == FAILS:
        return f"Does not fit {of}: needs {unit.text(needs - room)} more."
    return f"{'Just fits' if verdict == TIGHT else 'Fits'} {of} ({percent(needs / room)})."


def _rates_of(data: FrontierData, view: View, row: int) -> list[Fact]:
    """Return throughput, MFU, and the time and cost of the view's training."""
    rated, amount = FigureRow.of(data.exploration, row, Tariff(view.price)), amount_in(view)
    try:
        return rate_facts(rated, amount)
    except TensorOptError as error:
        # Left over from an exploration whose model reads tokens.
        return [*rate_facts(rated), Fact(amount.words, None, note=str(error))]


def beside_tensors(point: Point) -> dict[str, float]:
    """Return the memory in bytes that a device needs beside the step's tensors, by kind."""
    constants = point.terms.get(CONSTANTS, 0.0)
    return {CONSTANTS: constants, PROCESS: sum(point.terms.values()) - constants}


def sizes_of(point: Point) -> dict[str, float]:
    """Return the memory in bytes at the peak by kind: the step's tensors, then what else the device holds."""
    return {**dict(zip(MEMORY_KINDS, point.memory, strict=True)), **beside_tensors(point)}


def dominant_words(exploration: Exploration, row: int) -> str:
    """Return a sentence on the largest parts of memory and time."""
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
"""Words for the largest part of a step."""
