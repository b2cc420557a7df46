"""The answer to "which plan fits my memory budget, and what does it gain?", compared with baselines.

The answer is computed from an exploration's points and a limit on the memory needed per device. Baselines are
the usual strategies: *DDP* (a copy of the model on every device), *ZeRO-1* and *-2*, *FSDP* (ZeRO-3), *TP*
(Megatron), *PP* with its schedule, and *placed*, the best heuristic that puts each operator on one device.
Their memory and step time are simulated like those of the exploration's own points.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensoropt.costs.device_fit import TIGHT
from tensoropt.exploration.rates import RatesOf
from tensoropt.exploration.recommended import Recommendation, recommended
from tensoropt.plan import plan_names
from tensoropt.plan.findings import Findings
from tensoropt.plan.point import FRONTIER, SAME, Point
from tensoropt.units import format_bytes, format_number, format_seconds, share_words, without_zeros

_DDP, _PLACED = "data_parallel", "placed"
_ZERO_TITLES = {"1": "ZeRO-1", "2": "ZeRO-2", "3": "FSDP (ZeRO-3)"}
_TITLES = {_DDP: "DDP", "megatron": "TP (Megatron)"}
_LOCAL = "DDP, local statistics"
_LOCAL_NOTE = (
    "batch-norm statistics per device, as in DistributedDataParallel: not the unsplit model's "
    "result; not run here"
)
"""The note on a baseline that cannot be a plan
(:func:`~tensoropt.planners.sharded.data_parallel.local_statistics_s`)."""
_ORDER = ("DDP", _LOCAL, *_ZERO_TITLES.values(), "TP (Megatron)")
_MOST_NAMED = 4
"""The largest number of baselines in the sentence; tables list all."""
_GIB = 2.0**30
_ALIKE = 0.03
"""The relative difference in step time, within the error of predictions, that is not mentioned."""
_LEAST = 0.001
"""The least share of the step time that counts as a gain."""


class Baseline(NamedTuple):
    """A usual strategy, or a published planner's plan, compared with the recommended plan.

    Attributes:
        title: the strategy's usual name, such as ``FSDP (ZeRO-3)``.
        row: the index in :attr:`Findings.all_points` of its fastest plan that fits, or of its leanest if none
            fits.
        point, needs_bytes: that plan, and the memory in bytes that it needs on a device.
        fits: whether ``needs_bytes`` is within the memory limit.
        longer: the plan's step time divided by the recommended plan's, less 1; None if either does not fit.
        note: why this baseline cannot be run (batch-norm statistics per device); "" if it can.
    """

    title: str
    row: int
    point: Point
    needs_bytes: float
    fits: bool
    longer: float | None
    note: str = ""

    @property
    def short(self) -> str:
        return self.title.partition(" (")[0]

    def verdict(self) -> str:
        """Return the comparison with the recommended plan: ``+4 %`` in time, ``as fast``, ``fits``, or ``does
        not fit, needs 31 GiB``."""
        if not self.fits:
            return f"does not fit, needs {format_bytes(self.needs_bytes)}"
        if self.longer is None:
            return "fits"
        if abs(self.longer) < SAME:
            return "as fast"
        return f"{'+' if self.longer > 0 else '−'}{share_words(abs(self.longer))}"


@dataclass(frozen=True)
class Budgeted:
    """The recommended plan within a memory limit, its baselines, and the gain from more memory.

    Attributes:
        limit_bytes: the most memory in bytes that a plan may need on each device.
        limit_words: a remark if the limit is not the user's budget, ``(95 % of the memory)``; else "".
        chosen: the recommended plan; None if none fits.
        leanest: the index of the point that needs the least memory; None without points.
        baselines: the best plan of each usual strategy, in the usual order (DDP, ZeRO-1, ...).
        more_bytes: the additional memory in bytes for which ``gain`` is given.
        gain: the share by which ``more_bytes`` would shorten the fastest step; 0 if not at all.
    """

    findings: Findings
    limit_bytes: float
    limit_words: str
    chosen: Recommendation | None
    leanest: int | None
    baselines: tuple[Baseline, ...]
    more_bytes: float
    gain: float

    @property
    def row(self) -> int | None:
        """The index of the recommended plan in :attr:`Findings.all_points`; None if none fits."""
        return None if self.chosen is None else self.chosen.row

    @property
    def name(self) -> str:
        return "" if self.row is None else self.findings.names[self.row]

    def costs(self) -> str:
        """Return step time, memory and speed of the recommended plan, or the least memory needed if none
        fits."""
        if self.leanest is None:
            return "there is no plan"
        if self.row is None:
            least = format_bytes(self.findings.needs[self.leanest])
            name = plan_names.brief_name(self.findings.names[self.leanest])
            return f"no plan fits; the leanest needs {least} ({name})"
        budget = None if self.limit_words else self.limit_bytes
        tight = " (tight)" if self.findings.verdict(self.row, budget) == TIGHT else ""
        figures = [
            f"{format_seconds(self.findings.all_points[self.row].time_s)} a step",
            f"{format_bytes(self.findings.needs[self.row])}{tight}",
        ]
        return ", ".join([*figures, *_pace_words(self.findings, self.row)])

    def beside(self) -> list[str]:
        """Return sentences on baselines that do not fit, on those that fit, and on the gain from more
        memory."""
        if self.chosen is None:
            return []
        plans = [base for base in self.baselines if not base.note]
        named = [base for base in plans if base.row != self.row][:_MOST_NAMED]
        over = [f"{base.short} (needs {format_bytes(base.needs_bytes)})" for base in named if not base.fits]
        said = [f"{self._called(base)} {base.verdict()}" for base in named if base.fits]
        do = "does" if len(over) == 1 else "do"
        sentences = [f"{_listed(over)} {do} not fit."] if over else []
        sentences += [f"{'; '.join(said)}."] if said else []
        sentences += [
            f"{base.short} {base.verdict()} ({base.note})."
            for base in self.baselines
            if base.note and base.point.time_s < (1 - _ALIKE) * self.findings.all_points[base.row].time_s
        ]
        bought = share_words(self.gain) if self.gain >= _ALIKE else f"less than {share_words(_ALIKE)}"
        bought = "nothing" if self.gain < _LEAST else bought
        return [*sentences, f"{without_zeros(format_bytes(self.more_bytes))} more buys {bought}."]

    def _called(self, base: Baseline) -> str:
        again = plan_names.is_recomputed(self.findings.names[base.row])
        return f"{base.short} recomputed" if again else base.short

    def sentence(self) -> str:
        """Return the whole answer: ``Within 24 GiB of each of 8 H100-80GB: DP 8 · ZeRO-2, 250 ms a step, 13.6
        GiB. DDP (needs 31 GiB) does not fit. FSDP +4 %; TP +15 %. 1 GiB more buys nothing.``"""
        found = ", ".join(filter(None, (self.name, self.costs())))
        within = f"Within {without_zeros(format_bytes(self.limit_bytes))}{self.limit_words} of"
        within += f" {_devices_words(self.findings)}"
        return " ".join([f"{within}: {found}.", *self.beside()])

    def to_data(self) -> dict[str, Any]:
        """Return the sentence and its figures as plain data; points are numbered from 1."""
        return {
            "sentence": self.sentence(),
            "budget_bytes": self.limit_bytes,
            "point": None if self.row is None else self.row + 1,
            "rule": None if self.chosen is None else self.chosen.rule,
            "fastest": None if self.chosen is None else self.chosen.fastest + 1,
            "baselines": [
                {
                    "title": base.title,
                    "plan": self.findings.names[base.row],
                    "point": None if base.note else base.row + 1,
                    "memory_bytes": base.point.memory_bytes,
                    "needs_bytes": base.needs_bytes,
                    "time_s": base.point.time_s,
                    "fits": base.fits,
                    "longer": base.longer,
                    "note": base.note,
                }
                for base in self.baselines
            ],
            "more_bytes": self.more_bytes,
            "gain": self.gain,
        }


def answer(
    findings: Findings, budget_bytes: float | None = None, headroom: float | str | None = None
) -> Budgeted:
    """Return the recommended plan within a memory budget per device (by default the exploration's own),
    compared with baselines. The headroom is the part of a device's memory to keep free: a share from 0 to 1,
    or text such as ``2GiB``."""
    if budget_bytes is None and headroom is None:
        budget_bytes = findings.settings.get("memory_bytes")
    limit = findings.usable_bytes(budget_bytes, headroom)
    needs, times = findings.needs, findings.all_points.time
    more = _GIB if limit >= 4 * _GIB else limit / 4

    def best_s(limit_bytes: float) -> float:
        return float(times[needs <= limit_bytes].min(initial=np.inf))

    chosen = recommended(findings, limit)
    return Budgeted(
        findings,
        limit,
        _limit_words(findings, limit, budget_bytes),
        chosen,
        int(np.argmin(needs)) if len(needs) else None,
        tuple(_baselines(findings, limit, None if chosen is None else float(times[chosen.row]))),
        more,
        0.0 if chosen is None else 1.0 - best_s(limit + more) / best_s(limit),
    )


def _limit_words(findings: Findings, limit_bytes: float, budget_bytes: float | None) -> str:
    device = findings.device_bytes
    if limit_bytes < device and budget_bytes != limit_bytes:
        return f" ({share_words(limit_bytes / device)} of the memory)"
    if budget_bytes is not None and budget_bytes > device:
        return f" (a device has less than {without_zeros(format_bytes(budget_bytes))})"
    return ""


def _baselines(findings: Findings, limit_bytes: float, chosen_s: float | None) -> list[Baseline]:
    """Return the best plan of each usual strategy and of each published planner that ran, in the usual order.

    Args:
        chosen_s: step time of the recommended plan in seconds; None if none fits.
    """
    needs, times = findings.needs, findings.all_points.time
    of_kind: dict[str, list[int]] = {}
    # On one device nothing is parallel: every kind of plan is the unsplit model.
    for row, kind in _kinds(findings) if findings.devices > 1 else ():
        of_kind.setdefault(kind, []).append(row)

    def baseline(title: str, row: int, point: Point, note: str = "") -> Baseline:
        fits = bool(needs[row] <= limit_bytes)
        longer = point.time_s / chosen_s - 1.0 if fits and chosen_s is not None else None
        return Baseline(title, row, point, float(needs[row]), fits, longer, note)

    found = []
    for kind, rows in of_kind.items():
        fitting = [row for row in rows if needs[row] <= limit_bytes]
        first, then = (times, needs) if fitting else (needs, times)
        row = min(fitting or rows, key=lambda r: (first[r], then[r]))
        point = findings.all_points[row]
        title = f"{kind} ({plan_names.planner_title(point.planner)})" if kind == _PLACED else kind
        found.append(baseline(title, row, point))
    local_s = findings.report.get("tried", {}).get(_DDP, {}).get("local_statistics_s")
    if local_s is not None and (rows := of_kind.get("DDP", [])):
        row = min(rows, key=lambda r: times[r])
        found.append(baseline(_LOCAL, row, findings.all_points[row].changed(time_s=local_s), _LOCAL_NOTE))
    order = {title: number for number, title in enumerate(_ORDER)}
    return sorted(found, key=lambda base: order.get(base.title, len(order)))


def without_plans(findings: Findings) -> dict[str, str]:
    """Return the reason for each planner that found no plan, by name: ``no plan within 24 GiB: …``."""
    why = {name: str(row["refusal"]) for name, row in findings.report.get("tried", {}).items()}
    for row in findings.comparison:
        if row["planner"] != FRONTIER:
            why[str(row["planner"])] = "; ".join(map(str, row["notes"]))
    have = set(findings.all_points.planners)
    # A refusal often begins with its planner's name, which the row shows already.
    short = {name: words.removeprefix(f"{name} finds ") for name, words in why.items() if words}
    return {
        name: words if words.startswith("no plan") else f"no plan: {words}"
        for name, words in short.items()
        if name not in have
    }


def _pace_words(findings: Findings, row: int) -> list[str]:
    rates = RatesOf(findings).of(row)
    known = (("tokens", rates.tokens_per_s), ("samples", rates.samples_per_s))
    said = [f"{format_number(per_s)} {what}/s" for what, per_s in known if per_s is not None][:1]
    return said + (["bound by the host"] if findings.all_points[row].host_bound else [])


def _devices_words(findings: Findings) -> str:
    kinds = list(dict.fromkeys(kind["name"] for kind in findings.cluster["kinds"]))
    count = len(findings.cluster["devices"])
    kind = kinds[0] if len(kinds) == 1 else "devices"
    return f"the {kind}" if count == 1 else f"each of {count} {kind}"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _kinds(findings: Findings) -> Iterator[tuple[int, str]]:
    for row, planner in enumerate(findings.all_points.planners):
        if planner in plan_names.OWN:
            continue
        if planner.startswith(plan_names.YOUR_JOB):
            yield row, plan_names.planner_title(planner)
        elif planner == "zero":
            stage = re.search(r"ZeRO-(\d)", findings.names[row])
            yield row, _ZERO_TITLES[stage.group(1)] if stage else plan_names.planner_title(planner)
        elif planner in plan_names.HEURISTICS:
            yield row, _PLACED
        elif schedule := findings.all_points[row].stages.schedule:
            yield row, f"PP {plan_names.SCHEDULES.get(schedule, schedule)}"
        else:
            yield row, _TITLES.get(planner, plan_names.planner_title(planner))
