"""The decision sheet: a self-contained HTML page, made to be printed, that says why a plan was chosen.

The page (``sheet.html``) fetches nothing and runs nothing: its own policy forbids both. Whatever comes from a
model or a cluster is text and escaped.

The alternatives to a chosen plan are the frontier's ends and planners that were run, each with why it was not
taken.

The assumptions are the basis of the exploration's figures, and what was chosen about it, in words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.answer import answer, without_plans
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.facts import FIT, LISTED_NAMES, facts, rate_facts
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.frontier_table import draw_frontier, shown_points
from tensoropt.exploration.notable import marks_of
from tensoropt.exploration.rates import CLUSTERS_OWN, THOUSAND_STEPS, Amount, Tariff
from tensoropt.exploration.verified import Verified, fingerprint
from tensoropt.files import write_text
from tensoropt.plan.facts_table import Fact, Html, facts_rows, filled, named
from tensoropt.plan.plan_names import planner_title
from tensoropt.plan.point import FRONTIER
from tensoropt.question.settings import settings_fields
from tensoropt.report.beside import ran_words
from tensoropt.report.commands import beside_line, commands_for, run_place
from tensoropt.report.step_parts import Detail
from tensoropt.report.table import timing_words
from tensoropt.report.why import looked_up
from tensoropt.units import (
    counted,
    format_bytes,
    format_number,
    format_seconds,
    share_words,
    with_article,
)
from tensoropt.version import __version__

_ASKED_ABOUT = ("data_parallel", "zero")
"""The planners that find what people do by hand, and would ask about."""
_SAME = 5e-4
"""The relative difference up to which figures count as equal."""


@dataclass(frozen=True)
class _Alternative:
    """A plan that was not taken.

    Attributes:
        name: what it is: ``leanest (point 1)``, or a planner.
        plan: what people call the plan; "" if there is none.
        memory_bytes, time_s: the plan's figures; None if there is no plan.
        verdict: why it was not taken.
    """

    name: str
    plan: str
    memory_bytes: float | None
    time_s: float | None
    verdict: str


def alternatives(
    exploration: Exploration, index: int, limit_bytes: float, limit: str, *, folder: str = "DIR"
) -> list[_Alternative]:
    """Return named points of the frontier, then planners, each with why it was not chosen instead of
    ``index``.

    Args:
        limit_bytes, limit: the bytes that a plan may need of a device, and what that limit is called: ``the
            budget``.
        folder: the exploration's folder, for commands.
    """
    chosen = _Chosen(exploration, index, limit_bytes, limit)
    named = {other: list(words) for other, words in marks_of(exploration).items()}
    fastest = exploration.fastest_within(limit_bytes)
    if fastest is not None and fastest != len(exploration.points) - 1:
        named.setdefault(fastest, []).append(f"fastest within {limit}")
    others = [
        chosen.than_point(other, f"{' and '.join(words)} (point {other + 1})")
        for other, words in sorted(named.items())
        if other != index
    ]
    for base in answer(exploration, limit_bytes).baselines:
        if base.row != index:
            others.append(chosen.than_point(base.row, base.title))
    refused = without_plans(exploration)
    for planner, why in refused.items():
        others.append(_Alternative(planner_title(planner), "", None, None, why))
    known = {*refused, *(point.planner for point in (*exploration.points, *exploration.others))}
    for planner in _ASKED_ABOUT:
        if planner not in known:
            words = f"not run beside this frontier: {beside_line(folder, planner)}"
            others.append(_Alternative(planner_title(planner), "", None, None, words))
    return others


@dataclass(frozen=True)
class _Chosen:
    """The chosen plan, with what it had to fit."""

    exploration: Exploration
    index: int
    limit_bytes: float
    limit: str

    def than(self, name: str, plan: str, memory_bytes: float, time_s: float) -> _Alternative:
        """Return another plan with why this one was chosen rather than it."""
        point = self.exploration.all_points[self.index]
        costs = (point.memory_bytes, point.time_s), (memory_bytes, time_s)
        return _Alternative(
            name, plan, memory_bytes, time_s, verdict_words(*costs, self.limit_bytes, self.limit)
        )

    def than_point(self, other: int, name: str) -> _Alternative:
        """Return :meth:`than` of another point."""
        point = self.exploration.all_points[other]
        return self.than(name, self.exploration.names[other], point.memory_bytes, point.time_s)


def verdict_words(
    chosen: tuple[float, float], other: tuple[float, float], limit_bytes: float, limit: str
) -> str:
    """Say why a plan of ``other`` (memory, time) was not taken, and also what speaks for it."""
    (memory, time_s), (its_memory, its_time_s) = chosen, other
    slower, larger = its_time_s / time_s - 1, its_memory / memory - 1
    speed = (
        "as fast"
        if abs(slower) < _SAME
        else f"slower by {share_words(slower)}"
        if slower > 0
        else f"faster by {share_words(-slower)}"
    )
    size = (
        "with as much memory"
        if abs(larger) < _SAME
        else f"with {format_bytes(its_memory - memory)} more memory"
        if larger > 0
        else f"with {format_bytes(memory - its_memory)} less memory"
    )
    if its_memory > limit_bytes:
        over = format_bytes(its_memory - limit_bytes)
        return f"does not fit {limit} of {format_bytes(limit_bytes)}: {over} too much; {speed}"
    return f"{speed}, {size}"


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


def _notes_of(exploration: Exploration) -> list[str]:
    """Return all that was estimated, approximated or left out, in the words of the run."""
    report = exploration.report
    notes = [*report.get("notes", []), *(note for space in exploration.spaces for note in space.notes)]
    unknown = report.get("operators_without_rule") or []
    if unknown:
        notes.append(f"operators without a rule (kept whole): {', '.join(map(str, unknown))}")
    if report.get("micro_batches_refused"):
        notes.append(f"micro-batches refused: {report['micro_batches_refused']}")
    return list(dict.fromkeys(map(str, notes)))


def batch_words(exploration: Exploration) -> str:
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


_MOST_DRAWN = 400
"""The most points of the picture; the ends, the knee and the chosen point are among them."""
_TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass(frozen=True, kw_only=True)
class SheetOptions:
    """The information for a sheet beside the exploration and the point.

    Attributes:
        model: what people call the model; by default its source.
        folder: the exploration's folder, for commands.
        rerun: the folder into which a repeated exploration is written; by default ``folder``.
        memory_bytes: the budget per device; None if there is none but the device's memory.
        headroom: the share of a device's memory that is to stay free.
        tariff: prices that replace those of the cluster, and the currency.
        amount: the training to which hours and money refer; by default 1,000 steps.
        verified: what is known about plans of this exploration that were run.
        detail: the point's detail, for the parts of its time and the assumed overlap; None leaves these out.
        made: when the sheet was made; by default now.
    """

    model: str = ""
    folder: str = "DIR"
    rerun: str = ""
    memory_bytes: float | None = None
    headroom: float = 0.0
    tariff: Tariff = CLUSTERS_OWN
    amount: Amount | None = None
    verified: Sequence[Verified] = ()
    detail: Detail | None = None
    made: datetime | None = None


def decision_sheet(exploration: Exploration, index: int, options: SheetOptions | None = None) -> str:
    """Return the sheet of point ``index`` of ``exploration.all_points``, as HTML.

    Raises:
        TensorOptError: there is no such point, or the amount is in a unit of which a step's is unknown.
    """
    count = len(exploration.all_points)
    if not 0 <= index < count:
        raise TensorOptError(f"there is no point {index + 1}; there are points 1 to {count}")
    return _Sheet(exploration, index, options or SheetOptions()).text()


def write_sheet(
    exploration: Exploration,
    index: int,
    path: str | os.PathLike[str],
    options: SheetOptions | None = None,
) -> None:
    """Write :func:`decision_sheet` into a file, whole or not at all."""
    write_text(path, decision_sheet(exploration, index, options))


class _Sheet:
    def __init__(self, exploration: Exploration, index: int, options: SheetOptions):
        self.exploration, self.index, self.options = exploration, index, options
        self.point = exploration.all_points[index]
        self.cluster = Cluster.from_dict(exploration.cluster)
        self.row, self.amount = (
            FigureRow.of(exploration, index, options.tariff),
            options.amount or THOUSAND_STEPS,
        )
        self.facts = facts(self.row)
        self.steps = self.amount.steps(self.row.rated.work)
        self.model = options.model or exploration.model.source.removeprefix("zoo:") or "model"
        usable = self.cluster.memory_bytes * (1 - options.headroom)
        smallest = min(self.cluster.device_kinds, key=lambda kind: kind.memory_bytes)
        self.limit_bytes, self.limit = float(usable), f"the memory of {with_article(smallest.name)}"
        if options.headroom:
            self.limit = (
                f"what {share_words(options.headroom)} headroom leaves of {with_article(smallest.name)}"
            )
        if options.memory_bytes is not None and options.memory_bytes < usable:
            self.limit_bytes, self.limit = options.memory_bytes, "the budget"

    def text(self) -> str:
        """Return the whole page."""
        exploration = self.exploration
        fit, size = exploration.fit(self.index, self.limit_bytes), format_bytes(self.limit_bytes)
        needs = fit.needed_bytes
        fits = needs <= self.limit_bytes
        verdict = (
            f"{fit.verdict.capitalize()} {self.limit} of {size}: uses "
            f"{share_words(needs / self.limit_bytes)} of it."
            if fits
            else f"Does not fit {self.limit} of {size}: {format_bytes(needs - self.limit_bytes)} too much."
        )
        title, print_of = f"{self.model} on {exploration.cluster['name']}", fingerprint(exploration)
        drawn = sorted(
            {*shown_points(exploration, _MOST_DRAWN), *({self.index} & {*range(len(exploration.points))})}
        )
        return filled(
            _TEMPLATE,
            title=title,
            answer=answer(exploration, self.limit_bytes).sentence(),
            point=exploration.title(self.index),
            made=f"{self.options.made or datetime.now():%Y-%m-%d %H:%M}",
            version=__version__,
            fingerprint=print_of,
            name=self.row.name,
            memory=self.facts["memory per device"].words,
            time=self.facts["time per step"].words,
            devices=self.row.space.devices,
            fit="fits" if fits else "over",
            verdict=verdict,
            facts=facts_rows(self._chosen(fits=fits)),
            picture=Html(draw_frontier(exploration, title=title, indices=drawn, chosen=self.index)),
            plans=counted(len(exploration.points), "plan"),
            thinned=f" {len(drawn):,} are drawn." if len(drawn) < len(exploration.points) else "",
            spent="device-hours" if self.row.rates.per_hour is None else "cost",
            amount=self.amount.words,
            alternatives=Html("".join(self._alternatives())),
            costs=facts_rows(self._costs()),
            proven=facts_rows(self._proven()),
            assumptions=facts_rows(self._assumptions()),
            notes=self._notes(),
            place=run_place(exploration, self.options.folder),
            commands=self._commands(),
            versions=facts_rows(self._versions(print_of)),
        )

    def _chosen(self, *, fits: bool) -> list[Fact]:
        facts, options = dict(self.facts), self.options
        if options.detail is not None:
            size = format_bytes(self.limit_bytes)
            why = looked_up(
                self.exploration,
                self.index,
                memory_bytes=self.limit_bytes if fits else None,
                detail=options.detail,
                limit=f"{self.limit}, {size},",
            )
            facts["what binds"] = Fact("what binds", why.binding.sentence)
        names = ["mesh", "micro-batches", FIT, "memory", "time", "range", "host", *LISTED_NAMES, "what binds"]
        return named(facts, *names, "figures", *(["planner"] if self.point.planner != FRONTIER else []))

    def _alternatives(self) -> Iterator[str]:
        for other in alternatives(
            self.exploration, self.index, self.limit_bytes, self.limit, folder=self.options.folder
        ):
            plan = f"<br><span class=muted>{escape(other.plan)}</span>" if other.plan else ""
            figures = ["", "", ""]
            if other.memory_bytes is not None and other.time_s is not None:
                figures = [
                    format_bytes(other.memory_bytes), format_seconds(other.time_s), self._money(other.time_s)
                ]  # fmt: skip
            cells = "".join(f"<td class=num>{escape(figure)}" for figure in figures)
            yield f"<tr><td>{escape(other.name)}{plan}{cells}<td>{escape(other.verdict)}"

    def _money(self, step_s: float) -> str:
        """Return the money for the amount, given the seconds of a step on the same devices; device-hours if
        the price is unknown."""
        rates = replace(self.row.rates, step_s=step_s)
        cost = rates.cost(self.steps)
        return (
            format_number(rates.device_hours(self.steps)) if cost is None else self.options.tariff.words(cost)
        )

    def _costs(self) -> list[Fact]:
        rates, tariff = self.row.rates, self.options.tariff
        price = Fact("price of a device-hour", None, note=rates.whys.get("per_hour", ""))
        if rates.per_hour is not None:
            given = "as given" if tariff.price is not None or tariff.by_kind else "the cluster's own"
            kinds = ", in the mean of its kinds" if len(self.cluster.device_kinds) > 1 else ""
            price = Fact(price.name, rates.per_hour / rates.devices, tariff.words, note=f"{given}{kinds}")
        return [*rate_facts(self.row, self.options.amount), price]

    def _proven(self) -> list[Fact]:
        own = [run for run in self.options.verified if run.is_of(self.exploration, self.index)]
        runs = [f"{ran_words(run, self.exploration.cluster)} ({run.checked_on})" for run in own] or [
            "not yet: nothing about this plan was measured; the last command does it"
        ]
        return [self.facts["proven"], *(Fact("run", words) for words in runs)]

    def _assumptions(self) -> list[Fact]:
        exploration, options = self.exploration, self.options
        memory = format_bytes(float(self.cluster.memory_bytes))
        return [
            Fact("model", f"{self.model}, {exploration.model.parameters:,} parameters"),
            Fact("batch", batch_words(exploration)),
            Fact("cluster", self.cluster.describe()),
            Fact("memory of a device", f"{memory}, {share_words(options.headroom)} kept free"),
            *settings_facts(exploration),
            *([Fact("overlap", options.detail.overlap)] if options.detail is not None else []),
            Fact("figures", timing_words(exploration)),
            *([Fact("constraints", "as given; exploration.json has them under “settings”")]
              if exploration.settings.get("constraints") else []),
        ]  # fmt: skip

    def _notes(self) -> Html:
        """Return everything that was estimated, approximated or left out, in the words of the run."""
        notes = "".join(f"<li>{escape(note)}" for note in _notes_of(self.exploration))
        return Html(f"<p>Estimated, approximated or left out:</p><ul>{notes}</ul>" if notes else "")

    def _commands(self) -> Html:
        folder = self.options.folder
        commands = commands_for(self.exploration, folder, self.options.rerun or folder, self.index)
        return Html("".join(f"<p>{escape(c.title)}</p><code>{escape(c.line)}</code>" for c in commands))

    def _versions(self, print_of: str) -> list[Fact]:
        return [
            *(Fact(name, version) for name, version in self.exploration.versions.items()),
            Fact("exploration", print_of, note="of model, cluster, settings and figures"),
            Fact("operator graph", self.exploration.model.fingerprint[:16]),
            Fact("sheet by", f"TensorOpt {__version__}"),
        ]
