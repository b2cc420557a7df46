"""Planners side by side, told from the points of an exploration and not from what was written down once."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.plan.compared import compared, limits_asked
from tensoropt.plan.exploration import Exploration
from tensoropt.plan.export import write_comparison_csv, write_frontier_csv
from tensoropt.plan.point import FRONTIER
from tensoropt.report.table import GAP_CAPTION, comparison_text
from tests.plan.explorations import MIB, point, small_exploration


def row(planner: str, **changes: object) -> dict[str, object]:
    fields = {"planner": planner, "limit_bytes": None, "memory_bytes": 1.0, "time_s": 1.0, "points": 180,
              "search_s": 0.5, "gap": 0.7, "notes": []}  # fmt: skip
    return {**fields, **changes}


@pytest.fixture
def found() -> Exploration:
    """Two planners: one has a plan among the points, one only beaten ones. What was written down is wrong."""
    base = small_exploration()
    own = base.points[2].changed(planner="zero")
    others = (point(30 * MIB, 0.3, 0, planner="dpos"), point(11 * MIB, 0.5, 0, planner="zero"), own)
    rows = (row(FRONTIER, notes=["zero is faster within this memory: 1 s"]), row("zero"), row("dpos"))
    return replace(base, points=(*base.points[:2], own, base.points[3]), others=others, comparison=rows)


@pytest.mark.parametrize("limit", [None, 12 * MIB, 25 * MIB, 1.0])
def test_rows_are_of_the_points(found: Exploration, limit: float | None) -> None:
    fits = [p for p in found.all_points if limit is None or p.memory_bytes <= limit]
    for told in compared(found, limit):
        its = [
            p for p in fits if (p in found.points if told.planner == FRONTIER else p.planner == told.planner)
        ]
        assert told.points == len(its)
        assert told.limit_bytes == limit
        if not its:
            assert (told.time_s, told.memory_bytes, told.gap) == (None, None, None)
            continue
        best = min(its, key=lambda p: p.time_s)
        within = min(p.time_s for p in fits if p.memory_bytes <= best.memory_bytes)
        assert (told.time_s, told.memory_bytes) == (best.time_s, best.memory_bytes)
        assert told.gap == pytest.approx(best.time_s / within - 1)


def test_the_csvs_and_the_table_agree(found: Exploration, tmp_path: Path) -> None:
    write_comparison_csv(found, tmp_path / "comparison.csv")
    write_frontier_csv(found, tmp_path / "frontier.csv")
    with open(tmp_path / "comparison.csv", encoding="utf-8") as file:
        frontier, zero, dpos = csv.DictReader(file)
    with open(tmp_path / "frontier.csv", encoding="utf-8") as file:
        points = list(csv.DictReader(file))
    assert int(frontier["points"]) == len(points)
    assert float(frontier["time_s"]) == float(points[-1]["time_s"])
    assert float(zero["time_s"]) == min(float(p["time_s"]) for p in points if p["planner"] == "zero")
    lines = comparison_text(found).splitlines()
    assert lines[1].split()[:2] == ["frontier", "-"]
    assert f" {len(points)} " in lines[1]
    # The frontier is beaten by none, which was written down before that plan was one of its points.
    assert "faster" not in lines[1]
    assert f"+{100 * float(dpos['gap']):.1f} %" in lines[3]
    assert lines[-1] == GAP_CAPTION


def test_limits_that_were_asked_have_a_row_each(found: Exploration) -> None:
    asked = replace(found, comparison=(*(row(FRONTIER, limit_bytes=b) for b in (15 * MIB, 40 * MIB)),))
    assert limits_asked(asked) == (15 * MIB, 40 * MIB)
    assert len(comparison_text(asked).splitlines()) == 4


def test_what_is_not_within_a_limit_says_why(found: Exploration) -> None:
    *_, dpos = compared(found, 12 * MIB)
    assert dpos.notes == ("its leanest plan needs 30 MiB",)
    refused = replace(found, comparison=(row("ilp", time_s=None, notes=["no solver", "no solver"]),))
    assert compared(refused)[0].notes == ("no solver",)
