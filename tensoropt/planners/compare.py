"""Planners side by side: the same problem, the same judge, one row each."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensoropt.costs.source import Progress
from tensoropt.errors import TensorOptError
from tensoropt.plan.exploration import Point
from tensoropt.planners.problem import Problem
from tensoropt.planners.registry import ENTRIES, Entry, cp_sat, planner


@dataclass(frozen=True)
class Row:
    """What one planner did under one memory limit.

    Attributes:
        planner: its name.
        limit_bytes: what was asked for; None for no limit.
        memory_bytes, time_s: of its fastest plan; None when it refused.
        points: how many trade-offs it found.
        search_s: seconds it took, the judge included.
        gap: its time over the frontier's at the same memory, less 1; below 0 the judge's correction
            made it faster than anything the search had added up.
        notes: why it refused, or what it says of its result.
    """

    planner: str
    limit_bytes: float | None
    memory_bytes: float | None
    time_s: float | None
    points: int
    search_s: float
    gap: float | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes)}


def asked(names: str | Iterable[str]) -> tuple[Entry, ...]:
    """The planners called for: names, or ``all``.

    Of ``all``, one whose solver is not installed says so in its row; a planner that was named is refused.

    Raises:
        TensorOptError: there is no such planner.
        MissingExtraError: a planner named needs a solver that is not installed.
    """
    listed = names.split(",") if isinstance(names, str) else list(names)
    listed = [name.strip() for name in listed if name.strip() and name.strip() != "frontier"]
    if "all" in listed:
        return tuple(ENTRIES.values())
    entries = tuple(planner(name) for name in dict.fromkeys(listed))
    for entry in entries:
        if entry.solves:
            cp_sat(entry.name)
    return entries


def compare(
    problem: Problem,
    entries: Sequence[Entry],
    limits: Sequence[float | None],
    frontier: Sequence[Point],
    seed: int,
    progress: Progress,
) -> tuple[tuple[Row, ...], tuple[Point, ...]]:
    """(a row per planner and limit, all points found).

    Args:
        limits: bytes; None asks for all trade-offs a planner knows.
        frontier: ascending in memory; what gaps are measured against.
    """
    rows: list[Row] = []
    found: dict[object, Point] = {}
    steps = [(entry, limit) for entry in entries for limit in (limits or [None])]
    for number, (entry, limit) in enumerate(steps):
        progress("compare", number, len(steps), entry.name)
        start = time.perf_counter()
        try:
            points = entry.points(problem, limit, seed)
        except TensorOptError as refusal:
            spent = time.perf_counter() - start
            rows.append(Row(entry.name, limit, None, None, 0, spent, None, (str(refusal),)))
            continue
        spent = time.perf_counter() - start
        best, notes = points[-1]
        gap = gap_to(frontier, best)
        rows.append(Row(entry.name, limit, best.memory_bytes, best.time_s, len(points), spent, gap, notes))
        found.update((p.identity, p) for p, _ in points)
    progress("compare", len(steps), len(steps), f"{len(found)} points")
    return tuple(rows), tuple(found.values())


def gap_to(frontier: Sequence[Point], point: Point) -> float | None:
    """A point's time over the frontier's within the same memory, less 1; None below the leanest."""
    at = bisect_right([p.memory_bytes for p in frontier], point.memory_bytes)
    return point.time_s / frontier[at - 1].time_s - 1.0 if at else None
