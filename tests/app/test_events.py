"""Controls: what a person does, and what merely echoes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_app import GIB, exploration, point, space
from tensoropt_app import events
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

DATA = FrontierData.of(exploration())
VIEW = View(exploration="x", point=4)


def test_the_slider_selects_the_fastest_point_within_its_budget() -> None:
    view = events.on_budget(VIEW, DATA, 35.0)
    assert (view.point, view.budget_bytes) == (2, 35 * GIB)


def test_the_right_end_of_a_slider_is_no_limit() -> None:
    low, high, step = events.budget_range(DATA, View())
    assert low < 10 < 80 < high - step
    limited = events.on_budget(VIEW, DATA, 35.0)
    assert events.on_budget(limited, DATA, high).budget_bytes is None
    assert events.on_budget(VIEW, DATA, high) == VIEW


@given(st.floats(1, 200))
def test_a_slider_that_shows_the_state_changes_nothing(gib: float) -> None:
    """Otherwise the echo of a typed budget would move it."""
    view = events.on_budget_text(VIEW, DATA, f"{gib} GiB")
    low, high, _ = events.budget_range(DATA, View())
    assert events.on_budget(view, DATA, min(max(gib, low), high)) == view


@given(st.floats(1, 100), st.floats(0.001, 100))
def test_a_slider_moves_from_its_left_end(least: float, room: float) -> None:
    """Its least value is rounded and may lie a hair below its end, which is no typed limit."""
    limits = low, _, step = events._slider_range(least, least + room)
    at_the_end = events._slid(low, limits, GIB, None)
    moved = events._after_slide(
        VIEW, DATA, low + step, limits, GIB, at_the_end, lambda view, _, new: replace(view, budget_bytes=new)
    )
    assert moved.budget_bytes is not None
    assert moved.budget_bytes != at_the_end


@pytest.mark.parametrize(
    ("text", "point"), [("35", 2), ("35 GiB", 2), ("35840MiB", 2), ("", 4), ("no limit", 4)]
)
def test_a_bare_number_is_in_the_unit_shown(text: str, point: int) -> None:
    assert events.on_budget_text(VIEW, DATA, text).point == point


@pytest.mark.parametrize("text", ["-3", "24 parsecs", "inf", "nan", "GiB", "1e999"])
def test_what_is_not_a_limit_is_said(text: str) -> None:
    with pytest.raises(events.NotUnderstoodError, match=r"GiB|above 0"):
        events.on_budget_text(VIEW, DATA, text)


def test_arrows_walk_along_the_frontier_and_stop_at_its_ends() -> None:
    assert events.on_key(VIEW, DATA, {"step": 1}).point == 5
    assert events.on_key(VIEW, DATA, {"step": -10}).point == 0
    assert events.on_key(VIEW, DATA, {"word": "fastest"}).point == 6
    assert events.on_key(VIEW, DATA, {"word": "compare"}).other == 4


def test_a_click_selects_or_compares() -> None:
    click = {"points": [{"curveNumber": 2, "customdata": [6, "2x4", 1]}]}
    assert events.on_click(VIEW, DATA, click).point == 6
    assert events.on_click(VIEW, DATA, click, second=True).other == 6
    assert events.on_row(VIEW, DATA, {"rowId": "6"}).point == 6


def test_limits_and_names_honour_the_filters_and_a_budget() -> None:
    spaces = (space((8,)), space((2, 4)))
    data = FrontierData.of(
        exploration([point((i + 1) * GIB, 10.0 - i, space=i % 2) for i in range(6)], spaces)
    )
    view = View(exploration="x", point=0, mesh="8")  # rows 0, 2 and 4
    assert events.on_word(view, data, "fastest").point == 4
    assert events.on_budget_text(view, data, "4.5 GiB").point == 2
    assert events.on_target_text(view, data, "7.5").point == 4
    within = events.on_budget_text(view, data, "3.5 GiB")
    assert events.on_word(within, data, "fastest").point == 2
    assert events.on_word(within, data, "knee").point in (0, 2)
    # The fastest within a budget that all are in is the fastest.
    assert events.on_budget_text(view, data, "100 GiB").point == events.on_word(view, data, "fastest").point
    # A filter that leaves out the selected point selects another, a limit again what is within it.
    other = events.EVENTS["filter-mesh"](within, data, "2x4")
    assert (other.point, data.mesh[other.point]) == (1, "2x4")
    free = events.EVENTS["filter-mesh"](replace(view, point=4), data, "2x4")
    assert data.mesh[free.point] == "2x4"


def test_nothing_within_the_limits_leaves_the_selection() -> None:
    view = View(exploration="x", point=4, budget_bytes=5 * GIB)
    assert events.on_word(view, DATA, "fastest") == view


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["points", "customdata", "rowId", "row", "step", "word"]), inner, max_size=3
    ),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.parametrize("control", sorted(events.EVENTS))
@given(value=anything)
def test_no_value_of_a_control_breaks_the_view(control: str, value: object) -> None:
    """Pages may send anything; a control either understands it or leaves a view that is still one."""
    try:
        view = events.EVENTS[control](VIEW, DATA, value)
    except events.NotUnderstoodError:
        return
    assert View.from_data(view.to_data()) == view
    assert 0 <= view.point < len(DATA)


@pytest.mark.parametrize(
    ("event", "typed"),
    [
        (events.on_share, "-5"), (events.on_share, "91"), (events.on_share, "five"), (events.on_price, "-1"),
        (events.on_price, "0"), (events.on_price, "1e9"), (events.on_price, "nan"), (events.on_price, True),
        (events.on_price, "٣"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_said_and_not_corrected(event: Any, typed: Any) -> None:
    with pytest.raises(events.NotUnderstoodError):
        event(VIEW, DATA, typed)


def test_numbers_are_taken_as_they_are_typed() -> None:
    assert events.on_price(VIEW, DATA, "1e3").price == 1000.0
    assert events.on_price(VIEW, DATA, " 2.5 ").price == 2.5
    assert events.on_price(replace(VIEW, price=3.0), DATA, "").price is None
    assert events.on_share(VIEW, DATA, "12.5").headroom == 0.125
    assert events.on_share(VIEW, DATA, "5 %").headroom == 0.05


@pytest.mark.parametrize(
    ("control", "before", "value", "after"),
    [
        ("axis-x", ("memory", "cost"), "cost", ("cost", "time")),
        ("axis-x", ("memory", "cost"), "hours", ("hours", "time")),
        ("axis-y", ("hours", "time"), "cost", ("memory", "cost")),
        ("axis-y", ("hours", "time"), "mfu", ("hours", "mfu")),
    ],
)
def test_both_axes_never_say_the_same(
    control: str, before: tuple[str, str], value: str, after: tuple[str, str]
) -> None:
    view = events.EVENTS[control](View(across=before[0], up=before[1]), DATA, value)
    assert (view.across, view.up) == after
