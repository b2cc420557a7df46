"""Compare planners on one task with one simulator: a table with a row per planner, the frontier's first."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from tensoropt.errors import TensorOptError, import_extra
from tensoropt.plan.point import FRONTIER, Point
from tensoropt.planners.registry import ENTRIES, Entry, planner
from tensoropt.planners.task import PlanningTask
from tensoropt.types import Progress


def cp_sat(name: str) -> Any:
    """Return the module of OR-tools' CP-SAT, for the planner ``name``.

    Raises:
        MissingExtraError: OR-tools is not installed.
    """
    return import_extra("ortools.sat.python.cp_model", "solvers", f"the planner {name}")


def requested_planners(names: str | Iterable[str], options: Iterable[str] = ()) -> tuple[Entry, ...]:
    """Return the planners requested by names, or by ``all``.

    With ``all``, a planner whose solver is not installed is included; its row in the table will say so.

    Args:
        options: settings of planners, such as ``netsplit.seconds=600``.

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
    seed: int,
    progress: Progress,
) -> tuple[tuple[dict[str, Any], ...], tuple[Point, ...]]:
    """Run planners under each memory limit; return the rows of a table, and all points found.

    Each limit has a row for the frontier and one per planner. Rows have no step times or memory:
    :func:`tensoropt.exploration.export.compared` adds these from all points, since a point that a planner
    finds under one limit may also be its best under another.

    Args:
        limits: memory limits in bytes; None asks for all trade-offs that a planner finds.
    """
    points: dict[object, Point] = {}
    rows: list[dict[str, Any]] = []
    each_limit = dict.fromkeys(limits or (None,))
    total = len(each_limit) * len(entries)

    def add(name: str, limit: float | None, search_s: float, notes: Sequence[str] = ()) -> None:
        rows.append({"planner": name, "limit_bytes": limit, "search_s": search_s, "notes": list(notes)})

    for limit in each_limit:
        add(FRONTIER, limit, task.search_s)
        for entry in entries:
            progress("compare", len(rows) - 1, total, entry.name)
            start = time.perf_counter()
            try:
                found = entry.points(task, limit, seed)
            except TensorOptError as refusal:
                add(entry.name, limit, time.perf_counter() - start, [str(refusal)])
                continue
            add(entry.name, limit, time.perf_counter() - start, found[-1].notes)
            # A plan that one planner finds under several limits counts once.
            for each in found:
                points.setdefault(each.point.identity, each.point)
    progress("compare", total, total, f"{len(points)} points")
    return tuple(rows), tuple(points.values())
