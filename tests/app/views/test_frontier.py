"""The frontier as data: what fits, what is filtered, what is said."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from samples_app import GIB, exploration, long_exploration, point, space
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views.frontier import (
    FrontierData,
    address_sentences,
    axes_of,
    count_words,
    far_sentence,
    filter_sentence,
    limit_sentence,
    mark_sentence,
    price_of,
)
from tensoropt_app.views.points_table import table_columns, table_rows

from tensoropt.exploration.export import write_frontier_csv
from tensoropt.exploration.figure_rows import FigureRow, points_data
from tensoropt.report.table import point_lines

DATA = FrontierData.of(exploration())


def test_what_exceeds_the_device_is_named_and_kept() -> None:
    view = View(headroom=0.15)  # of 80 GiB: 68 GiB
    assert "2 of 8 plans need more than the 68 GiB" in limit_sentence(DATA, view)
    assert table_columns(DATA, view)["fits"].tolist() == [True] * 6 + [False] * 2


def test_limits_of_views_are_those_of_all() -> None:
    budgets = {None: 76, 24 * GIB: 24, 79 * GIB: 79, 99 * GIB: 80}
    for budget, limit in budgets.items():
        assert DATA.limit_bytes(View(budget_bytes=budget)) == limit * GIB
    assert DATA.limit_bytes(View(budget_bytes=79 * GIB, headroom=0.1)) == 72 * GIB
    assert DATA.room_bytes(View()) == 80 * GIB
    assert DATA.room_bytes(View(headroom=0.1)) == 72 * GIB
    said = limit_sentence(DATA, View(budget_bytes=79 * GIB))
    assert said == "1 of 8 plans needs more than your 79 GiB and is greyed."


def test_plans_of_planners_that_would_hide_the_frontier_are_left_out_and_counted() -> None:
    marks = (
        point(60 * GIB, 0.35, planner="zero", choice=(1, 1, 1, 1)),
        point(70 * GIB, 9.0, planner="data_parallel", choice=(2, 2, 2, 2)),
    )
    data = FrontierData.of(exploration(others=marks))
    assert data.far_marks(View()).tolist() == [False] * 9 + [True]
    assert far_sentence(data, View()).startswith("1 plan of other planners")
    assert not data.far_marks(View(log_y=True)).any()
    assert not data.far_marks(View(other=9)).any()
    assert far_sentence(DATA, View()) == ""


def test_a_budget_that_nothing_fits_says_what_would() -> None:
    said = limit_sentence(DATA, View(budget_bytes=8 * GIB))
    assert said == "No plan fits 8 GiB; the smallest needs 10.0 GiB."
    said = limit_sentence(DATA, View(target_s=0.05))
    assert said == "No plan takes at most 50 ms; the fastest takes 100 ms."


def test_a_device_that_nothing_fits_says_what_to_do() -> None:
    data = FrontierData.of(exploration([point(100 * GIB, 1.0)]))
    assert "No plan fits the 76 GiB" in limit_sentence(data, View())
    assert "Use more devices" in limit_sentence(data, View())


def test_filters_keep_what_they_name_and_say_when_nothing_is_left() -> None:
    spaces = (space((8,)), space((2, 4), micro_batches=4))
    points = [point(10 * GIB, 1.0), point(20 * GIB, 0.5, space=1)]
    data = FrontierData.of(exploration(points, spaces))
    assert data.filters() == {"mesh": ["8", "2x4"], "micro": ["1", "4"], "devices": ["8"]}
    assert data.passing(View(mesh="2x4")).tolist() == [False, True]
    assert "clear a filter" in filter_sentence(data, View(mesh="8", micro="4"))


def test_a_mark_below_the_line_is_explained() -> None:
    points = [point(10 * GIB, 1.0), point(20 * GIB, 0.5)]
    data = FrontierData.of(exploration(points, others=(point(15 * GIB, 0.7, planner="zero"),)))
    assert mark_sentence(data).startswith("ZeRO: below the line")
    above = (point(15 * GIB, 1.2, planner="zero"),)
    assert mark_sentence(FrontierData.of(exploration(points, others=above))) == ""


def test_a_planners_plan_that_none_beats_is_a_point_and_a_mark() -> None:
    """The page left it out of its count and of its fastest, the CSV has it."""
    data = FrontierData.of(exploration([point(10 * GIB, 1.0), point(20 * GIB, 0.5, planner="zero")]))
    assert data.special(View())["fastest"] == 1 == data.exploration.index(memory_bytes=100 * GIB)
    assert (data.title(1), count_words(data, View())) == ("Point 2 of 2", "2 points")
    assert data.by_planners.tolist() == [False, True]


def test_cost_is_device_hours_times_price() -> None:
    assert price_of(DATA, View()) is None
    assert price_of(DATA, View(price=3.0)) == 3.0


def test_neighbours_are_among_what_the_filters_keep() -> None:
    spaces = (space((8,)), space((2, 4)))
    points = [point((i + 1) * GIB, 10.0 - i, space=i % 2) for i in range(6)]
    data = FrontierData.of(exploration(points, spaces))
    view = View(point=2, mesh="2x4")
    assert data.neighbour(view, 1) == 3
    assert data.neighbour(view, -1) == 1
    assert data.neighbour(View(point=3, mesh="2x4"), 1) == 5


def test_a_long_frontier_stays_whole() -> None:
    data = FrontierData.of(long_exploration(20_000))
    assert np.all(np.diff(data.needs) > 0)


def test_there_is_one_count_of_points_and_they_are_counted_from_one() -> None:
    marks = [
        point((i + 1) * GIB, 2.0, planner=name, choice=(0, 0, 0, i))
        for i, name in enumerate(("zero", "zero", "frontier"))
    ]
    data = FrontierData.of(exploration(others=tuple(marks)))
    assert [data.title(row) for row in (0, 7, 8, 9)] == [
        "Point 1 of 8", "Point 8 of 8", "ZeRO 1 of 2", "ZeRO 2 of 2"
    ]  # fmt: skip
    assert count_words(data, View()) == "8 points, 3 plans of other planners"
    assert count_words(data, View(marks=False, mesh="8")) == "0 of 8 points"
    rows = table_rows(table_columns(data, View()))
    assert [row["point"] for row in rows] == [*range(1, 9), None, None, None]
    # What another run of the search found is no point of this frontier: the fastest is a point of it.
    assert data.special(View())["fastest"] == 6  # of those that fit
    assert data.special(View(budget_bytes=25 * GIB)) == {"leanest": 0, "knee": 0, "fastest": 1}


def test_the_knee_is_that_of_what_is_shown_whatever_the_budget() -> None:
    times = (9.0, 6.0, 1.0, 0.9, 0.8)
    data = FrontierData.of(exploration([point((i + 1) * GIB, t) for i, t in enumerate(times)]))
    assert data.special(View()) == {"leanest": 0, "knee": 2, "fastest": 4}
    assert data.special(View(budget_bytes=2 * GIB)) == {"leanest": 0, "knee": 2, "fastest": 1}


def test_sentences_speak_of_what_the_filters_keep() -> None:
    points = [point(10 * GIB, 1.0), point(20 * GIB, 0.5, space=1)]
    data = FrontierData.of(exploration(points, (space((8,)), space((2, 4)))))
    assert limit_sentence(data, View(budget_bytes=15 * GIB, mesh="2x4")).endswith("smallest needs 20.0 GiB.")
    assert limit_sentence(data, View(budget_bytes=15 * GIB)).startswith(
        "1 of 2 plans needs more than your 15"
    )
    assert limit_sentence(data, View()) == ""


def test_page_command_line_and_csv_say_the_same_of_every_point(tmp_path: Path) -> None:
    found = Library().load("gpt2-dgx-h100")
    data = FrontierData.of(found)
    write_frontier_csv(found, tmp_path / "frontier.csv")
    with open(tmp_path / "frontier.csv", encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    shown = [row for row in table_rows(table_columns(data, View())) if row["point"] is not None]
    told = points_data(found)
    assert len(written) == len(shown) == len(told) == int(data.on_frontier.sum())
    unit, time = data.units.memory, data.units.time
    for i, (line, row, one) in enumerate(zip(written, shown, told, strict=True)):
        assert int(line["point"]) == row["point"] == one["point"] == i + 1
        assert line["name"] == row["name"] == one["name"]
        assert int(line["memory_bytes"]) == one["memory_bytes"]
        for column, name in (("memory", "memory_bytes"), ("needs", "needs_bytes")):
            assert int(line[name]) == one[name]
            assert row[column] == float(f"{unit.of(float(line[name])):.4g}")
        assert line["fits"] == one["fits"]
        assert (
            row["time"]
            == float(f"{time.of(float(line['time_s'])):.4g}")
            == float(f"{time.of(one['time_s']):.4g}")
        )
        assert point_lines(FigureRow.of(found, i))[0].startswith(f"point {i + 1} of {len(shown)}:")
    assert data.special(View())["fastest"] == found.within(data.limit_bytes(View()))[-1]
    assert data.picked(View()) == found.index()
    assert data.special(View())["knee"] == found.knee


@pytest.mark.parametrize("text", ["999", "0", "soon"])
def test_a_point_that_does_not_exist_is_said(text: str) -> None:
    data = FrontierData.of(exploration())
    said = f"Point {text} does not exist: this frontier has 8 points."
    assert address_sentences(data, f"?point={text}") == [said]
    assert address_sentences(data, f"?point=8&other={text}") == [said]
    assert address_sentences(data, "?point=8&other=1") == []


def test_axes_that_say_the_same_twice_are_refused() -> None:
    data = FrontierData.of(exploration())
    for across in ("hours", "cost"):
        axes = axes_of(data, View(across=across, up="cost", price=2.0))
        assert (axes.x.name, axes.y.name) == (across, "time")
        assert "both say the same" in axes.refused
