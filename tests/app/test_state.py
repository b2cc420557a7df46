"""The view: into the URL and back, and how it changes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_app import GIB, exploration
from tensoropt_app import state
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

views = st.builds(
    View,
    exploration=st.text(max_size=40),
    point=st.none() | st.integers(0, 10**6),
    other=st.none() | st.integers(0, 10**6),
    budget_bytes=st.none() | st.floats(1, 1e14),
    target_s=st.none() | st.floats(1e-9, 1e6),
    headroom=st.floats(0, 0.9),
    price=st.none() | st.floats(1e-6, 1e6),
    log_x=st.booleans(),
    log_y=st.booleans(),
    lines=st.booleans(),
    band=st.booleans(),
    marks=st.booleans(),
    mesh=st.sampled_from(["", "2x4", "8"]),
    micro=st.sampled_from(["", "1", "4"]),
    devices=st.sampled_from(["", "8"]),
)


@given(views)
def test_a_link_restores_everything(view: View) -> None:
    assert View.from_query(view.to_query()) == view
    assert View.from_data(view.to_data()) == view


def test_the_url_holds_only_what_differs_from_the_defaults() -> None:
    assert View(exploration="a", point=3, log_x=True).to_query() == "x=a&point=4&logx=1"


def test_a_url_written_by_hand_may_have_units() -> None:
    view = View.from_query("?x=a&budget=24GiB&target=85ms")
    assert (view.budget_bytes, view.target_s) == (24 * GIB, 0.085)


@pytest.mark.parametrize(
    "query",
    [
        "?point=-1&other=x&budget=-3GiB&target=nan",
        "?headroom=7&price=inf&logx=maybe",
        "?x=" + "a" * 500,
        "?%ff&=&&",
    ],
)
def test_nonsense_in_the_url_is_left_out(query: str) -> None:
    assert View.from_query(query) == View()


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in fields(View)]),
        st.none() | st.integers() | st.text() | st.lists(st.integers()),
    )
)
def test_a_page_can_hold_nothing_that_breaks_the_view(data: dict[str, object]) -> None:
    View.from_query(View.from_data(data).to_query())


def test_without_a_point_the_recommended_plan_is_shown() -> None:
    found = FrontierData.of(exploration())
    recommended = found.exploration.index()
    assert state.with_point(View(), found).point == recommended
    assert state.with_point(View(point=99), found).point == recommended
    assert state.with_point(View(point=3, other=3), found).other is None


def test_an_exploration_opens_within_the_budget_it_was_made_for() -> None:
    found = exploration()
    asked = float(found.needs[1])
    made_for = FrontierData.of(replace(found, settings={**found.settings, "memory_bytes": asked}))
    assert state.opened(View(), made_for) == View(point=1, budget_bytes=asked)
    assert state.opened(View(point=0), made_for) == View(point=0)
    assert state.opened(View(target_s=1e9), made_for).budget_bytes is None
    assert state.opened(View(), FrontierData.of(found)).budget_bytes is None


def test_a_budget_selects_the_fastest_point_that_fits_and_a_target_the_leanest_that_is_fast_enough() -> None:
    found = FrontierData.of(exploration())
    view = state.set_budget(View(), found, 35 * GIB)
    assert (view.point, view.budget_bytes, view.target_s) == (2, 35 * GIB, None)
    view = state.set_target(view, found, 0.45)
    assert (view.point, view.budget_bytes, view.target_s) == (4, None, 0.45)


def test_a_budget_that_nothing_fits_leaves_the_selection() -> None:
    found = FrontierData.of(exploration())
    view = state.set_budget(View(point=5), found, GIB)
    assert (view.point, view.budget_bytes) == (5, GIB)


def test_another_exploration_keeps_how_things_are_drawn() -> None:
    view = state.open_exploration(View("a", point=3, other=4, log_x=True, mesh="8", headroom=0.2), "b")
    assert view == View("b", log_x=True, headroom=0.2)


def test_the_compared_point_is_never_the_selected_one() -> None:
    found = FrontierData.of(exploration())
    view = state.compare(View(point=2), 5)
    assert state.swapped(view) == View(point=5, other=2)
    assert state.select(view, found, 5) == View(point=5)
    assert state.compare(view, 2).other is None


def test_people_count_points_from_one() -> None:
    assert View.from_query("point=1&other=8") == View(point=0, other=7)
    assert View.from_query("point=0").point is None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?x=a&point=3&budget=24GiB&lines=1&logx=true&headroom=0.050&marks=0&across=memory&mesh=", []),
        ("?budget=lots", ["“lots” is not understood as “budget”."]),
        (
            "?headroom=7&up=height",
            ["“7” is not understood as “headroom”.", "“height” is not understood as “up”."],
        ),
        ("?colour=red", ["There is no “colour” that a link can set."]),
        ("?lines=maybe", ["“lines” is 0 or 1, not “maybe”."]),
    ],
)
def test_what_a_link_cannot_set_is_said(query: str, said: list[str]) -> None:
    assert state.not_understood(query) == said


@given(views)
def test_of_what_the_page_writes_all_is_understood(view: View) -> None:
    written = replace(view, exploration=view.exploration[:40])
    read = View.from_query(written.to_query())
    if read == written:
        assert state.not_understood(written.to_query()) == []
