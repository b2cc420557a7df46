"""Planners side by side: rows, gaps, and the table that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.planners.compare import compare, requested_planners
from tensoropt.planners.results import SimulatedPoint
from tests.planners.problems import frontier, small

TWO = ("two layers", ((2,),), (1,))


def quiet(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Finds:
    """A planner that finds (memory, time) pairs, the last of them its best."""

    name: str
    pairs: tuple[tuple[float, float], ...]

    def points(self, problem, limit, seed):
        kept = [pair for pair in self.pairs if limit is None or pair[0] <= limit]
        if not kept:
            raise InfeasibleError(f"{self.name} finds no plan")
        return [SimulatedPoint(made(self.name, *pair), ()) for pair in kept]


def made(planner: str, memory: float, time_s: float):
    (like, *_) = frontier(*TWO)
    choice = (int(memory), int(time_s))
    return like.changed(planner=planner, memory_bytes=memory, time_s=time_s, choice=choice)


def rows_of(entries, tracked, limits=(None,)):
    question = SimpleNamespace(search_s=0.5, refusal="")
    points = [made("frontier", *pair) for pair in tracked]
    rows, found = compare(question, entries, limits, points, 0, quiet)
    return rows, found


def test_a_row_for_the_frontier_and_every_planner_under_every_limit():
    limits = [1e9, 1.0]
    rows, points = compare(
        small(*TWO), requested_planners("data_parallel,optcnn"), limits, frontier(*TWO), 0, quiet
    )
    assert [(r.planner, r.limit_bytes) for r in rows] == [
        (name, limit) for limit in limits for name in ("frontier", "data_parallel", "optcnn")
    ]
    refused = [r for r in rows if r.time_s is None]
    assert [r.limit_bytes for r in refused] == [1.0, 1.0, 1.0]
    assert refused[0].notes == ("no plan fits",)
    assert all("leanest needs" in r.notes[0] for r in refused[1:])
    assert {p.planner for p in points} <= {"data_parallel", "optcnn"}


def test_a_gap_is_to_the_best_known_within_the_same_memory():
    entries = [
        Finds("lean", ((10, 12.0),)),
        Finds("fast", ((30, 4.0),)),
        Finds("slow", ((25, 9.0), (40, 8.0))),
    ]
    rows, _ = rows_of(entries, [(10, 10.0), (20, 8.0), (35, 5.0)])
    gaps = {row.planner: row.gap for row in rows}
    assert gaps == pytest.approx({"frontier": 0.0, "lean": 0.2, "fast": 0.0, "slow": 1.0})


def test_the_frontiers_row_is_of_the_points_that_are_shown():
    """What planners find comes into the frontier: a row of the search alone would say other counts and
    figures than the plot above it."""
    entries = [Finds("lean", ((5, 12.0),)), Finds("fast", ((30, 4.0),))]
    (row, *_), _ = rows_of(entries, [(10, 10.0), (20, 8.0), (35, 5.0)])
    assert (row.memory_bytes, row.time_s, row.points, row.gap) == (30, 4.0, 4, 0.0)
    assert row.notes == ("its fastest plan is from fast; the search's own fastest takes 8 s",)


def test_one_time_has_one_gap_and_none_is_below_zero():
    """Rows of what beats the other points, and the frontier's, with which they are merged, agree."""
    for tracked, time_s in (((50, 20.0), 8.37), ((50, 8.0), 8.37)):
        rows, _ = rows_of([Finds("dpos", ((50, time_s),)), Finds("m_etf", ((50, time_s),))], [tracked])
        by_time: dict[float, set[float]] = {}
        for row in rows:
            assert row.gap >= 0
            by_time.setdefault(row.time_s, set()).add(row.gap)
        assert all(len(gaps) == 1 for gaps in by_time.values())
        assert min(row.gap for row in rows) == 0


def test_a_plan_leaner_than_the_frontier_has_a_gap_too():
    rows, _ = rows_of([Finds("lean", ((5, 30.0),))], [(10, 10.0)])
    assert [row.gap for row in rows] == [0.0, 0.0]


def test_what_only_rounding_tells_apart_is_no_gap():
    rows, _ = rows_of([Finds("m_etf", ((50, 8.0 * (1 - 1e-15)),))], [(50, 8.0)])
    assert [(row.gap, row.notes) for row in rows] == [(0.0, ()), (0.0, ())]


def test_a_limit_counts_what_fits():
    rows, _ = rows_of([Finds("fast", ((30, 4.0),))], [(10, 10.0), (20, 8.0), (35, 5.0)], [20, 40])
    assert [(r.planner, r.time_s, r.points) for r in rows] == [
        ("frontier", 8.0, 2), ("fast", None, 0), ("frontier", 4.0, 3), ("fast", 4.0, 1),
    ]  # fmt: skip
