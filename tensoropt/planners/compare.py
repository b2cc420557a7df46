"""Planners side by side: the same task, the same simulator, one row each, the frontier's first.

A row's gap is its time over the shortest time of any point of the comparison that needs no more memory, less
1. The frontier's row covers all points shown, planners' points too: it has no gap, and a note if its fastest
plan is a planner's.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tensoropt.errors import TensorOptError, import_extra
from tensoropt.exploration.export import Compared
from tensoropt.plan.point import FRONTIER, SAME, Point, reduce_points
from tensoropt.planners.registry import ENTRIES, Entry, planner
from tensoropt.planners.task import PlanningTask
from tensoropt.types import Progress
from tensoropt.units import format_seconds


def cp_sat(name: str) -> Any:
    """Return the module of OR-tools' CP-SAT, for the planner ``name``.

    Raises:
        MissingExtraError: OR-tools is not installed.
    """
    return import_extra("ortools.sat.python.cp_model", "solvers", f"the planner {name}")


def requested_planners(names: str | Iterable[str], options: Iterable[str] = ()) -> tuple[Entry, ...]:
    """Return the planners requested by names, or by ``all``.

    Args:
        options: settings of planners, such as ``netsplit.seconds=600``.

    With ``all``, a planner whose solver is not installed says so in its row; a planner requested by name is
    refused.

    Raises:
        TensorOptError: there is no such planner, or no such setting.
        MissingExtraError: a planner requested by name needs a solver that is not installed.
    """
    listed = names.split(",") if isinstance(names, str) else list(names)
    listed = [name.strip() for name in listed if name.strip() and name.strip() != FRONTIER]
    every = "all" in listed
    entries = dict(ENTRIES) if every else {name: planner(name) for name in listed}
    for entry in () if every else entries.values():
        # Refused before anything is computed, not after the other planners have run.
        if entry.solves:
            cp_sat(entry.name)
    for text in options:
        name, value = (part.strip() for part in (*text.split("=", 1), "")[:2])
        owner, _, option = name.partition(".")
        if not option or not value:
            raise TensorOptError(
                f"--planner-option {text} is not PLANNER.OPTION=VALUE; give it as netsplit.seconds=600"
            )
        if planner(owner).name not in entries:
            raise TensorOptError(f"--planner-option {text}: {owner} does not run; add it to --planners")
        entries[owner] = entries[owner].with_option(option, value)
    return tuple(entries.values())


def compare(
    task: PlanningTask,
    entries: Sequence[Entry],
    limits: Sequence[float | None],
    frontier: Sequence[Point],
    seed: int,
    progress: Progress,
) -> tuple[tuple[Compared, ...], tuple[Point, ...]]:
    """Return (for each limit the frontier's row, then one row per planner; all points that planners found).

    Args:
        limits: bytes; None for all trade-offs that a planner finds.
        frontier: the points so far, ascending in memory.
    """
    points_by_key: dict[object, Point] = {}
    each_limit = tuple(limits) or (None,)
    rows: dict[float | None, list[Compared]] = {limit: [] for limit in each_limit}
    done, total = 0, len(rows) * len(entries)
    for limit, of_limit in rows.items():
        for entry in entries:
            progress("compare", done, total, entry.name)
            row, points = _run(task, entry, limit, seed)
            of_limit.append(row)
            # A plan that several planners, or one planner under several limits, find counts once.
            for p in points:
                points_by_key.setdefault(p.identity, p)
            done += 1
    progress("compare", total, total, f"{len(points_by_key)} points")
    # Gaps come last: a later planner's point may be the best within an earlier row's memory.
    all_points = reduce_points([*frontier, *points_by_key.values()])
    compared: list[Compared] = []
    for limit, of_limit in rows.items():
        compared.append(_frontier_row(all_points, limit, task.search_s, task.refusal))
        compared += (_with_gap(row, all_points) for row in of_limit)
    return tuple(compared), tuple(points_by_key.values())


def _run(task: PlanningTask, entry: Entry, limit: float | None, seed: int) -> tuple[Compared, list[Point]]:
    start = time.perf_counter()
    try:
        points = entry.points(task, limit, seed)
    except TensorOptError as refusal:
        spent = time.perf_counter() - start
        return Compared(entry.name, limit, None, None, 0, spent, None, (str(refusal),)), []
    spent = time.perf_counter() - start
    best, notes = points[-1].point, points[-1].notes
    row = Compared(entry.name, limit, best.memory_bytes, best.time_s, len(points), spent, None, notes)
    return row, [each.point for each in points]


def _frontier_row(points: Sequence[Point], limit: float | None, search_s: float, refusal: str) -> Compared:
    fitting = [p for p in points if limit is None or p.memory_bytes <= limit]
    notes: tuple[str, ...] = (f"no sharded plan: {refusal}",) if refusal else ()
    if not fitting:
        return Compared(FRONTIER, limit, None, None, 0, search_s, None, (*notes, "no plan fits"))
    best = fitting[-1]
    if best.planner != FRONTIER:
        own = [p.time_s for p in fitting if p.planner == FRONTIER]
        note = f"; the search's own fastest takes {format_seconds(own[-1])}" if own else ""
        notes = (*notes, f"its fastest plan is from {best.planner}{note}")
    return Compared(FRONTIER, limit, best.memory_bytes, best.time_s, len(fitting), search_s, 0.0, notes)


def _with_gap(row: Compared, points: Sequence[Point]) -> Compared:
    if row.memory_bytes is None or row.time_s is None:
        return row
    end = bisect_right([p.memory_bytes for p in points], row.memory_bytes * (1 + SAME))
    assert end, "a row's own point is among those known"
    gap = row.time_s / points[end - 1].time_s - 1.0
    return replace(row, gap=0.0 if gap < SAME else gap)
