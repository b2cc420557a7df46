"""A point in words and figures, and two points side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.errors import TensorOptError
from tensoropt.plan import Exploration, Point
from tensoropt.plan.figures import LISTED
from tensoropt.plan.frontier_table import source_words, split_words
from tensoropt.plan.rates import RatesOf
from tensoropt.plan.verified import Verified
from tensoropt.report.assumptions import proof_words as proof_of
from tensoropt.report.rate_words import facts_of
from tensoropt.report.step_parts import COMPUTING, HOST, IDLE, WAITING, waits_of
from tensoropt.simulate.recording import MEMORY_KINDS

from ..state import View
from .frontier import FRONTIER, FrontierData, planner_title, unit_for
from .rates import amount_in, tariff_of
from .units import Units, percent, plural, signed
from .verified import of_point, verified_words

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
IN_COMPUTE = "in compute"
"""The place of a placed plan's host time: its operators take as long as the slower of device and host."""


@dataclass(frozen=True)
class Fact:
    """A label, its figure, and a remark."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PointCard:
    """The card beside the plot with what there is to say about a point.

    Attributes:
        title: ``Point 17 of 201``.
        name: what people call its plan.
        memory, time: the two figures that matter, with units.
        verdict: whether it fits the device, in words; ``fits`` says so to a program.
        dominant: where most of the memory and of the time goes.
    """

    title: str
    name: str
    memory: str
    time: str
    fits: bool
    verdict: str
    dominant: str
    facts: tuple[Fact, ...]


def point_card(data: FrontierData, view: View, row: int, verified: Sequence[Verified] = ()) -> PointCard:
    """Return the card of one point, with what running its plan showed if it was run."""
    point = data.exploration.all_points[row]
    unit, time = data.units.memory, data.units.time
    fits, verdict = verdict_words(data, view, point.memory_bytes)
    marks = [word for word, at in data.special(view).items() if at == row]
    hidden = f", {time.text(point.hidden_s)} hidden" if hides(point) else ""
    facts = [
        Fact("mesh", f"{data.mesh[row]} ({plural(int(data.devices[row]), 'device')})"),
        Fact("micro-batches", str(int(data.micro[row]))),
        Fact("compute", time.text(point.compute_s)),
        Fact("communication", time.text(point.communication_s) + hidden),
        Fact("split by", split_words(data.exploration, row)),
        *(Fact(*fact) for fact in data.listed(row)),
        Fact("figures", source_words(point.sources) or "—"),
        Fact(PROVEN, proof_words(point, data.units)),
    ]
    facts += rate_facts(data, view, row)
    ran = of_point(data, row, verified)
    if ran is not None:
        facts.append(Fact("verified", verified_words(ran, data)))
    if point.planner != FRONTIER:
        facts.insert(0, Fact("planner", planner_title(point.planner)))
    return PointCard(
        title=data.title(row) + (f" · {', '.join(marks)}" if marks else ""),
        name=data.exploration.names[row],
        memory=unit.text(point.memory_bytes),
        time=time.text(point.time_s),
        fits=fits,
        verdict=verdict,
        dominant=dominant_words(data.exploration, row),
        facts=tuple(facts),
    )


def verdict_words(data: FrontierData, view: View, memory_bytes: float) -> tuple[bool, str]:
    """Return whether a plan fits, and how much it uses of what counts: the budget if one is set below what a
    device leaves, otherwise the device's memory."""
    unit, usable, capacity = data.units.memory, data.usable_bytes(view), data.capacity_bytes
    of_device = f"{percent(memory_bytes / capacity)} of its {unit_for(capacity).text(capacity)}"
    budget = view.budget_bytes
    if memory_bytes > usable:
        room = f"{unit_for(usable).text(usable)} are left after {percent(view.headroom)} headroom"
        over = (
            ""
            if budget is None or memory_bytes <= budget
            else f", and over the budget of {unit.text(budget)}"
        )
        return False, f"Does not fit a {data.device}: {room}{over}."
    if budget is None:
        return True, f"Fits a {data.device}: uses {of_device}."
    if memory_bytes > budget:
        over = f"Over the budget of {unit.text(budget)} by {unit.text(memory_bytes - budget)}"
        return False, f"{over}; a {data.device} itself would have room."
    if budget > usable:
        left = f"of which {unit_for(usable).text(usable)} may be used"
        return (
            True,
            f"Fits a {data.device}: uses {of_device}, {left}: less than the budget of {unit.text(budget)}.",
        )
    share = percent(memory_bytes / budget)
    return True, (
        f"Fits the budget of {unit.text(budget)}: uses {share} of it, and "
        f"{of_device.replace('its', f'the {data.device}’s')}."
    )


def rate_facts(data: FrontierData, view: View, row: int) -> list[Fact]:
    """Return throughput, MFU, and the time and cost of the training that the view asks about."""
    table, amount = RatesOf(data.exploration, tariff_of(view)), amount_in(view)
    try:
        return [Fact(*said) for said in facts_of(table, row, amount)]
    except TensorOptError as error:
        # Kept from an exploration whose model reads tokens.
        return [*(Fact(*said) for said in facts_of(table, row)), Fact(amount.words, f"unknown: {error}")]


def hides(point: Point) -> bool:
    """Return whether communication runs beside something else; rounding leaves a trace even if none does."""
    return point.hidden_s > 1e-6 * point.time_s


def proof_words(point: Point, units: Units) -> str:
    """Say what is proven about a point: the proof concerns the sums that the search uses; about placed plans
    nothing is proven."""
    memory, time = units.memory.text(point.additive_memory_bytes), units.time.text(point.additive_time_s)
    return proof_of(point, memory, time)


def beside_tensors(point: Point) -> dict[str, float]:
    """Return the bytes of what is not a tensor of the step, by kind."""
    constants = point.terms.get(CONSTANTS, 0.0)
    return {CONSTANTS: constants, PROCESS: sum(point.terms.values()) - constants}


def dominant_words(exploration: Exploration, row: int) -> str:
    """Say where most of the memory and most of the time goes."""
    point = exploration.all_points[row]
    sizes = {**dict(zip(MEMORY_KINDS, point.memory, strict=True)), **beside_tensors(point)}
    total = sum(sizes.values()) or 1.0
    kind, size = max(sizes.items(), key=lambda item: item[1])
    memory = f"Memory is mostly {KIND_TITLES[kind]} ({percent(size / total)})"
    waits = waits_of(point)
    key = max(waits, key=lambda name: waits[name])
    return f"{memory}; {MOSTLY[key]} ({percent(waits[key] / (point.time_s or 1.0))})."


MOSTLY = {
    COMPUTING: "time is mostly compute",
    WAITING: "time is mostly communication",
    HOST: "the device mostly waits for its host",
    IDLE: "the device mostly waits for others",
}
"""Words for what most of a step consists of."""


@dataclass(frozen=True)
class Difference:
    """One figure of two points; ``change`` is empty if there is nothing to subtract."""

    label: str
    first: str
    second: str
    change: str


def differences(data: FrontierData, row: int, other: int) -> tuple[Difference, ...]:
    """Return what differs between the selected point and the one it is compared with; equal figures are left
    out."""
    a, b = data.exploration.all_points[row], data.exploration.all_points[other]
    unit, time = data.units.memory, data.units.time
    sizes = [("memory", a.memory_bytes, b.memory_bytes)]
    sizes += [(KIND_TITLES[kind], x, y) for kind, x, y in zip(MEMORY_KINDS, a.memory, b.memory, strict=True)]
    sizes += [(KIND_TITLES[kind], x, beside_tensors(b)[kind]) for kind, x in beside_tensors(a).items()]
    times = [
        ("time", a.time_s, b.time_s),
        ("compute", a.compute_s, b.compute_s),
        ("communication", a.communication_s, b.communication_s),
        ("waited for", a.exposed_s, b.exposed_s),
    ]
    of_host = [IN_COMPUTE if x.placed is not None else time.text(x.host_s) for x in (a, b)]
    host: tuple[Difference, ...] = (_changed("host", a.host_s, b.host_s, time.text),)
    if IN_COMPUTE in of_host:
        host = _words("host", *of_host)
    found = [
        *(_changed(label, x, y, unit.text) for label, x, y in (sizes[0],)),
        *(_changed(label, x, y, time.text) for label, x, y in times),
        *host,
        *(_changed(label, x, y, unit.text) for label, x, y in sizes[1:]),
        *(
            _changed(f.label, a.figures[f.name], b.figures[f.name], f.unit.words)
            for f in LISTED
            if f.name in a.figures and f.name in b.figures
        ),
        *_words("plan", data.exploration.names[row], data.exploration.names[other]),
        *_words("mesh", data.mesh[row], data.mesh[other]),
        *_words("micro-batches", str(data.micro[row]), str(data.micro[other])),
        *_words("devices", str(data.devices[row]), str(data.devices[other])),
        *_words("planner", planner_title(a.planner), planner_title(b.planner)),
        *_words("split by", split_words(data.exploration, row), split_words(data.exploration, other)),
    ]
    return tuple(d for d in found if d.first != d.second)


def _changed(label: str, first: float, second: float, text: object) -> Difference:
    assert callable(text)
    change = second - first
    relative = f" ({signed(change, percent(abs(change) / first))})" if first else ""
    return Difference(label, text(first), text(second), signed(change, text(abs(change))) + relative)


def _words(label: str, first: str, second: str) -> tuple[Difference, ...]:
    return (Difference(label, first, second, ""),)
