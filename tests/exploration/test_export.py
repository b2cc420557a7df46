"""The CSV of a frontier, read back column by column, and compared with the plan of every point.

Planners side by side, told from the points of an exploration and not from what was written down once.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from tensoropt import Exploration, load_cluster
from tensoropt.costs.process_memory import TERMS
from tensoropt.exploration.export import compared, limits_asked, write_strategies_csv
from tensoropt.plan.figures import FIGURES
from tensoropt.plan.point import FRONTIER
from tensoropt.report.table import _GAP_CAPTION, comparison_text
from tests.plan.explorations import MIB, csv_of, point, rows_of, small_exploration, space


def row(planner: str, **changes: object) -> dict[str, object]:
    fields = {"planner": planner, "limit_bytes": None, "memory_bytes": 1.0, "time_s": 1.0, "points": 180,
              "search_s": 0.5, "gap": 0.7, "notes": []}  # fmt: skip
    return {**fields, **changes}


@pytest.fixture
def found():
    """Two planners: one has a plan among the points, one only beaten ones. What was written down is wrong."""
    base = small_exploration()
    own = base.points[2].changed(planner="zero")
    others = (point(30 * MIB, 0.3, 0, planner="dpos"), point(11 * MIB, 0.5, 0, planner="zero"), own)
    rows = (row(FRONTIER, notes=["zero is faster: 1 s"]), row("zero"), row("dpos", notes=["remark"]))
    return replace(base, points=(*base.points[:2], own, base.points[3]), others=others, comparison=rows)


@pytest.mark.parametrize("limit", [None, 12 * MIB, 25 * MIB, 1.0, "a need"])
@pytest.mark.parametrize("on_gpus", [False, True])
def test_rows_are_of_the_points(found, limit, on_gpus):
    if on_gpus:
        found = replace(found, cluster=load_cluster("dgx-h100[2]").to_dict())
    if limit == "a need":
        limit = float(found.needs[1])
    needs = {p.identity: need for p, need in zip(found.all_points, found.needs, strict=True)}
    fits = [p for p in found.all_points if limit is None or needs[p.identity] <= limit]
    assert not on_gpus or all(needs[p.identity] > p.memory_bytes for p in found.all_points)
    for told in compared(found, limit):
        ours = told.planner == FRONTIER
        its = [p for p in fits if (p in found.points if ours else p.planner == told.planner)]
        assert (told.points, told.limit_bytes) == (len(its), limit)
        if not its:
            assert (told.time_s, told.memory_bytes, told.needs_bytes, told.gap) == (None,) * 4
            continue
        best = min(its, key=lambda p: p.time_s)
        within = min(p.time_s for p in fits if p.memory_bytes <= best.memory_bytes)
        assert (told.time_s, told.memory_bytes) == (best.time_s, best.memory_bytes)
        assert told.needs_bytes == needs[best.identity]
        assert told.gap == pytest.approx(best.time_s / within - 1)


def test_the_csv_and_the_table_agree(found, tmp_path):
    frontier, zero, dpos = compared(found)
    points = csv_of(found, tmp_path)
    assert (frontier.points, frontier.time_s) == (len(points), float(points[-1]["time_s"]))
    assert zero.time_s == min(float(p["time_s"]) for p in points if p["planner"] == "zero")
    lines = comparison_text(found).splitlines()
    assert lines[1].split()[:2] == ["frontier", "-"]
    assert f" {len(points)} " in lines[1]
    # The frontier is beaten by none, which was written down before that plan was one of its points.
    assert "faster" not in lines[1]
    assert f"+{100 * dpos.gap:.1f} %" in lines[3]
    assert lines[-1] == _GAP_CAPTION


@pytest.mark.parametrize("off", [-1e-15, 1e-15])
def test_what_only_rounding_tells_apart_is_no_gap(found, off):
    last = found.points[-1]
    near = point(last.memory_bytes, last.time_s * (1 + off), 0, planner="dpos")
    rows = compared(replace(found, others=(near,)))
    assert [told.gap for told in rows if told.planner == "dpos"] == [0.0]


def test_limits_that_were_asked_have_a_row_each(found):
    asked = replace(found, comparison=(*(row(FRONTIER, limit_bytes=b) for b in (15 * MIB, 40 * MIB)),))
    assert limits_asked(asked) == (15 * MIB, 40 * MIB)
    assert len(comparison_text(asked).splitlines()) == 4


def test_what_is_not_within_a_limit_says_why(found):
    *_, dpos = compared(found, 12 * MIB)
    assert dpos.notes == ("its leanest plan needs 30 MiB", "remark")
    refused = replace(found, comparison=(row("ilp", time_s=None, notes=["no solver", "no solver"]),))
    assert compared(refused)[0].notes == ("no solver",)


SECONDS = (
    "time_s", "compute_s", "communication_s", "gap", "additive_time_s", "exposed_s", "hidden_s", "idle_s",
)  # fmt: skip


def check(exploration: Exploration, rows: list[dict[str, str]]) -> None:
    """Every column against the plan of its point."""
    assert len(rows) == len(exploration.points)
    for i, row in enumerate(rows):
        plan = exploration.plan(i)
        told = plan.predicted
        assert (list(row), row["point"]) == ([figure.name for figure in FIGURES], str(i + 1))
        assert row["mesh"] == plan.kind.mesh_words + "x".join(map(str, plan.mesh.shape))
        assert int(row["devices"]) == prod(plan.mesh.shape)
        assert int(row["micro_batches"]) == plan.micro_batches
        assert (row["planner"], row["exact"]) == (plan.planner, "true" if told.exact else "false")
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
        assert (row["stages"], row["schedule"], row["cuts"]) == ("", "", "")  # no pipeline
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


def test_no_two_columns_change_places(tmp_path):
    exploration = replace(
        small_exploration(),
        spaces=(space((2, 4), 3), space((3, 2), 5)),
        points=(
            point(2e6, 0.9, 0).changed(**unlike(1)),
            point(3e6, 0.8, 1).changed(**unlike(2)),
            point(4e6, 0.7, 0).changed(**unlike(3) | {"sources": {"data sheet": 1.0}}),
        ),
    )
    rows = csv_of(exploration, tmp_path)
    check(exploration, rows)
    wanted = [("8", "2x4", "3"), ("6", "3x2", "5"), ("8", "2x4", "3")]
    assert [(row["devices"], row["mesh"], row["micro_batches"]) for row in rows] == wanted
    figures = [value for key, value in rows[0].items() if key not in ("point", "exact") and value]
    assert len(set(figures)) == len(figures)


def test_strategies_name_what_every_axis_splits_and_what_is_stored(tmp_path):
    points, spaces = small_exploration().points[:2], (space((2,), 4), space((2, 4), 1))
    exploration = replace(small_exploration(), spaces=spaces, points=points)
    write_strategies_csv(exploration, tmp_path / "strategies.csv")
    rows = rows_of(tmp_path / "strategies.csv")
    assert list(rows[0]) == ["point", "operator", "axis_0", "axis_1", "options"]
    wanted = [("1", "linear"), ("1", "loss"), ("2", "linear"), ("2", "loss")]
    assert [(r["point"], r["operator"]) for r in rows] == wanted
    for row in rows:
        labels = list(exploration.plan(int(row["point"]) - 1).operators[row["operator"]].axes.values())
        assert [row["axis_0"], row["axis_1"]][: len(labels)] == labels
        assert not any([row["axis_0"], row["axis_1"]][len(labels) :])
    assert (rows[0]["options"], rows[1]["options"]) == ("weight=S(0)", "")
