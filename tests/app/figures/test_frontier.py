"""The frontier's plot as a dictionary."""

from __future__ import annotations

from typing import Any

import pytest
from samples_app import GIB, exploration, long_exploration, point
from tensoropt_app.figures import frontier as drawing
from tensoropt_app.figures.palette import GRAPH_CONFIG
from tensoropt_app.library import READY_MADE, Library
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

from tensoropt.exploration.time_range import TimeRange

HANDS = (
    point(45 * GIB, 0.55, planner="data_parallel", choice=(2, 2, 2, 2)),
    point(33 * GIB, 9.0, planner="zero", choice=(1, 1, 1, 1)),
)
DATA = FrontierData.of(exploration(others=HANDS))


def figure(view: View, data: FrontierData = DATA, *, narrow: bool = False) -> Any:
    return drawing.frontier_figure(data, view, data.answer(view), "light", narrow=narrow)


def test_points_are_what_they_need_against_their_time():
    traces = figure(View(point=3, whole=True))["data"]
    dots = traces[drawing.DOTS]
    assert dots["x"] == pytest.approx([10 * (i + 1) for i in range(8)])
    assert dots["y"] == pytest.approx([800 - 100 * i for i in range(8)])
    assert [row for row, _ in dots["customdata"]] == list(range(8))
    assert "Point 4 of 8" in dots["customdata"][3][1]
    assert (traces[drawing.SELECTED]["x"], traces[drawing.SELECTED]["y"]) == ([40], [pytest.approx(500)])


def test_what_does_not_fit_is_grey_and_never_dropped():
    colours = figure(View(budget_bytes=45 * GIB, whole=True))["data"][drawing.DOTS]["marker"]["color"]
    assert (len(set(colours[:4])), len(set(colours[4:]))) == (1, 1)
    assert colours[0] != colours[-1]


def test_a_plan_made_by_hand_that_lies_far_above_is_named_at_the_edge():
    found = figure(View(whole=True))
    assert found["data"][drawing.BASELINES]["x"] == [45]
    edge = [a["text"] for a in found["layout"]["annotations"] if a["text"].startswith("▲")]
    assert len(edge) == 1
    assert edge[0].endswith(": 9.0 s")


def test_a_time_with_a_range_has_a_bar_through_its_point(monkeypatch):
    assert figure(View(point=4))["data"][drawing.SELECTED]["error_y"] == {"visible": False}
    time_s = DATA.time[4]
    ranged = TimeRange(0.9 * time_s, 1.2 * time_s, 0.8, "w")
    monkeypatch.setattr(drawing, "range_of", lambda *_: ranged)
    bar = figure(View(point=4))["data"][drawing.SELECTED]["error_y"]
    assert bar["array"] == pytest.approx([0.2 * time_s * 1e3])
    assert bar["arrayminus"] == pytest.approx([0.1 * time_s * 1e3])


def test_the_budget_is_a_line_with_its_words_over_it():
    frame = figure(View(budget_bytes=24 * GIB))["layout"]
    label = frame["annotations"][drawing.BUDGET]
    assert (label["x"], label["xref"], label["text"]) == (24, "x", "24 GiB")
    assert frame["shapes"][drawing.VEIL]["x0"] == frame["shapes"][drawing.GRIP]["xanchor"] == 24
    assert frame["shapes"][drawing.DEVICE]["x0"] == 80
    assert frame["meta"] == {"unit": "GiB", "most": 80}


def test_a_budget_that_is_beyond_the_plot_is_at_its_edge():
    lean = FrontierData.of(exploration([point(2 * GIB, 1.0), point(3 * GIB, 0.5)]))
    label = figure(View(), lean)["layout"]["annotations"][drawing.BUDGET]
    assert (label["xref"], label["x"], label["text"]) == ("paper", 1, "76 GiB of 80 GiB ▸")


def test_few_of_many_points_have_a_dot_and_the_line_has_its_shape():
    traces = figure(View(budget_bytes=40 * GIB), FrontierData.of(long_exploration(20_000)))["data"]
    assert len(traces[drawing.DOTS]["x"]) <= 30
    assert 100 < len(traces[drawing.LINE]["x"]) <= 403


def boxes(found: Any, wide: float, high: float) -> list[tuple[float, float, float, float]]:
    """(left, right, top, bottom) of the plans' names, in pixels, as the figure places them."""
    (low_x, high_x), (low_y, high_y) = (found["layout"][axis]["range"] for axis in ("xaxis", "yaxis"))
    placed = []
    for name in found["layout"]["annotations"]:
        if not name.get("showarrow"):
            continue
        x = (name["x"] - low_x) / (high_x - low_x) * wide + name["ax"]
        y = (high_y - name["y"]) / (high_y - low_y) * high + name["ay"]
        half = 3.5 * len(name["text"])
        placed.append((x - half, x + half, y - 9, y + 9))
    return placed


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", sorted(folder.name for folder in READY_MADE.iterdir()))
def test_names_of_plans_do_not_cover_each_other(name, narrow):
    data = FrontierData.of(Library().load(name))
    for row in (None, *data.line[:: max(len(data.line) // 12, 1)].tolist()):
        found = boxes(figure(View(name, point=row), data, narrow=narrow), 250 if narrow else 560, 270)
        assert found or row is not None
        for number, (left, right, top, bottom) in enumerate(found):
            for a, b, c, d in found[number + 1 :]:
                assert b <= left or right <= a or d <= top or bottom <= c


def test_several_frontiers_are_told_apart():
    other = FrontierData.of(exploration([point(10 * GIB, 1.0)]))
    traces = drawing.compared_figure([("a", DATA), ("b", other)], "dark", per_sample=False)["data"]
    assert [trace["name"] for trace in traces] == ["a", "b"]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}) == 2
    assert traces[0]["x"] == pytest.approx([10 * (i + 1) for i in range(8)])
    assert traces[0]["y"] == pytest.approx([0.8 - 0.1 * i for i in range(8)])


def test_no_plot_offers_to_upload_itself():
    assert "sendChartToCloud" in GRAPH_CONFIG["modeBarButtonsToRemove"]
    assert GRAPH_CONFIG["displaylogo"] is False
