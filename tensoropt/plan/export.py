"""The CSV files (RFC 4180) of a frontier, of its strategies and of a comparison of planners.

The first columns of a frontier's file are fixed, since other people's programs read them by name and place;
further ones may be added behind.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tensoropt.files import written_whole
from tensoropt.plan.compared import compared, limits_asked
from tensoropt.plan.figure_rows import figure_rows
from tensoropt.plan.figures import FIGURES
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import Plan
from tensoropt.plan.point_plan import plan_of
from tensoropt.sharding.storage import stored_words


def write_rows(path: str | os.PathLike[str], header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a CSV file, whole or not at all."""
    with written_whole(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_frontier_csv(exploration: Findings, path: str | os.PathLike[str]) -> None:
    """One row per point, ascending in memory, strictly descending in time."""
    rows = list(figure_rows(exploration, range(len(exploration.points))))
    columns = [f for f in FIGURES if not f.sparse or any(f.name in row.point.figures for row in rows)]
    write_rows(path, [f.name for f in columns], [[f.cell(row) for f in columns] for row in rows])


def write_strategies_csv(exploration: Findings, path: str | os.PathLike[str]) -> None:
    """One row per point and operator group: what each mesh axis splits, how parameters are stored.

    Of a pipeline the first axis has the number of the stage, and a row for each stage how its parameters are
    stored.
    """
    axes = max((len(s.mesh.names) for s in exploration.spaces), default=0)
    header = ["point", "operator", *(f"axis_{i}" for i in range(axes)), "options"]
    rows = []
    for i, point in enumerate(exploration.points, 1):
        plan = plan_of(exploration, point)
        if plan.pipeline is not None:
            rows += [[i, *row] for row in _stage_rows(plan, axes)]
            continue
        members = exploration.spaces[point.space].groups
        for name, operator in plan.operators.items():
            if operator.device is not None:
                rows.append([i, name, *[""] * axes, f"device {operator.device}, position {operator.order}"])
                continue
            labels = list(operator.axes.values())
            stored = "; ".join(
                f"{plan.parameters[p].key}={','.join(stored_words(plan.parameters[p].stored))}"
                for p in members[name]["parameters"]
            )
            rows.append([i, name, *labels, *[""] * (axes - len(labels)), stored])
    write_rows(path, header, rows)


def _stage_rows(plan: Plan, axes: int) -> Iterator[list[str]]:
    """The stages of a plan with a pipeline, each with its operators: the cells behind the point's number."""
    assert plan.pipeline is not None
    for number, stage in enumerate(plan.pipeline.stages):
        stored = "; ".join(
            f"{plan.parameters[p].key}={','.join(stored_words(layout))}" for p, layout in stage.stored.items()
        )
        yield [f"stage {number}", str(number), *[""] * (axes - 1), stored]
        for name, (_, *labels) in stage.groups.items():
            if name in plan.operators:  # and not what arrives or departs
                yield [name, str(number), *labels, *[""] * (axes - 1 - len(labels)), ""]


COMPARISON_COLUMNS = (
    "planner",
    "limit_bytes",
    "memory_bytes",
    "time_s",
    "points",
    "search_s",
    "gap",
    "notes",
)


def write_comparison_csv(exploration: Findings, path: str | os.PathLike[str]) -> None:
    """One row per planner and memory limit; what does not apply is empty."""

    def cell(value: Any) -> Any:
        if value is None:
            return ""
        return "; ".join(value) if isinstance(value, (list, tuple)) else value

    told = [row.to_dict() for limit in limits_asked(exploration) for row in compared(exploration, limit)]
    rows = [[cell(row[column]) for column in COMPARISON_COLUMNS] for row in told]
    write_rows(path, COMPARISON_COLUMNS, rows)
