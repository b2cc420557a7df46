"""The page *Result* as data: the answer in a line, the choices, and what-if questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np

from tensoropt.errors import TensorOptError
from tensoropt.exploration.answer import Baseline, Budgeted, without_plans
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.rates import THOUSAND_STEPS, Amount, Rates, RatesOf, Tariff, amount_of
from tensoropt.exploration.recommended import a_config_says, recommended
from tensoropt.exploration.time_range import range_of
from tensoropt.plan.plan_names import YOUR_JOB, brief_name, planner_title
from tensoropt.units import format_number, format_seconds, share_words

from ..library import Entry, Library
from ..state import View
from .frontier import FrontierData
from .plain import plain
from .units import unit_for

_CARDS_GIB = (16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Memory sizes of common cards."""
_ROWS = 4
VERDICTS = {"fits": "✓ Fits", "tight": "~ Tight", "over": "✕ Does not fit"}


def two_digits(seconds: float) -> str:
    """Return a time with two significant digits, the precision of predictions."""
    if not seconds:
        return "0 s"
    size, unit = (seconds, "s") if seconds >= 0.995 else (seconds * 1e3, "ms")
    if size < 0.995:
        size, unit = seconds * 1e6, "µs"
    rounded = float(f"{size:.2g}")
    return f"{rounded:,.1f} {unit}" if rounded < 10 else f"{rounded:,.0f} {unit}"


@dataclass(frozen=True)
class AnswerLine:
    """The texts of the answer on one plan.

    Attributes:
        mark, verdict: ``fits``, ``tight`` or ``over``, and the same in words.
        needs: ``24.5 of 24 GiB``.
        time, pace: ``4.1 s a step (3.5 to 4.9)``, ``7,910 tokens/s``.
        cost: the cost of the view's training; "" if no price is known.
        plan, name: a sentence that describes the plan, and the plan's name.
        runs_in: a sentence on whether a launcher's config can express the plan.
        beside: a sentence on why the plan is recommended, or how the recommended plan differs, or that no
            plan fits.
    """

    mark: str
    verdict: str
    needs: str
    time: str
    pace: str
    cost: str
    plan: str
    name: str
    runs_in: str
    beside: str


def rates_of(data: FrontierData, view: View) -> RatesOf:
    """Return the throughput and cost of an exploration's points, at the view's price."""
    return RatesOf(data.exploration, Tariff(view.price))


def pace(rates: Rates) -> str:
    """Return ``7,910 tokens/s``, or samples; "" if neither is known."""
    for what, per_s in (("tokens", rates.tokens_per_s), ("samples", rates.samples_per_s)):
        if per_s is not None:
            return f"{format_number(per_s)} {what}/s"
    return ""


def amount_in(view: View) -> Amount:
    """Return the length of a view's training; 1,000 steps if not given."""
    return amount_of(view.amount) or THOUSAND_STEPS


def answer_line(data: FrontierData, view: View, found: Budgeted, row: int) -> AnswerLine:
    """Return the texts of the answer on the plan of a row."""
    rated = rates_of(data, view)
    rates, name, mark = rated.of(row), data.exploration.names[row], data.mark(view, row)
    unit, room = unit_for(data.capacity_bytes), data.room_bytes(view)
    needs = f"{unit.text(data.needs[row]).rpartition(' ')[0]} of {unit.limit(room)}"
    time, spread = two_digits(data.time[row]), range_of(data.exploration, row)
    ends = "" if spread is None else f" ({two_digits(spread.low_s)} to {two_digits(spread.high_s)})"
    return AnswerLine(
        mark,
        VERDICTS[mark],
        needs,
        f"{time} a step{ends}",
        pace(rates),
        _cost(rated, rates, view),
        plain(name),
        name,
        _runs_in(name),
        _beside(data, view, found, row),
    )


def _cost(rated: RatesOf, rates: Rates, view: View) -> str:
    amount = amount_in(view)
    try:
        cost = rates.cost(amount.steps(rated.work))
    except TensorOptError as error:
        return str(error)
    return "" if cost is None else f"{format_number(cost)} for {amount.words}"


def _runs_in(name: str) -> str:
    if a_config_says(name):
        return "Runs in TensorOpt ✓ and by the config of a launcher ✓ (Export)."
    return "Runs in TensorOpt ✓; a launcher's config cannot express it ✕ (Export writes the closest)."


def _beside(data: FrontierData, view: View, found: Budgeted, row: int) -> str:
    limit = data.limit_words(view)
    if found.row is None:
        least = data.units.memory.text(data.needs[found.leanest or 0])
        more = "Use more or larger devices, or a smaller batch."
        return f"No plan fits {limit}; the leanest needs {least}. {more}"
    if found.chosen is not None and row == found.row:
        rule = found.chosen.rule
        return f"{rule[:1].upper()}{rule[1:]}."
    other = data.time[found.row] / data.time[row] - 1
    same = abs(other) < 0.005
    beats = "as fast" if same else f"{share_words(abs(other))} {'slower' if other > 0 else 'faster'}"
    return f"Not the recommended plan within {limit}, which is {beats}."


@dataclass(frozen=True)
class Choice:
    """A row of the table *Choices*.

    Attributes:
        title: ``recommended``, ``FSDP`` and the like.
        row: the plan's row number in :class:`FrontierData`.
        name: the plan's short name.
        needs, time, pace: memory, step time and throughput with units.
        mark: whether the plan fits: ``fits``, ``tight`` or ``over``.
        chosen: whether the plan is the selected one.
        link: the address that selects the plan.
    """

    title: str
    row: int
    name: str
    needs: str
    time: str
    pace: str
    mark: str
    chosen: bool
    link: str


def choices(data: FrontierData, view: View, found: Budgeted, chosen: int) -> list[Choice]:
    """Return the recommended, the safest and the fastest plan, the user's current job, and usual strategies,
    each plan once; last, the selected plan if it is none of these."""
    titled: dict[int, list[str]] = {}
    for title, row in _titled(data, view, found):
        # A plan with two titles leaves room for another.
        if row in titled or len(titled) < _ROWS:
            titled.setdefault(row, []).append(title)
    if chosen not in titled:
        quick = view.time_s if view.point is None else None
        titled[chosen] = ["chosen" if quick is None else f"leanest within {format_seconds(quick)}"]
    rated = rates_of(data, view)
    return [
        Choice(
            ", ".join(dict.fromkeys(titles)),
            row,
            brief_name(data.exploration.names[row]),
            data.units.memory.text(data.needs[row]),
            two_digits(data.time[row]),
            pace(rated.of(row)),
            data.mark(view, row),
            row == chosen,
            view.link(point=row, time_s=None),
        )
        for row, titles in titled.items()
    ]


def _titled(data: FrontierData, view: View, found: Budgeted) -> Iterator[tuple[str, int]]:
    safe = [row for row in data.line.tolist() if data.mark(view, row) == "fits"]
    leanest = found.leanest
    if found.chosen is not None:
        yield "recommended", found.chosen.row
        yield ("safest", safe[-1]) if safe else ("leanest", leanest or 0)
        yield "fastest", found.chosen.fastest
    elif leanest is not None:
        yield "leanest", leanest
    plans = [base for base in found.baselines if not base.note]
    yours = [base for base in plans if data.planner[base.row].startswith(YOUR_JOB)]
    # The user's job or its stand-in: unsharded copies if they fit, else shards.
    first = [base for base in plans if base.short == "DDP" and base.fits]
    usual = [base for base in plans if base.short == "FSDP"]
    for base in (*yours, *first, *usual, *plans):
        yield base.short, base.row


class BaselineRow(NamedTuple):
    """A usual strategy or another planner in words; plan name and figures are empty if it has no plan."""

    title: str
    plan: str
    memory: str
    time: str
    verdict: str


def baseline_rows(data: FrontierData, found: Budgeted) -> tuple[BaselineRow, ...]:
    """Return the usual strategies and published planners' plans, each in its best variant, and the reasons
    why other planners have no plan."""
    memory = data.units.memory.text

    def row(base: Baseline) -> BaselineRow:
        verdict = base.verdict()
        return BaselineRow(
            base.title,
            data.exploration.names[base.row],
            memory(base.needs_bytes),
            two_digits(base.point.time_s),
            f"{verdict}; {base.note}" if base.note else verdict,
        )

    refused: dict[str, list[str]] = {}
    for name, why in without_plans(data.exploration).items():
        refused.setdefault(why, []).append(planner_title(name))
    without = (BaselineRow(", ".join(names), "", "", "", why) for why, names in refused.items())
    return (*map(row, found.baselines), *without)


@dataclass(frozen=True)
class WhatIf:
    """A what-if question, its answer if known, and a link that shows the answer or searches for it."""

    title: str
    words: str
    link: str
    action: str


def what_if(library: Library, data: FrontierData, view: View, found: Budgeted) -> list[WhatIf]:
    """Return how more memory, more devices, other devices and another batch change the answer."""
    return [
        *_more_memory(data, view, found),
        *_other_devices(library, data, view, found),
        *_other_batches(library, data, view),
    ]


def _than(data: FrontierData, found: Budgeted, time_s: float) -> str:
    """Return ``3.9 s a step (−6 %)``, with the change from the recommended plan."""
    words = f"{two_digits(time_s)} a step"
    if found.row is None:
        return words
    change = time_s / data.time[found.row] - 1
    return f"{words} ({_signed(change)})"


def _signed(change: float) -> str:
    return "as fast" if abs(change) < 0.005 else f"{'+' if change > 0 else '−'}{share_words(abs(change))}"


def _more_memory(data: FrontierData, view: View, found: Budgeted) -> Iterator[WhatIf]:
    room = data.room_bytes(view)
    sizes = [size * 2.0**30 for size in _CARDS_GIB if size * 2.0**30 > 1.05 * room][:2]
    if room < 0.95 * data.capacity_bytes:
        sizes = [data.capacity_bytes]
    for size in sizes:
        best = recommended(data.exploration, size)
        of = unit_for(size).limit(size)
        if best is None:
            yield WhatIf(f"{of} of memory", "does not fit either", "", "")
            continue
        whole = size <= data.capacity_bytes
        link = view.link(budget_bytes=size, point=None) if whole else ""
        yield WhatIf(f"{of} of memory", _than(data, found, data.time[best.row]), link, "show" if link else "")


def _again(view: View, **changes: Any) -> str:
    return f"/new?{urlencode({'from': view.exploration, **changes})}"


def _opened(library: Library, entry: Entry) -> Exploration | None:
    """Return an exploration; None if it cannot be opened, or has no points."""
    try:
        found = library.load(entry.key)
    except TensorOptError:
        return None
    return found if len(found.all_points) else None


def _other_devices(library: Library, data: FrontierData, view: View, found: Budgeted) -> Iterator[WhatIf]:
    known = set[tuple[str, int]]()
    for entry in library.alike(view.exploration):
        head = library.head_of(entry)
        kind, count = head.kind, head.devices
        if (kind, count) in ((data.device, data.count), *known) or (other := _opened(library, entry)) is None:
            continue
        known.add((kind, count))
        best = recommended(other, other.limit_bytes)
        words = "does not fit" if best is None else _than(data, found, other.all_points.time[best.row])
        yield WhatIf(f"{count} × {kind}", words, View(entry.key).link(), "show")
    if (data.device, 2 * data.count) not in known and len(data.exploration.cluster["kinds"]) == 1:
        link = _again(view, devices=f"{2 * data.count}x{data.device}")
        yield WhatIf(f"{2 * data.count} × {data.device}", "not known yet", link, "plan it")


def _other_batches(library: Library, data: FrontierData, view: View) -> Iterator[WhatIf]:
    batch, known = library.head_of(library.entry(view.exploration)).batch, set[int]()
    for entry in library.at_other_batches(view.exploration):
        own = library.head_of(entry).batch
        if own is None or own in (batch, *known) or (other := _opened(library, entry)) is None:
            continue
        known.add(own)
        best = recommended(other, other.limit_bytes)
        words = "does not fit" if best is None else pace(RatesOf(other).of(best.row))
        yield WhatIf(f"batch {own}", words, View(entry.key).link(), "show")
    if batch and not known:
        yield WhatIf(f"batch {2 * batch}", "not known yet", _again(view, batch=2 * batch), "plan it")


def seen_rows(data: FrontierData, view: View, chosen: int, most: int = 30) -> np.ndarray:
    """Return the rows of the frontier's points to draw, at most ``most``, notable ones first; only those near
    the budget, unless the view asks for all."""
    low, high = near(data, view, chosen)
    inside = np.flatnonzero((data.needs >= low) & (data.needs <= high))
    line = np.intersect1d(data.line, inside)
    few = line[np.isin(line, list(data.notable))]
    if len(few) > most:
        few = few[np.linspace(0, len(few) - 1, most).astype(int)]
    left = np.setdiff1d(line, few)
    spread = left[np.linspace(0, len(left) - 1, min(most - len(few), len(left))).astype(int)]
    return np.union1d(few, spread).astype(int)


def near(data: FrontierData, view: View, chosen: int) -> tuple[float, float]:
    """Return the range of memory needs in the plot: 0.8 to 1.5 times the budget, wider if the selected plan
    or most of the frontier lies outside; everything if the view asks for it."""
    needs, own, limit = data.needs[data.line], float(data.needs[chosen]), data.limit_bytes(view)
    least, most = float(needs.min()), float(needs.max())
    if view.whole:
        return min(least, own), max(most, own)
    low, high = 0.8 * min(limit, own), 1.5 * max(limit, own)
    if np.count_nonzero((needs >= low) & (needs <= high)) < min(5, len(needs)):
        # A budget far above every plan's need says nothing about memory.
        low, high = (least, max(most, own)) if most <= limit else (min(least, low), high)
    seen = 1.1 * limit if limit < 1.6 * most else 0.0
    return max(low, 0.95 * min(least, own)), min(high, max(1.05 * most, seen, own))
