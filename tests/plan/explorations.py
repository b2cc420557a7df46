"""A small exploration made by hand: two spaces, four points, nothing searched and nothing measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensoropt import Exploration, Point, Space
from tensoropt.costs.device_fit import _ALLOCATOR_SHARE, _DRIVER_SHARE
from tensoropt.exploration.export import write_frontier_csv
from tensoropt.plan.plan import MeshInfo, ModelInfo, Plan

MIB = 2.0**20


def space(mesh: tuple[int, ...], micro_batches: int) -> Space:
    """Two groups in a row, one tensor with two readers, one tied parameter."""
    names = ("node", "gpu")[2 - len(mesh) :] if mesh else ()
    whole, sharded = (["R", *([layout] * len(mesh))] for layout in ("R", "S(0)"))

    def group(name: str, parameters: list[str], options: list[Any]) -> dict[str, Any]:
        split = [["none"] * len(mesh), ["rows"] * len(mesh)]
        made = {"micro": "rows", "members": [name], "parameters": parameters, "configurations": split}
        return {**made, "options": options}

    linear = group("linear", ["p_weight"], [[[whole]], [[whole], [sharded]]])
    return Space(
        mesh=MeshInfo(shape=mesh, names=names),
        micro_batches=micro_batches,
        groups={"linear": linear, "loss": group("loss", [], [[[]], [[]]])},
        hubs={"hidden": [whole, sharded]},
        shared={"p_tied": [whole, sharded]},
        keys={"p_weight": "weight", "p_tied": "tied"},
    )


def point(memory: float, time_s: float, where: int, **changes: object) -> Point:
    fields = {
        "memory_bytes": memory, "time_s": time_s, "compute_s": 0.75 * time_s,
        "communication_s": 0.25 * time_s, "exposed_s": 0.25 * time_s, "hidden_s": 0.0,
        "additive_memory_bytes": memory - 5, "additive_time_s": time_s,
        "memory": (memory / 2, memory / 4, memory / 8, memory / 8, 0.0), "space": where,
        "choice": (1, 1, 1, 0), "options": (1, 0, 0, 0), "collectives": (("all_reduce", (0,), 4096, 2),),
        "sources": {"measured": 0.75, "data sheet": 0.25}, "exact": True, "gap": 0.0,
    }  # fmt: skip
    return Point.of(**{**fields, **changes})  # type: ignore[arg-type]


def needing(needs: float, time_s: float, device_bytes: float, where: int = 0) -> Point:
    """A point that needs so much of a GPU."""
    context = MIB
    tensors = (needs - _DRIVER_SHARE * device_bytes - context) / (1 + _ALLOCATOR_SHARE)
    return point(tensors + context, time_s, where, terms={"context": context})


def small_exploration() -> Exploration:
    return Exploration(
        points=(
            point(10 * MIB, 0.4, 0),
            point(12 * MIB, 0.2, 1, choice=(1, 0, 0, 1)),
            point(20 * MIB, 0.15, 0, choice=(0, 0, 0, 0), options=(0, 0, 0, 0), exact=False, gap=0.01),
            point(40 * MIB, 0.14, 1),
        ),
        spaces=(space((2,), 4), space((1, 2), 1)),
        model=ModelInfo(source="zoo:toy", fingerprint="f" * 64, parameters=100),
        cluster={"name": "toy"},
        settings={"optimizer": "adam", "mode": "train"},
        versions={"tensoropt": "0"},
        report={
            "operators": 2, "operators_without_rule": ["aten.odd"], "micro_batches_refused": "",
            "notes": ["a note"], "seconds": {"search": 0.1}, "workloads_measured": 0,
        },
    )  # fmt: skip


def rows_of(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def csv_of(found: Exploration, folder: Path) -> list[dict[str, str]]:
    """The rows of the frontier's CSV, written into the folder."""
    write_frontier_csv(found, folder / "frontier.csv")
    return rows_of(folder / "frontier.csv")


def costs(found: Exploration) -> list[tuple[float, float]]:
    """(bytes, seconds) of the frontier."""
    return [(point.memory_bytes, point.time_s) for point in found.points]


def edited(plan: Plan, tmp_path: Path, change: Callable[[Any], None]) -> Path:
    """The file of a plan whose data a function has changed."""
    data = json.loads(plan.to_json())
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return path
