"""The alternatives to a chosen plan: the frontier's ends and planners that were run, each with why it was not
taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.plan.exploration import Exploration
from tensoropt.plan.frontier_table import marks_of
from tensoropt.plan.plan_names import planner_title
from tensoropt.plan.point import FRONTIER
from tensoropt.report.commands import beside_line
from tensoropt.units import format_bytes, share_words

_BASELINES = ("data_parallel", "zero")
"""The planners that find what people do by hand, and would ask about."""
SAME = 5e-4
"""The relative difference up to which figures count as equal."""


@dataclass(frozen=True)
class Alternative:
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
) -> list[Alternative]:
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
    found = [
        chosen.than_point(other, f"{' and '.join(words)} (point {other + 1})")
        for other, words in sorted(named.items())
        if other != index
    ]
    refusals: dict[str, list[str]] = {}
    for row in exploration.comparison:
        if row["planner"] != FRONTIER:
            refusals.setdefault(str(row["planner"]), []).extend(map(str, row["notes"]))
    for planner, notes in refusals.items():
        found += _planner(chosen, planner, notes)
    for planner in _BASELINES:
        if planner not in refusals:
            found += _baseline(chosen, folder, planner)
    return found


@dataclass(frozen=True)
class _Chosen:
    """The chosen plan, with what it had to fit."""

    exploration: Exploration
    index: int
    limit_bytes: float
    limit: str

    def than(self, name: str, plan: str, memory_bytes: float, time_s: float) -> Alternative:
        """Return another plan with why this one was chosen rather than it."""
        point = self.exploration.all_points[self.index]
        costs = (point.memory_bytes, point.time_s), (memory_bytes, time_s)
        return Alternative(
            name, plan, memory_bytes, time_s, verdict_words(*costs, self.limit_bytes, self.limit)
        )

    def than_point(self, other: int, name: str) -> Alternative:
        """Return :meth:`than` of another point."""
        point = self.exploration.all_points[other]
        return self.than(name, self.exploration.names[other], point.memory_bytes, point.time_s)


def _baseline(chosen: _Chosen, folder: str, planner: str) -> list[Alternative]:
    """Return the fastest plan of a planner that ran beside the search; nothing if that is the chosen one."""
    found = chosen.exploration
    name, ran = planner_title(planner), found.report.get("tried", {}).get(planner)
    if ran is None:
        line = beside_line(folder, planner)
        return [Alternative(name, "", None, None, f"not run beside this frontier: {line}")]
    if ran["time_s"] is None:
        return [Alternative(name, "", None, None, f"found no plan: {ran['refusal']}")]
    point, its = found.all_points[chosen.index], (ran["memory_bytes"], ran["time_s"])
    if (point.memory_bytes, point.time_s) == its:
        return []
    return [chosen.than(f"{name}, its fastest", "", *its)]


def _planner(chosen: _Chosen, planner: str, notes: Sequence[str]) -> list[Alternative]:
    """Return a planner's fastest plan that fits, otherwise its leanest; nothing if that is the chosen one."""
    name, points = planner_title(planner), chosen.exploration.all_points
    its = [i for i, point in enumerate(points) if point.planner == planner]
    if not its:
        why = "; ".join(dict.fromkeys(notes))
        return [Alternative(name, "", None, None, f"found no plan: {why}" if why else "found no plan")]
    fitting = [i for i in its if points[i].memory_bytes <= chosen.limit_bytes]
    if fitting:
        best, which = min(fitting, key=lambda i: points[i].time_s), "the fastest that fits"
    else:
        best, which = min(its, key=lambda i: points[i].memory_bytes), "the leanest"
    several = f", {which} of {len(its)}" if len(its) > 1 else ""
    return [] if best == chosen.index else [chosen.than_point(best, f"{name}{several}")]


def verdict_words(
    chosen: tuple[float, float], other: tuple[float, float], limit_bytes: float, limit: str
) -> str:
    """Say why a plan of ``other`` (memory, time) was not taken, and also what speaks for it."""
    (memory, time_s), (its_memory, its_time_s) = chosen, other
    slower, larger = its_time_s / time_s - 1, its_memory / memory - 1
    speed = (
        "as fast"
        if abs(slower) < SAME
        else f"slower by {share_words(slower)}"
        if slower > 0
        else f"faster by {share_words(-slower)}"
    )
    size = (
        "with as much memory"
        if abs(larger) < SAME
        else f"with {format_bytes(its_memory - memory)} more memory"
        if larger > 0
        else f"with {format_bytes(memory - its_memory)} less memory"
    )
    if its_memory > limit_bytes:
        over = format_bytes(its_memory - limit_bytes)
        return f"does not fit {limit} of {format_bytes(limit_bytes)}: {over} too much; {speed}"
    return f"{speed}, {size}"
