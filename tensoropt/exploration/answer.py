"""The answer to "which plan fits, and what is gained by it?": one sentence, and the baselines behind it.

Everything follows from the points of an exploration and a budget. Baselines are the plans that people make by
hand, under the names that they use: *DDP* (a copy of the model on every device), *ZeRO-1* and *-2*, *FSDP*
(ZeRO-3), *TP* (Megatron), *PP* with its schedule, and *placed*, the best of the heuristics that put each
operator on one device. They are evaluated by the same simulator as every point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensoropt.exploration.first_lines import launcher_words, pace_words
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import HEURISTICS, OWN, SCHEDULES, YOUR_JOB, brief_name, planner_title
from tensoropt.plan.point import FRONTIER, SAME, Point
from tensoropt.units import format_bytes, format_seconds, share_words, without_zeros

HEADROOM = 0.05
"""The share of a device's memory that stays free in answers, and where clusters, counts and batches are
compared, unless a budget or another share is asked for; an assumption."""
_ZERO_TITLES = {"1": "ZeRO-1", "2": "ZeRO-2", "3": "FSDP (ZeRO-3)"}
_TITLES = {"data_parallel": "DDP", "megatron": "TP (Megatron)"}
_PLACED = "placed"
_ORDER = ("DDP", *_ZERO_TITLES.values(), "TP (Megatron)")
_MOST_NAMED = 4
"""The most baselines in the sentence; a table has all of them."""
_MANY = 10
"""From how many times as long a plan is said to take so many times, not so many per cent more."""
_GIB = 2.0**30
_ALIKE = 0.005
"""The share of a step's time below which a difference is not worth more memory."""


class Baseline(NamedTuple):
    """A plan that people make by hand, or that a published method finds, beside the answer.

    Attributes:
        title: its usual name, such as ``FSDP (ZeRO-3)``.
        row: the number of its plan among :attr:`Findings.all_points`: its fastest within the budget, or its
            leanest if none is.
        point: that plan's point.
        fits: whether it is within the budget.
        longer: how much longer its step is than the answer's, as a share; None if it does not fit, or if
            nothing does.
    """

    title: str
    row: int
    point: Point
    fits: bool
    longer: float | None

    @property
    def short(self) -> str:
        """The title without what is in brackets: ``FSDP``."""
        return self.title.partition(" (")[0]

    def verdict(self, memory: Callable[[float], str] = format_bytes) -> str:
        """Return ``+4 %``, ``as fast``, ``12 times as long``, ``fits``, or ``does not fit, needs 31 GiB``."""
        if not self.fits:
            return f"does not fit, needs {memory(self.point.memory_bytes)}"
        if self.longer is None:
            return "fits"
        if abs(self.longer) < SAME:
            return "as fast"
        if self.longer >= _MANY - 1:
            return f"{1 + self.longer:.0f} times as long"
        return f"{'+' if self.longer > 0 else '−'}{share_words(abs(self.longer))}"


@dataclass(frozen=True)
class Budgeted:
    """The fastest plan within a budget, what it is compared with, and what more memory would buy.

    Attributes:
        budget_bytes: the bytes that a plan may need of each device.
        row: the number of the plan among the frontier's points; None if none fits.
        leanest: the number of the leanest point; None if there is none.
        baselines: one for each kind of plan that is known, in the order in which people think of them.
        more_bytes: the additional memory that :attr:`gain` is about.
        gain: the share by which a step gets shorter with that much more; 0 if it does not.
        next_bytes: how much more than the budget the next faster plan needs; None if there is none.
    """

    findings: Findings
    budget_bytes: float
    row: int | None
    leanest: int | None
    baselines: tuple[Baseline, ...]
    more_bytes: float
    gain: float
    next_bytes: float | None

    @property
    def name(self) -> str:
        """What people call the plan; "" if none fits."""
        return "" if self.row is None else self.findings.names[self.row]

    def costs(
        self,
        memory: Callable[[float], str] = format_bytes,
        time: Callable[[float], str] = format_seconds,
    ) -> str:
        """Return ``250 ms a step, 13.6 GiB, 302,000 tokens/s``; without a plan, what the leanest needs."""
        if self.leanest is None:
            return "there is no plan"
        if self.row is None:
            least = memory(self.findings.points[self.leanest].memory_bytes)
            name = brief_name(self.findings.names[self.leanest])
            return f"no plan fits; the leanest needs {least} ({name})"
        point = self.findings.points[self.row]
        figures = [f"{time(point.time_s)} a step", memory(point.memory_bytes)]
        return ", ".join([*figures, *pace_words(self.findings, self.row)])

    def beside(self, memory: Callable[[float], str] = format_bytes) -> list[str]:
        """Return sentences: which baselines do not fit, how much longer the others take, and what more memory
        would buy."""
        if self.row is None:
            return []
        named = self.baselines[:_MOST_NAMED]
        over = [f"{base.short} (needs {memory(base.point.memory_bytes)})" for base in named if not base.fits]
        said = [f"{base.short} {base.verdict(memory)}" for base in named if base.fits]
        do = "does" if len(over) == 1 else "do"
        sentences = [f"{_listed(over)} {do} not fit."] if over else []
        sentences += [f"{'; '.join(said)}."] if said else []
        told = launcher_words(self.findings, self.row, self.baselines)
        return [*sentences, *told, self.more_words(memory)]

    def jobs_words(self) -> list[str]:
        """Return a sentence for each job that somebody runs today, and what a better plan would bring it."""
        return [job.sentences()[0] for job in your_jobs(self.findings)]

    def more_words(self, memory: Callable[[float], str] = format_bytes) -> str:
        """Return ``1 GiB more buys nothing.``, or how much shorter a step gets."""
        if self.next_bytes is None:
            return "No plan that was searched is faster."
        bought = share_words(self.gain) if self.gain >= _ALIKE else "nothing"
        return f"{without_zeros(memory(self.more_bytes))} more buys {bought}."

    def sentence(
        self,
        memory: Callable[[float], str] = format_bytes,
        time: Callable[[float], str] = format_seconds,
    ) -> str:
        """Return all of it: ``Within 24 GiB of each of 8 H100-80GB: DP 8 · ZeRO-2, 250 ms a step, 13.6 GiB.
        DDP (needs 31 GiB) does not fit. FSDP +4 %; TP +15 %. 1 GiB more buys nothing.``"""
        found = ", ".join(filter(None, (self.name, self.costs(memory, time))))
        usual = self.budget_bytes == (1.0 - HEADROOM) * _device_bytes(self.findings)
        share = f" ({share_words(1.0 - HEADROOM)} of the memory)" if usual else ""
        within = f"Within {without_zeros(memory(self.budget_bytes))}{share} of {devices_words(self.findings)}"
        return " ".join([f"{within}: {found}.", *self.beside(memory)])

    def to_data(self) -> dict[str, Any]:
        """Return the sentence and the figures behind it as plain data; points are counted from 1."""
        return {
            "sentence": self.sentence(),
            "budget_bytes": self.budget_bytes,
            "point": None if self.row is None else self.row + 1,
            "baselines": [
                {
                    "title": base.title,
                    "plan": self.findings.names[base.row],
                    "memory_bytes": base.point.memory_bytes,
                    "time_s": base.point.time_s,
                    "fits": base.fits,
                    "longer": base.longer,
                }
                for base in self.baselines
            ],
            "more_bytes": self.more_bytes,
            "gain": self.gain,
        }


def answer(
    findings: Findings, budget_bytes: float | None = None, rows: Sequence[int] | np.ndarray | None = None
) -> Budgeted:
    """Return the answer within a budget; without one, within :func:`default_budget`.

    Args:
        rows: the numbers of the frontier's points that are asked about, ascending; by default all.
    """
    budget = default_budget(findings) if budget_bytes is None else budget_bytes
    asked = np.arange(len(findings.points)) if rows is None else np.asarray(rows, dtype=int)
    # Ascending in memory, descending in time.
    sizes, times = (findings.all_points.column(name)[asked] for name in ("memory_bytes", "time_s"))

    def within(limit_bytes: float) -> int:
        return int(np.searchsorted(sizes, limit_bytes, side="right"))

    fitting, more = within(budget), _GIB if budget >= 4 * _GIB else budget / 4
    best_s = float(times[fitting - 1]) if fitting else None
    return Budgeted(
        findings,
        budget,
        int(asked[fitting - 1]) if fitting else None,
        int(asked[0]) if len(asked) else None,
        tuple(_baselines(findings, budget, best_s)),
        more,
        0.0 if best_s is None else 1.0 - float(times[within(budget + more) - 1]) / best_s,
        float(sizes[fitting]) - budget if fitting < len(sizes) else None,
    )


def _baselines(findings: Findings, budget_bytes: float, best_s: float | None) -> list[Baseline]:
    """Return what is known of each kind of plan that people make by hand, and of each method that was run
    beside the search, as people think of them.

    Args:
        best_s: the seconds of the plan that they are compared with; None if none fits.
    """
    of_kind: dict[str, list[int]] = {}
    # On one device nothing is parallel: every kind of plan is the unsplit model.
    for row, kind in _kinds(findings) if findings.devices > 1 else ():
        of_kind.setdefault(kind, []).append(row)
    found = []
    for kind, rows in of_kind.items():
        points = {row: findings.all_points[row] for row in rows}
        fitting = [row for row in rows if points[row].memory_bytes <= budget_bytes]
        if fitting:
            row = min(fitting, key=lambda r: (points[r].time_s, points[r].memory_bytes))
        else:
            row = min(rows, key=lambda r: (points[r].memory_bytes, points[r].time_s))
        longer = points[row].time_s / best_s - 1.0 if fitting and best_s is not None else None
        title = f"{kind} ({planner_title(points[row].planner)})" if kind == _PLACED else kind
        found.append(Baseline(title, row, points[row], bool(fitting), longer))
    order = {title: number for number, title in enumerate(_ORDER)}
    return sorted(found, key=lambda base: order.get(base.title, len(order)))


def without_plans(findings: Findings) -> dict[str, str]:
    """Return why planners that ran have no plan, by name: ``no plan within 24 GiB: no device has room …``."""
    why = {name: str(row["refusal"]) for name, row in findings.report.get("tried", {}).items()}
    for row in findings.comparison:
        if row["planner"] != FRONTIER:
            why[str(row["planner"])] = "; ".join(map(str, row["notes"]))
    have = set(findings.all_points.column("planner").tolist())
    # A refusal often begins with its planner's name, which stands beside it here.
    short = {name: words.removeprefix(f"{name} finds ") for name, words in why.items() if words}
    return {
        name: words if words.startswith("no plan") else f"no plan: {words}"
        for name, words in short.items()
        if name not in have
    }


def devices_words(findings: Findings) -> str:
    """Return ``each of 8 H100-80GB``."""
    kinds = list(dict.fromkeys(kind["name"] for kind in findings.cluster["kinds"]))
    count = len(findings.cluster["devices"])
    kind = kinds[0] if len(kinds) == 1 else "devices"
    return f"the {kind}" if count == 1 else f"each of {count} {kind}"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def default_budget(findings: Findings) -> float:
    """Return the budget that the exploration was made for, otherwise what the usual headroom leaves of the
    smallest device, as :class:`~tensoropt.exploration.cluster_offers.ClusterQuestion` does."""
    asked = findings.settings.get("memory_bytes")
    return float(asked or (1.0 - HEADROOM) * _device_bytes(findings))


def _device_bytes(findings: Findings) -> float:
    return float(min(kind["memory_bytes"] for kind in findings.cluster["kinds"]))


def _kinds(findings: Findings) -> Iterator[tuple[int, str]]:
    """Yield every plan of a planner with the kind of plan that it is."""
    planners = findings.all_points.column("planner")
    for row in np.flatnonzero(~np.isin(planners, OWN)).tolist():
        planner = str(planners[row])
        if planner.startswith(YOUR_JOB):
            yield row, planner_title(planner)
        elif planner == "zero":
            stage = re.search(r"ZeRO-(\d)", findings.names[row])
            yield row, _ZERO_TITLES[stage.group(1)] if stage else planner_title(planner)
        elif planner in HEURISTICS:
            yield row, _PLACED
        elif schedule := findings.all_points[row].stages.schedule:
            yield row, f"PP {SCHEDULES.get(schedule, schedule)}"
        else:
            yield row, _TITLES.get(planner, planner_title(planner))
