"""Functions that write a frontier and its strategies as CSV files (RFC 4180), and that compare planners.

The first columns of a frontier's file are fixed, since other programs read them by name and position; new
columns are added after them. Planners are compared by their fastest plans within a memory limit.
"""

from __future__ import annotations

import csv
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensoropt.exploration.figure_rows import figure_rows
from tensoropt.files import written_whole
from tensoropt.plan.figures import FIGURES
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import Plan, StagePlan
from tensoropt.plan.point import FRONTIER, SAME, Point, reduce_points
from tensoropt.plan.point_plan import plan_of
from tensoropt.sharding.storage import stored_words
from tensoropt.units import format_bytes


@dataclass(frozen=True)
class Compared:
    """The best plan of the whole frontier, or of one planner, within a memory limit.

    Attributes:
        planner: the planner's name; ``frontier`` for the frontier itself.
        limit_bytes: the memory limit per device in bytes; None for no limit.
        memory_bytes, time_s: memory and step time of the fastest plan within the limit; None if there is
            none.
        points: the number of the planner's plans within the limit.
        search_s: duration of searching and simulating the planner's plans in seconds.
        gap: the plan's step time over that of the fastest known plan with no more memory, less 1, at least 0;
            None without a plan.
        notes: why there is no plan, or the planner's remarks on its result.
        needs_bytes: memory in bytes that the plan needs on a device, process included; None without a plan.
    """

    planner: str
    limit_bytes: float | None
    memory_bytes: float | None
    time_s: float | None
    points: int
    search_s: float
    gap: float | None
    notes: tuple[str, ...] = ()
    needs_bytes: float | None = None


def limits_asked(found: Findings) -> tuple[float | None, ...]:
    """Return the memory limits per device in bytes that the planners were run with; None for no limit."""
    return tuple(dict.fromkeys(row["limit_bytes"] for row in found.comparison))


def compared(found: Findings, limit_bytes: float | None = None) -> tuple[Compared, ...]:
    """Return the frontier's best plan within a memory limit, and that of each planner that ran.

    Args:
        limit_bytes: memory limit per device in bytes; None for no limit.
    """
    needs = dict(zip((p.identity for p in found.all_points), map(float, found.needs), strict=True))

    def within(points: Iterable[Point]) -> list[Point]:
        return [p for p in points if limit_bytes is None or needs[p.identity] <= limit_bytes]

    known, rows = reduce_points(within(found.all_points)), []
    for name in dict.fromkeys(row["planner"] for row in found.comparison):
        asked = [row for row in found.comparison if row["planner"] == name]
        same = [row for row in asked if row["limit_bytes"] == limit_bytes] or asked
        # Remarks on the frontier date from before planners' plans joined its points.
        notes = [] if name == FRONTIER else [str(note) for row in same for note in row["notes"]]
        if name == FRONTIER and (refusal := found.report.get("sharded_refusal")):
            notes = [f"no sharded plan: {refusal}"]
        own = found.points if name == FRONTIER else [p for p in found.all_points if p.planner == name]
        fitting, best = within(own), None
        if fitting:
            best = min(fitting, key=lambda p: (p.time_s, p.memory_bytes))
            at = bisect_right([p.memory_bytes for p in known], best.memory_bytes)
            gap = best.time_s / known[at - 1].time_s - 1.0
        elif len(own):
            notes.insert(0, f"its leanest plan needs {format_bytes(min(needs[p.identity] for p in own))}")
        rows.append(
            Compared(
                planner=name,
                limit_bytes=limit_bytes,
                memory_bytes=None if best is None else best.memory_bytes,
                time_s=None if best is None else best.time_s,
                points=len(fitting),
                search_s=float(sum(row["search_s"] for row in same)),
                gap=None if best is None else gap if gap >= SAME else 0.0,
                notes=tuple(dict.fromkeys(notes)),
                needs_bytes=None if best is None else needs[best.identity],
            )
        )
    return tuple(rows)


def _write_rows(path: str | os.PathLike[str], header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with written_whole(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_frontier_csv(saved: Findings | Mapping[str, Findings], path: str | os.PathLike[str]) -> None:
    """Write a CSV file with one row per frontier point, ascending in memory, strictly descending in time.

    Args:
        saved: an exploration, or several by name. For several, the last columns are ``exploration`` (that
            name), ``cluster`` (its name) and ``batch`` (samples per step).
    """
    explorations, of_several = _by_name(saved)
    header = [f.name for f in FIGURES] + (["exploration", "cluster", "batch"] if of_several else [])
    cells = []
    for name, found in explorations.items():
        for row in figure_rows(found, range(len(found.points))):
            samples = "" if row.rated.work.samples is None else row.rated.work.samples
            about = [name, found.cluster.get("name", ""), samples] if of_several else []
            cells.append([*(f.cell(row) for f in FIGURES), *about])
    _write_rows(path, header, cells)


def _by_name(saved: Findings | Mapping[str, Findings]) -> tuple[Mapping[str, Findings], bool]:
    return ({"": saved}, False) if isinstance(saved, Findings) else (saved, True)


def write_strategies_csv(saved: Findings | Mapping[str, Findings], path: str | os.PathLike[str]) -> None:
    """Write a CSV file with one row per point and group of operators: the dim that each mesh axis splits, and
    how the group's parameters are stored.

    For a pipeline the first axis is the stage number, and each stage has a row with its stored parameters.

    Args:
        saved: an exploration, or several by name. For several, the last columns are ``exploration`` (that
            name), ``cluster`` (its name) and ``devices``.
    """
    explorations, of_several = _by_name(saved)
    axes = max((len(s.mesh.names) for found in explorations.values() for s in found.spaces), default=0)
    header = ["point", "operator", *(f"axis_{i}" for i in range(axes)), "options"]
    rows = []
    for name, found in explorations.items():
        for number, point in enumerate(found.points, 1):
            space = found.spaces[point.space]
            of_point = _rows(plan_of(found, point), point.stages.stages, space.groups, axes)
            about = [name, found.cluster.get("name", ""), space.devices] if of_several else []
            rows += [[number, *row, *about] for row in of_point]
    _write_rows(path, [*header, *(["exploration", "cluster", "devices"] if of_several else [])], rows)


def _rows(
    plan: Plan, stages: Sequence[StagePlan], groups: Mapping[str, Mapping[str, Any]], axes: int
) -> Iterator[list[str]]:

    def cells(name: str, labels: Sequence[str], options: str = "") -> list[str]:
        return [name, *labels, *[""] * (axes - len(labels)), options]

    for number, stage in enumerate(stages):
        yield cells(f"stage {number}", [str(number)], _stored(plan, stage.stored))
        for name, (_, *labels) in stage.groups.items():
            if name in plan.operators:  # skips received and sent tensors
                yield cells(name, [str(number), *labels])
    in_stages = {name for stage in stages for name in stage.groups}
    for name, operator in plan.operators.items():
        if name not in in_stages:
            stored = {p: plan.parameters[p].stored for p in groups.get(name, {}).get("parameters", ())}
            yield cells(name, list(operator.axes.values()), operator.position or _stored(plan, stored))


def _stored(plan: Plan, layouts: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{plan.parameters[p].key}={','.join(stored_words(of))}" for p, of in layouts.items())
