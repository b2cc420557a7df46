"""Planners side by side: a row for each under each limit."""

from __future__ import annotations

from tensoropt.planners.compare import compare, requested_planners
from tests.planners.problems import small

TWO = ("two layers", ((2,),), (1,))


def quiet(*_: object) -> None:
    pass


def test_a_row_for_the_frontier_and_every_planner_under_every_limit():
    limits = [1e9, 1.0]
    rows, points = compare(small(*TWO), requested_planners("data_parallel,optcnn"), limits, 0, quiet)
    assert [(r["planner"], r["limit_bytes"]) for r in rows] == [
        (name, limit) for limit in limits for name in ("frontier", "data_parallel", "optcnn")
    ]
    assert not any("leanest plan needs" in note for r in rows[:3] for note in r["notes"])
    assert all("leanest plan needs" in r["notes"][0] for r in rows[4:])
    assert {p.planner for p in points} <= {"data_parallel", "optcnn"}
