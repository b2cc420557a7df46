"""The CSV of a frontier, read back column by column, and compared with the plan of every point."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from math import prod
from pathlib import Path

import tensoropt
from tensoropt.cluster.files import cluster_from
from tensoropt.costs.process_memory import TERMS
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.export import (
    COMPARISON_COLUMNS,
    write_comparison_csv,
    write_frontier_csv,
    write_strategies_csv,
)
from tensoropt.plan.figures import FIGURES
from tensoropt.profiling.store import ProfileStore
from tests.costs.models import two_layers
from tests.plan.explorations import point, small_exploration, space

NODES = {
    "devices": [{"kind": "A100-80GB", "count": 2}],
    "nodes": 2,
    "links": {"intra_node": "NVLink3", "inter_node": "IB-200G"},
}

SECONDS = (
    "time_s", "compute_s", "communication_s", "gap", "additive_time_s", "exposed_s", "hidden_s", "idle_s",
)  # fmt: skip


def written(exploration: Exploration, folder: Path) -> list[dict[str, str]]:
    write_frontier_csv(exploration, folder / "frontier.csv")
    return read(folder / "frontier.csv")


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check(exploration: Exploration, rows: list[dict[str, str]]) -> None:
    """Every column against the plan of its point."""
    assert len(rows) == len(exploration.points)
    for i, row in enumerate(rows):
        plan = exploration.plan(i)
        told = plan.predicted
        assert list(row) == [figure.name for figure in FIGURES if not figure.sparse]
        assert row["point"] == str(i + 1)
        assert row["mesh"] == ("pp" if plan.pipeline is not None else "") + "x".join(
            map(str, plan.mesh.shape)
        )
        assert int(row["devices"]) == prod(plan.mesh.shape)
        assert int(row["micro_batches"]) == plan.micro_batches
        assert row["planner"] == plan.planner
        assert row["exact"] == ("true" if told.exact else "false")
        for column in SECONDS:
            figure = getattr(told, column)
            assert row[column] == "" if figure is None else float(row[column]) == figure, column
        for column in ("memory_bytes", "additive_memory_bytes"):
            assert int(row[column]) == round(getattr(told, column)), column
        assert set(told.memory) == {"parameters", "gradients", "optimizer", "kept", "transient"}
        for kind, size in told.memory.items():
            assert int(row[f"{kind}_bytes"]) == round(size), kind
        for name in TERMS:
            assert int(row[f"{name}_bytes"]) == round(told.terms.get(name, 0)), name
        stages = plan.pipeline.stages if plan.pipeline is not None else ()
        assert row["stages"] == (str(len(stages)) if stages else "")
        assert row["schedule"] == (plan.pipeline.schedule if plan.pipeline is not None else "")
        assert row["cuts"].split() == [stage.begins for stage in stages[1:]]
        for source in ("measured", "fitted", "data sheet"):
            assert float(row[f"{source.replace(' ', '_')}_share"]) == told.sources.get(source, 0.0), source


def unlike(number: int) -> dict[str, object]:
    """Figures of which no two are equal, so that none can stand in another's column."""
    return {
        "compute_s": 0.011 + number, "communication_s": 0.022 + number, "exposed_s": 0.033 + number,
        "hidden_s": 0.044 + number, "idle_s": 0.055 + number, "gap": 0.066 + number,
        "additive_time_s": 0.077 + number, "additive_memory_bytes": 1e6 + 88.0 + number,
        "memory": (101.0 + number, 202.0 + number, 303.0 + number, 404.0 + number, 505.0 + number),
        "sources": {"measured": 0.5, "fitted": 0.3, "data sheet": 0.2}, "exact": number % 2 == 0,
        "planner": f"planner {number}",
        "terms": {name: 1001.0 * place + number for place, name in enumerate(TERMS, 1)},
    }  # fmt: skip


def test_no_two_columns_change_places(tmp_path: Path) -> None:
    exploration = replace(
        small_exploration(),
        spaces=(space((2, 4), 3), space((3, 2), 5)),
        points=(
            point(2e6, 0.9, 0).changed(**unlike(1)),
            point(3e6, 0.8, 1).changed(**unlike(2)),
            point(4e6, 0.7, 0).changed(**unlike(3) | {"sources": {"data sheet": 1.0}}),
        ),
    )
    rows = written(exploration, tmp_path)
    check(exploration, rows)
    assert [(row["devices"], row["mesh"], row["micro_batches"]) for row in rows] == [
        ("8", "2x4", "3"), ("6", "3x2", "5"), ("8", "2x4", "3"),
    ]  # fmt: skip
    figures = [value for key, value in rows[0].items() if key not in ("point", "exact") and value]
    assert len(set(figures)) == len(figures)


def test_the_columns_of_a_search_are_its_plans(tmp_path: Path) -> None:
    """Four cards in two nodes, from data sheets; buckets are reduced beside backward."""
    model, args, kwargs = two_layers()
    with ProfileStore(tmp_path / "profile.sqlite") as store:
        exploration = tensoropt.explore(
            model,
            args,
            kwargs,
            cluster=cluster_from(NODES, name="nodes"),
            store=store,
            micro_batches=(1,),
            epsilon=0.0,
        )
    rows = written(exploration, tmp_path)
    check(exploration, rows)
    assert {"4"} == {row["devices"] for row in rows}
    assert "2x2" in {space.mesh.label for space in exploration.spaces}
    assert any(float(row["communication_s"]) > 0 for row in rows)
    for a, b in itertools.pairwise(rows):
        assert int(a["memory_bytes"]) < int(b["memory_bytes"])
        assert float(a["time_s"]) > float(b["time_s"])


def test_strategies_name_what_every_axis_splits_and_what_is_stored(tmp_path: Path) -> None:
    exploration = replace(
        small_exploration(), spaces=(space((2,), 4), space((2, 4), 1)), points=small_exploration().points[:2]
    )
    write_strategies_csv(exploration, tmp_path / "strategies.csv")
    rows = read(tmp_path / "strategies.csv")
    assert list(rows[0]) == ["point", "operator", "axis_0", "axis_1", "options"]
    assert [(r["point"], r["operator"]) for r in rows] == [
        ("1", "linear"), ("1", "loss"), ("2", "linear"), ("2", "loss"),
    ]  # fmt: skip
    for row in rows:
        plan = exploration.plan(int(row["point"]) - 1)
        labels = list(plan.operators[row["operator"]].axes.values())
        assert [row["axis_0"], row["axis_1"]][: len(labels)] == labels
        assert not any([row["axis_0"], row["axis_1"]][len(labels) :])
    assert rows[0]["options"] == "weight=S(0)"
    assert rows[1]["options"] == ""


def test_a_comparison_leaves_empty_what_does_not_apply(tmp_path: Path) -> None:
    row = dict.fromkeys(COMPARISON_COLUMNS) | {
        "planner": "ilp", "limit_bytes": 10, "search_s": 0.5, "notes": ["one", "two"],
    }  # fmt: skip
    exploration = replace(small_exploration(), comparison=(row,))
    write_comparison_csv(exploration, tmp_path / "comparison.csv")
    (found,) = read(tmp_path / "comparison.csv")
    assert found == {
        "planner": "ilp", "limit_bytes": "10", "memory_bytes": "", "time_s": "", "points": "0",
        "search_s": "0.5", "gap": "", "notes": "one; two",
    }  # fmt: skip
