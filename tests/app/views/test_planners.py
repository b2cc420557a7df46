"""Published planners: their table, their marks' names, what is claimed of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples_app import GIB, exploration, point, space
from tensoropt_app.figures import frontier as drawing
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.planners import PlannerRow, planner_rows
from tensoropt_app.views.point import point_card
from tensoropt_app.views.points_table import table_columns
from tensoropt_app.views.units import percent, signed, unit_for

from tensoropt.exploration.exploration import Exploration

ROW = {
    "planner": "zero", "limit_bytes": None, "memory_bytes": 12 * GIB, "time_s": 0.9, "points": 2,
    "search_s": 0.08, "gap": 0.25, "notes": [],
}  # fmt: skip


def rows_of(found: Exploration, view: View) -> tuple[PlannerRow, ...]:
    return planner_rows(FrontierData.of(found), view)


def test_what_each_found_or_why_it_refused() -> None:
    marks = (
        point(12 * GIB, 0.9, planner="zero", choice=(1, 1, 3, 1)),
        point(5 * GIB, 2.0, planner="zero", choice=(1, 5, 3, 1)),
    )
    refused = {**ROW, "planner": "m_etf", "memory_bytes": None, "time_s": None, "points": 0, "gap": None,
               "notes": ["needs one device", "or two"]}  # fmt: skip
    found = replace(exploration(), others=marks, comparison=(ROW, refused))
    first, second = rows_of(found, View())
    best = min(p.time_s for p in found.points if p.memory_bytes <= 12 * GIB)
    assert (first.title, first.memory, first.time) == ("ZeRO", "12.0 GiB", "900 ms")
    assert (first.points, first.gap) == ("2", signed(0.9 / best - 1, percent(abs(0.9 / best - 1))))
    assert (second.title, second.memory, second.gap) == ("m-ETF", "—", "—")
    assert second.remark == "needs one device; or two"


@pytest.mark.parametrize("budget", [None, 4 * GIB, 16 * GIB, 1.0])
def test_counts_and_figures_are_those_of_the_points_that_are_shown(budget: float | None) -> None:
    """Whatever was written down when the planners were asked, and within the budget of now."""
    base = exploration()
    marks = (
        point(12 * GIB, 0.9, planner="zero", choice=(1, 1, 3, 1)),
        point(5 * GIB, 2.0, planner="zero", choice=(1, 5, 3, 1)),
    )
    own = base.points[-1].changed(planner="zero")
    stale = {**ROW, "planner": "frontier", "points": 180, "memory_bytes": 1.0, "time_s": 99.0,
             "notes": ["zero is faster within this memory: 1 ms"]}  # fmt: skip
    found = replace(base, points=(*base.points[:-1], own), others=(*marks, own), comparison=(stale, ROW))
    data = FrontierData.of(found)
    frontier, zero = planner_rows(data, View(budget_bytes=budget))
    limit = float("inf") if budget is None else budget
    rows = [i for i in range(len(data)) if data.memory[i] <= limit]
    for row, mine in (
        (frontier, [i for i in rows if data.on_frontier[i]]),
        (zero, [i for i in rows if data.planner[i] == "zero"]),
    ):
        assert row.points == str(len(mine))
        assert row.limit == ("none" if budget is None else unit_for(budget).text(budget))
        if mine:
            fastest = min(mine, key=lambda i: data.time[i])
            assert row.time == data.units.time.text(data.time[fastest])
            assert row.memory == data.units.memory.text(data.memory[fastest])
        else:
            assert (row.time, row.memory, row.gap) == ("—", "—", "—")
    assert "faster" not in frontier.remark
    assert ("its leanest plan needs" in zero.remark) == (zero.points == "0")


def test_the_table_follows_the_filters() -> None:
    """A mesh's points are counted alone."""
    mine = exploration([point(GIB, 1.0), point(2 * GIB, 0.5, space=1)], (space((8,)), space((2, 4))))
    found = replace(mine, comparison=({**ROW, "planner": "frontier"},))
    data = FrontierData.of(found)
    assert [row.points for row in planner_rows(data, View())] == ["2"]
    (only,) = planner_rows(data, View(mesh=data.mesh[0]))
    assert (only.points, only.time) == ("1", data.units.time.text(1.0))


def test_of_a_mark_is_said_what_is_proven_of_it() -> None:
    """Of strategies of the searched spaces the search proves something, of placed plans it does not."""
    for gap, words, cell in (
        (None, "nothing: its planner is a heuristic", "—"),
        (0.25, "it takes at most 25 % longer than any plan searched with no more memory", "≤ 25 %"),
    ):
        mark = point(12 * GIB, 0.9, planner="zero", exact=False, gap=gap)
        data = FrontierData.of(replace(exploration(), others=(mark,)))
        facts = {f.name: f.words for f in point_card(data, View(), 8).facts}
        assert facts["planner"] == "ZeRO"
        assert words in facts["proven"]
        assert table_columns(data, View())["gap"][8] == cell


def test_marks_at_one_place_share_a_name_and_each_planner_is_named_once() -> None:
    marks = (
        point(12 * GIB, 0.9, planner="zero"),
        point(20 * GIB, 0.85, planner="megatron"),
        point(60 * GIB, 0.31, planner="megatron"),
        point(60.1 * GIB, 0.311, planner="data_parallel"),
    )
    data = FrontierData.of(replace(exploration(), others=marks))
    trace = drawing.frontier_figure(data, View(), "light")["data"][drawing.MARKS]
    assert trace["text"] == ["ZeRO", "", "Megatron, data parallel", ""]
    assert trace["textposition"][0] == "top right"
    assert trace["textposition"][2].startswith("top")
    assert [custom[2] for custom in trace["customdata"]] == [
        "ZeRO 1", "Megatron 1", "Megatron 2", "data parallel 1"
    ]  # fmt: skip
