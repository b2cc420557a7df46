"""The view: into the URL and back, and what of an address is not understood."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_app import GIB
from tensoropt_app import state
from tensoropt_app.state import View

views = st.builds(
    View,
    exploration=st.text(max_size=40),
    point=st.none() | st.integers(0, 10**6),
    budget_bytes=st.none() | st.floats(1, 1e14),
    time_s=st.none() | st.floats(1e-9, 1e6),
    headroom=st.floats(0, 0.9),
    price=st.none() | st.floats(1e-6, 1e6),
    amount=st.sampled_from(["", "1e9 tokens", "50,000 samples"]),
    beside=st.lists(st.sampled_from(["a", "opened-b", "job-c"]), unique=True).map(tuple),
    whole=st.booleans(),
)


@given(views)
def test_a_link_restores_everything(view):
    assert View.from_query(view.to_query()) == view


def test_the_url_holds_only_what_differs_from_the_defaults():
    assert View(exploration="a", point=3, whole=True).to_query() == "x=a&point=4&whole=1"
    assert View("a", beside=("b", "c")).link() == "/result?x=a&beside=b,c"
    link = View("a", point=3).link("details", budget_bytes=2.0**30)
    assert link == "/details?x=a&point=4&budget=1073741824"


def test_a_url_written_by_hand_may_have_units():
    view = View.from_query("?x=a&budget=24GiB&time=85ms")
    assert (view.budget_bytes, view.time_s) == (24 * GIB, 0.085)


@pytest.mark.parametrize("query", [
    "?point=-1&budget=-3GiB&time=nan",
    "?point=0",
    "?headroom=7&price=inf&whole=maybe",
    "?x=" + "a" * 500,
    "?%ff&=&&",
    "?amount=lots&beside=",
])  # fmt: skip
def test_nonsense_in_the_url_is_left_out(query):
    assert View.from_query(query) == View()


@pytest.mark.parametrize(("query", "said"), [
    ("?x=a&point=3&budget=24GiB&whole=0&headroom=0.050&from=b&devices=2", []),
    ("?budget=lots", ["“lots” is not understood as “budget”."]),
    ("?headroom=7&time=soon",
     ["“7” is not understood as “headroom”.", "“soon” is not understood as “time”."]),
    ("?colour=red", ["There is no “colour” that a link can set."]),
    ("?whole=maybe", ["“whole” is 0 or 1, not “maybe”."]),
])  # fmt: skip
def test_what_a_link_cannot_set_is_said(query, said):
    assert state.not_understood(query) == said


@given(views)
def test_of_what_the_page_writes_all_is_understood(view):
    written = replace(view, exploration=view.exploration[:40])
    if View.from_query(written.to_query()) == written:
        assert state.not_understood(written.to_query()) == []


@pytest.mark.parametrize(("amount", "why"), [
    ("a lot", "write 1e9 tokens"),
    ("0 tokens", "more than 0"),
    ("1 tokens" * 200, "at most 600"),
    ("1.5T tokens", ""),
    ("", ""),
])  # fmt: skip
def test_a_training_that_is_none_is_refused_with_the_rule(amount, why):
    said = state.said_fault(amount)
    assert why in said
    assert bool(said) == bool(why)
