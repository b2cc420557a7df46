"""Amounts, currencies and axes: from the page and the URL into the view, nonsense refused."""

from __future__ import annotations

from typing import Any

import pytest
from samples_app import exploration
from tensoropt_app import events
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData

DATA = FrontierData.of(exploration())
VIEW = View(exploration="x", point=4)


@pytest.mark.parametrize(
    ("control", "value", "field", "kept"),
    [
        ("amount", " 50,000 samples ", "amount", "50,000 samples"),
        ("amount", "", "amount", ""),
        ("amount", "1.5T tokens", "amount", "1.5T tokens"),
        ("currency", "EUR", "currency", "EUR"),
        ("axis-y", "mfu", "up", "mfu"),
        ("axis-x", "cost", "across", "cost"),
        ("axis-x", "mfu", "across", "memory"),  # no choice of that axis
        ("axis-y", None, "up", "time"),
    ],
)
def test_what_is_said_is_kept_and_survives_the_url(control: str, value: Any, field: str, kept: Any) -> None:
    view = events.EVENTS[control](VIEW, DATA, value)
    assert getattr(view, field) == kept
    assert View.from_query(view.to_query()) == view
    assert View.from_data(view.to_data()) == view
    assert events.EVENTS[control](view, DATA, value) == view


@pytest.mark.parametrize(
    ("control", "value", "why"),
    [
        ("amount", "a lot", "write for example 1e9 tokens"),
        ("amount", "0 tokens", "more than 0"),
        ("amount", "1 tokens" * 200, "at most 600"),
        ("currency", "x" * 13, "at most 12"),
    ],
)
def test_nonsense_is_refused_with_the_rule(control: str, value: str, why: str) -> None:
    with pytest.raises(events.NotUnderstoodError, match=why):
        events.EVENTS[control](VIEW, DATA, value)


@pytest.mark.parametrize("query", ["up=size", "across=time", "amount=lots", "currency=%00"])
def test_a_url_written_by_hand_leaves_out_nonsense(query: str) -> None:
    assert View.from_query(query) == View()
