"""The decision sheet: a self-contained HTML page, made to be printed, that says why a plan was chosen.

The page fetches nothing and runs nothing: its own policy forbids both. Whatever comes from a model or a
cluster is text and escaped; there is no template engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from typing import Any

from tensoropt.cluster import Cluster
from tensoropt.errors import TensorOptError
from tensoropt.files import write_text
from tensoropt.plan.amounts import CLUSTERS_OWN, THOUSAND_STEPS, Amount, Tariff
from tensoropt.plan.changed import fingerprint
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.figures import worded
from tensoropt.plan.frontier_picture import draw_frontier
from tensoropt.plan.frontier_table import shown_points, source_words
from tensoropt.plan.point import listed_facts, memory_words
from tensoropt.plan.rates import RatesOf
from tensoropt.plan.verified import Verified
from tensoropt.report.alternatives import alternatives
from tensoropt.report.assumptions import batch_words, proof_words, settings_rows
from tensoropt.report.commands import commands_for, devices_of, run_place
from tensoropt.report.miss import ran_parts
from tensoropt.report.rate_words import facts_of
from tensoropt.report.rows import Detail
from tensoropt.report.table import timing_words
from tensoropt.report.why import looked_up
from tensoropt.simulate.recording import host_words
from tensoropt.units import counted, format_bytes, format_number, format_seconds, share_words
from tensoropt.version import __version__

Rows = Sequence[tuple[str, str]]
MOST_DRAWN = 400
"""The most points of the picture; the ends, the knee and the chosen point are among them."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
@page { size: A4; margin: 16mm 14mm; }
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 10.5pt/1.45 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; color: #1b2733;
  background: #fff; max-width: 182mm; margin: 8mm auto; padding: 0 4mm; font-variant-numeric: tabular-nums; }
h1 { font-size: 17pt; margin: 0 0 2pt; overflow-wrap: anywhere; }
h2 { font-size: 12pt; margin: 16pt 0 4pt; border-bottom: 1px solid #808d99; padding-bottom: 2pt;
  break-after: avoid; }
p { margin: 4pt 0; }
.muted { color: #52606d; font-size: 9.5pt; }
.name { font-weight: 600; font-size: 11.5pt; overflow-wrap: anywhere; }
.big { display: flex; flex-wrap: wrap; gap: 6mm 12mm; margin: 6pt 0; }
.big div { min-width: 30mm; }
.big span { display: block; color: #52606d; font-size: 9pt; }
.big strong { font-size: 17pt; font-weight: 650; }
.fits { color: #00664e; font-weight: 600; }
.over { color: #8f1d14; font-weight: 600; }
svg { width: 100%; height: auto; break-inside: avoid; }
table { border-collapse: collapse; width: 100%; margin: 4pt 0; }
th, td { text-align: left; vertical-align: top; padding: 2.5pt 8pt 2.5pt 0; border-bottom: 1px solid #d9e0e6;
  overflow-wrap: break-word; }
th { color: #52606d; font-weight: 500; }
tr { break-inside: avoid; }
thead { display: table-header-group; }
.facts { table-layout: fixed; }
.facts th { width: 34mm; }
.facts td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.wide td:first-child { max-width: 70mm; overflow-wrap: anywhere; min-width: 34mm; }
.num { text-align: right; }
td.num { white-space: nowrap; }
code { font: 9pt/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; display: block; background: #f4f6f8;
  border: 1px solid #d9e0e6; border-radius: 3px; padding: 4pt 6pt; margin: 2pt 0 6pt; white-space: pre-wrap;
  overflow-wrap: anywhere; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
li { margin: 2pt 0; overflow-wrap: anywhere; }
@media (max-width: 600px) { .facts th { width: 26mm; } }
@media print { body { margin: 0; padding: 0; max-width: none; } .wide { overflow: visible; } }
"""


@dataclass(frozen=True, kw_only=True)
class SheetOptions:
    """The information for a sheet beside the exploration and the point.

    Attributes:
        model: what people call the model; by default its source.
        folder: the exploration's folder, for commands.
        again: the folder into which a repeated exploration is written; by default ``folder``.
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
    again: str = ""
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
        self.space = exploration.spaces[self.point.space]
        self.cluster = Cluster.from_dict(exploration.cluster)
        self.devices = devices_of(exploration, index)
        self.table = RatesOf(exploration, options.tariff)
        self.rates, self.amount = self.table.of(index), options.amount or THOUSAND_STEPS
        self.steps = self.amount.steps(self.table.work)
        self.model = options.model or exploration.model.source.removeprefix("zoo:") or "model"
        usable = self.cluster.memory_bytes * (1 - options.headroom)
        smallest = min(self.cluster.device_kinds, key=lambda kind: kind.memory_bytes)
        self.limit_bytes, self.limit = float(usable), f"the memory of a {smallest.name}"
        if options.headroom:
            self.limit = f"what {share_words(options.headroom)} headroom leaves of a {smallest.name}"
        if options.memory_bytes is not None and options.memory_bytes < usable:
            self.limit_bytes, self.limit = options.memory_bytes, "the budget"

    def text(self) -> str:
        """Return the whole page."""
        title = f"{self.model} on {self.exploration.cluster['name']}"
        made = self.options.made or datetime.now()
        print_of = fingerprint(self.exploration)
        sections = [
            f"<h1>{escape(title)}</h1>",
            f"<p class=muted>Decision sheet, {made:%Y-%m-%d %H:%M} · TensorOpt {escape(__version__)} · "
            f"exploration {print_of}</p>",
            *self._chosen(),
            *self._picture(title),
            *self._alternatives(),
            *_section("Cost", _facts(self._costs())),
            *_section("What is proven, and what was run", _facts(self._proven())),
            *_section("Assumptions", _facts(self._assumptions()) + self._notes()),
            *_section("Commands", self._commands()),
            *_section("Versions", _facts(self._versions(print_of))),
        ]
        return (
            "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name=viewport content="width=device-width">\n'
            f"<title>{escape(f'{title}: {self.exploration.title(self.index)}')}</title>\n"
            f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
        )

    def _chosen(self) -> list[str]:
        point, exploration = self.point, self.exploration
        fits = point.memory_bytes <= self.limit_bytes
        size = format_bytes(self.limit_bytes)
        verdict = (
            f"Fits {self.limit} of {size}: uses {share_words(point.memory_bytes / self.limit_bytes)} of it."
            if fits
            else f"Does not fit {self.limit} of {size}: "
            f"{format_bytes(point.memory_bytes - self.limit_bytes)} too much."
        )
        why = None
        if self.options.detail is not None:
            budget = self.limit_bytes if fits else None
            why = looked_up(
                exploration,
                self.index,
                memory_bytes=budget,
                detail=self.options.detail,
                limit=f"{self.limit}, {size},",
            )
        hidden = ", {hidden_s} hidden" if point.hidden_s > 1e-6 * point.time_s else ""
        facts = [
            ("mesh", f"{self.space.mesh.label} ({counted(self.devices, 'device')})"),
            ("micro-batches", str(self.space.micro_batches)),
            ("memory", memory_words(point)),
            (
                "time",
                worded(
                    point,
                    "compute {compute_s}, waiting for communication {exposed_s}" + hidden + ", idle {idle_s}",
                ),
            ),
            *([("host", host_words(point))] if point.host_s else []),
            *listed_facts(point),
            *([("what binds", why.binding.sentence)] if why else []),
            ("figures", source_words(point.sources) or "none"),
            *([("planner", point.planner)] if point.planner != "frontier" else []),
        ]
        big = (("memory per device", format_bytes(point.memory_bytes)),
               ("time per step", format_seconds(point.time_s)), ("devices", str(self.devices)))  # fmt: skip
        figures = "".join(
            f"<div><span>{label}</span><strong>{escape(words)}</strong></div>" for label, words in big
        )
        return [
            f"<h2>Chosen: {escape(exploration.title(self.index))}</h2>",
            f"<p class=name>{escape(exploration.names[self.index])}</p>",
            f"<div class=big>{figures}</div>",
            f"<p class={'fits' if fits else 'over'}>{escape(verdict)}</p>",
            _facts(facts),
        ]

    def _picture(self, title: str) -> list[str]:
        found = self.exploration
        indices = sorted({*shown_points(found, MOST_DRAWN), *({self.index} & {*range(len(found.points))})})
        drawn = draw_frontier(found, title=title, indices=indices, chosen=self.index)
        thinned = f" {len(indices):,} are drawn." if len(indices) < len(found.points) else ""
        words = f"The frontier: {counted(len(found.points), 'plan')} that no other plan found beats.{thinned}"
        return ["<h2>Among what there is</h2>", drawn, f"<p class=muted>{words}</p>"]

    def _alternatives(self) -> list[str]:
        rows = []
        for other in alternatives(
            self.exploration, self.index, self.limit_bytes, self.limit, folder=self.options.folder
        ):
            name = escape(other.name) + (
                f"<br><span class=muted>{escape(other.plan)}</span>" if other.plan else ""
            )
            cost = "" if other.time_s is None else self._money(other.time_s)
            figures = (
                "" if other.memory_bytes is None else format_bytes(other.memory_bytes),
                "" if other.time_s is None else format_seconds(other.time_s),
                cost,
            )
            cells = "".join(f"<td class=num>{escape(figure)}" for figure in figures)
            rows.append(f"<tr><td>{name}{cells}<td>{escape(other.verdict)}")
        spent = "device-hours" if self.rates.per_hour is None else "cost"
        head = (
            "<tr><th scope=col>plan<th scope=col class=num>memory<th scope=col class=num>time"
            f"<th scope=col class=num>{spent} of {escape(self.amount.words)}<th scope=col>why not"
        )
        table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
        return _section("Not chosen, and why", f"<div class=wide tabindex=0>{table}</div>")

    def _money(self, step_s: float) -> str:
        """Return the money for the amount, given the seconds of a step on the same devices; device-hours if
        the price is unknown."""
        rates = replace(self.rates, step_s=step_s)
        cost = rates.cost(self.steps)
        return (
            format_number(rates.device_hours(self.steps)) if cost is None else self.options.tariff.words(cost)
        )

    def _costs(self) -> Rows:
        rates, rows = self.rates, facts_of(self.table, self.index, self.options.amount)
        if rates.per_hour is None:
            return (*rows, ("price of a device-hour", f"unknown: {rates.whys['per_hour']}"))
        given = self.options.tariff.price is not None or self.options.tariff.by_kind
        kinds = ", in the mean of its kinds" if len(self.cluster.device_kinds) > 1 else ""
        price = self.options.tariff.words(rates.per_hour / rates.devices)
        whose = "as given" if given else "the cluster's own"
        return (*rows, ("price of a device-hour", f"{price} ({whose}{kinds})"))

    def _proven(self) -> Rows:
        point = self.point
        memory, time = format_bytes(point.additive_memory_bytes), format_seconds(point.additive_time_s)
        rows = [("proven", proof_words(point, memory, time))]
        own = [one for one in self.options.verified if one.is_of(self.exploration, self.index)]
        if not own:
            rows.append(("run", "not yet: nothing is measured of this plan; the last command does it"))
        for one in own:
            rows.append(("run", _ran_words(one, self.exploration.cluster)))
        return rows

    def _assumptions(self) -> Rows:
        exploration, options = self.exploration, self.options
        return (
            ("model", f"{self.model}, {exploration.model.parameters:,} parameters"),
            ("batch", batch_words(exploration)),
            ("cluster", self.cluster.describe()),
            ("memory of a device", f"{format_bytes(float(self.cluster.memory_bytes))}, "
                                   f"{share_words(options.headroom)} kept free"),
            *settings_rows(exploration),
            *([("overlap", options.detail.overlap)] if options.detail is not None else []),
            ("figures", timing_words(exploration)),
            *([("constraints", "as given; exploration.json has them under “settings”")]
              if exploration.settings.get("constraints") else []),
        )  # fmt: skip

    def _notes(self) -> str:
        """Return everything that was estimated, approximated or left out, in the words of the run."""
        report = self.exploration.report
        told = [*report.get("notes", []), *(n for s in self.exploration.spaces for n in s.notes)]
        unknown = report.get("operators_without_rule") or []
        if unknown:
            told.append(f"operators without a rule (kept whole): {', '.join(map(str, unknown))}")
        if report.get("micro_batches_refused"):
            told.append(f"micro-batches refused: {report['micro_batches_refused']}")
        notes = "".join(f"<li>{escape(str(text))}" for text in dict.fromkeys(told))
        return f"<p>Estimated, approximated or left out:</p><ul>{notes}</ul>" if notes else ""

    def _commands(self) -> str:
        folder = self.options.folder
        found = commands_for(self.exploration, folder, self.options.again or folder, self.index)
        parts = [f"<p>{escape(one.title)}</p><code>{escape(one.line)}</code>" for one in found]
        place = run_place(self.exploration, folder)
        return f"<p class=muted>{escape(place)}</p>{''.join(parts)}"

    def _versions(self, print_of: str) -> Rows:
        return (
            *((name, str(version)) for name, version in self.exploration.versions.items()),
            ("exploration", f"{print_of} (of model, cluster, settings and figures)"),
            ("operator graph", self.exploration.model.fingerprint[:16]),
            ("sheet by", f"TensorOpt {__version__}"),
        )


def _ran_words(one: Verified, cluster: Mapping[str, Any]) -> str:
    if one.error:
        return f"did not run: {one.error} ({one.checked_on})"
    parts = ran_parts(one, cluster)
    if one.loss_difference is None:
        parts.append("collectives as predicted" if one.ok else "collectives not as predicted")
    else:
        parts.append("numbers as of the unsplit model" if one.ok else "numbers differ from the unsplit model")
    return f"{'; '.join(parts)} ({one.checked_on})"


def _section(title: str, content: str) -> list[str]:
    return [f"<h2>{title}</h2>", content]


def _facts(rows: Rows) -> str:
    cells = "".join(f"<tr><th scope=row>{escape(label)}<td>{escape(words)}" for label, words in rows)
    return f"<table class=facts><tbody>{cells}</tbody></table>"
