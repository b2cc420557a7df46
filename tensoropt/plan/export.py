"""The CSV files (RFC 4180) of a frontier, of its strategies and of a comparison of planners.

The first columns of a frontier's file are fixed, since other people's programs read them by name and place;
further ones may be added behind.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tensoropt.costs.process_memory import TERMS
from tensoropt.files import written_whole
from tensoropt.plan.compared import compared, limits_asked
from tensoropt.plan.findings import Findings
from tensoropt.plan.plan import Plan
from tensoropt.plan.point import Point
from tensoropt.plan.point_plan import plan_of
from tensoropt.plan.rates import Rates, RatesOf
from tensoropt.sharding.storage import stored_words
from tensoropt.simulate.recording import ALLOCATOR

FIXED_COLUMNS = (
    "point", "memory_bytes", "time_s", "devices", "mesh", "micro_batches", "compute_s", "communication_s",
    "exact", "gap", "planner",
)  # fmt: skip
FURTHER_COLUMNS = (
    "additive_memory_bytes", "additive_time_s", "exposed_s", "hidden_s", "idle_s", "parameters_bytes",
    "gradients_bytes", "optimizer_bytes", "kept_bytes", "transient_bytes", "measured_share", "fitted_share",
    "data_sheet_share", *(f"{name}_bytes" for name in TERMS), "host_s", "host_bound",
    "stages", "schedule", "cuts", "name",
)  # fmt: skip
"""Three are of pipelines, and empty elsewhere: how many stages, the schedule, and with which operators
further stages begin. The name is what people call such a plan (:mod:`tensoropt.plan.plan_names`)."""
ALLOCATOR_COLUMNS = tuple(f"allocator_{name}_bytes" for name in ALLOCATOR)
"""Behind these where process memory is counted."""
RATE_COLUMNS = ("samples_per_s", "tokens_per_s", "mfu", "device_hours_per_1000_steps", "price_per_hour")
"""At the very end (:mod:`tensoropt.plan.rates`), empty where unknown; the price is that of all devices."""


def write_rows(path: str | os.PathLike[str], header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a CSV file, whole or not at all."""
    with written_whole(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_frontier_csv(exploration: Findings, path: str | os.PathLike[str]) -> None:
    """One row per point, ascending in memory, strictly descending in time."""
    rows = []
    told = any(p.allocator for p in exploration.points)
    rated = RatesOf(exploration)
    for i, p in enumerate(exploration.points):
        space = exploration.spaces[p.space]
        devices = 1
        for size in space.mesh.shape:
            devices *= size
        rows.append(
            [
                i + 1, round(p.memory_bytes), repr(p.time_s), devices, space.mesh.label, space.micro_batches,
                repr(p.compute_s), repr(p.communication_s), str(p.exact).lower(), _gap(p), p.planner,
                round(p.additive_memory_bytes), repr(p.additive_time_s), repr(p.exposed_s), repr(p.hidden_s),
                repr(p.idle_s), *(round(m) for m in p.memory),
                *(repr(p.sources.get(s, 0.0)) for s in ("measured", "fitted", "data sheet")),
                *(round(p.terms.get(name, 0)) for name in TERMS), repr(p.host_s), str(p.host_bound).lower(),
                *_pipeline(p), exploration.names[i],
                *((round(p.allocator[name]) if p.allocator else "" for name in ALLOCATOR) if told else ()),
                *_rates(rated.of(i)),
            ]
        )  # fmt: skip
    write_rows(
        path, FIXED_COLUMNS + FURTHER_COLUMNS + (ALLOCATOR_COLUMNS if told else ()) + RATE_COLUMNS, rows
    )


def _rates(one: Rates) -> Iterator[str]:
    figures = (
        one.samples_per_s, one.tokens_per_s, one.mfu, one.device_hours(1000.0), one.per_hour,
    )  # fmt: skip
    return ("" if figure is None else repr(figure) for figure in figures)


def _pipeline(point: Point) -> tuple[Any, str, str]:
    """Stages, schedule and cuts; empty without a pipeline."""
    if point.pipeline is None:
        return "", "", ""
    info = point.pipeline["pipeline"]
    begins = [stage["begins"] for stage in info["stages"]]
    return len(begins), info["schedule"], " ".join(begins[1:])


def _gap(point: Point) -> str:
    """Empty where nothing is proven."""
    return "" if point.gap is None else repr(point.gap)


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
