"""Published planners: their marks' names, what is claimed of them."""

from __future__ import annotations

from dataclasses import replace

from samples_app import GIB, exploration, point
from tensoropt_app.figures import frontier as drawing
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import point_card
from tensoropt_app.views.points_table import table_columns


def test_of_a_mark_is_said_what_is_proven_of_it() -> None:
    """Of strategies of the searched spaces the search proves something, of placed plans it does not."""
    for gap, words, cell in (
        (None, "nothing: its planner is a heuristic", "—"),
        (0.25, "nothing worth saying: plans searched with no more memory", "—"),
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
