"""Users' current training jobs compared with the frontier, and the gain from better plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tensoropt.plan.findings import Findings
from tensoropt.plan.plan_names import YOUR_JOB, brief_name
from tensoropt.units import format_bytes, format_seconds, share_words

_ALIKE = 0.03
"""The least share of time or memory by which a plan must be better to be mentioned."""


class _YourJob(NamedTuple):
    """A user's current job, compared with the points of a frontier.

    Attributes:
        row: the job's index in :attr:`Findings.all_points`; None if it could not be simulated.
        faster: the index of the fastest point that needs no more memory; None if it gains less than 3 %.
        leaner: the index of the leanest point that takes no longer; None if it gains less than 3 %.
        notes: the parts of the job that the prediction leaves out.
        refusal: why the job could not be simulated; "" if it could.
    """

    findings: Findings
    launcher: str
    row: int | None
    faster: int | None
    leaner: int | None
    notes: tuple[str, ...]
    refusal: str

    def sentences(self) -> list[str]:
        """Return sentences on the job's time and memory, on better plans, and on what is not predicted."""
        if self.row is None:
            return [f"Your job ({self.launcher}) has no prediction: {self.refusal}."]
        point = self.findings.all_points[self.row]
        name = brief_name(self.findings.names[self.row])
        own, needs = self.findings.needs[self.row], self.findings.needs
        place = f"{name}, {format_seconds(point.time_s)} a step, {format_bytes(own)}"
        better = []
        if self.faster is not None:
            time_s = self.findings.points[self.faster].time_s
            less = share_words(1 - time_s / point.time_s)
            title = self._title(self.faster)
            better.append(f"within that memory {title} takes {format_seconds(time_s)} a step, {less} less")
        if self.leaner is not None:
            less = share_words(1 - needs[self.leaner] / own)
            title = self._title(self.leaner)
            better.append(f"within that time {title} needs {format_bytes(needs[self.leaner])}, {less} less")
        brings = "; ".join(better) or "no point of the frontier is better"
        said = f"You are here ({self.launcher}): {place}. {brings[0].upper()}{brings[1:]}."
        return [said, *(f"  {note}" for note in self.notes)]

    def _title(self, row: int) -> str:
        return f"point {row + 1} ({brief_name(self.findings.names[row])})"

    def to_data(self) -> dict[str, Any]:
        """Return the first sentence and its figures as plain data; points are numbered from 1."""
        point = None if self.row is None else self.findings.all_points[self.row]
        number = {"point": self.row, "faster": self.faster, "leaner": self.leaner}
        return {
            "launcher": self.launcher,
            "sentence": self.sentences()[0],
            **{name: None if row is None else row + 1 for name, row in number.items()},
            "memory_bytes": None if point is None else point.memory_bytes,
            "needs_bytes": None if self.row is None else float(self.findings.needs[self.row]),
            "time_s": None if point is None else point.time_s,
            "notes": list(self.notes),
            "refusal": self.refusal,
        }


def your_jobs(findings: Findings) -> tuple[_YourJob, ...]:
    """Return the users' jobs in the order in which they were given, each compared with the frontier."""
    planners = findings.all_points.planners
    rows = iter([row for row, planner in enumerate(planners) if planner.startswith(YOUR_JOB)])
    return tuple(_job(findings, told, rows) for told in findings.report.get("jobs", ()))


def _job(findings: Findings, told: dict[str, Any], rows: Iterator[int]) -> _YourJob:
    row = None if told["refusal"] else next(rows)
    faster = leaner = None
    if row is not None and findings.points:
        times, needs, count = findings.all_points.time, findings.needs, len(findings.points)
        # Descending in time.
        within, quick = findings.within(needs[row]), np.flatnonzero(times[:count] <= times[row])
        if len(within) and times[within[-1]] < times[row] * (1 - _ALIKE):
            faster = int(within[-1])
        least = int(quick[np.argmin(needs[quick])]) if len(quick) else None
        if least is not None and needs[least] < needs[row] * (1 - _ALIKE):
            leaner = least
    return _YourJob(findings, told["launcher"], row, faster, leaner, tuple(told["notes"]), told["refusal"])
