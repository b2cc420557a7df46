"""A point in words."""

from __future__ import annotations

import pytest
from samples_app import GIB, exploration, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import dominant_words, point_card

DATA = FrontierData.of(exploration())


def test_the_card_says_memory_time_and_whether_it_fits():
    card = point_card(DATA, View(headroom=0.05), 2)
    assert (card.memory, card.time, card.mark) == ("30.0 GiB", "600 ms", "fits")
    assert card.verdict == "Fits one H100-80GB of 80 GiB (38 %)."
    tight = point_card(DATA, View(), 7)
    assert (tight.mark, tight.verdict) == ("tight", "Just fits one H100-80GB of 80 GiB (100 %).")
    over = point_card(DATA, View(headroom=0.1), 7)
    assert over.mark == "over"
    assert over.verdict == ("Does not fit the budget of 72 GiB: needs 8.00 GiB more.")


def test_what_is_over_a_budget_does_not_fit():
    card = point_card(DATA, View(budget_bytes=25 * GIB), 2)
    assert card.mark == "over"
    assert card.verdict == "Does not fit the budget of 25 GiB: needs 5.00 GiB more."
    assert card.title == "Point 3 of 8"


@pytest.mark.parametrize(
    ("budget", "fits"), [(30, "Just fits"), (31, "Just fits"), (34, "Fits"), (75, "Fits"), (79, "Fits")]
)
def test_what_fits_a_budget_says_its_share_of_it(budget, fits):
    """The error of predictions decides how well a plan fits."""
    card = point_card(DATA, View(budget_bytes=budget * GIB, headroom=0.05), 2)
    assert card.mark != "over"
    assert card.verdict == f"{fits} the budget of {budget} GiB ({round(3000 / budget)} %)."


def test_a_budget_above_the_card_is_answered_for_the_card():
    card = point_card(DATA, View(budget_bytes=200 * GIB), 2)
    assert card.verdict == "Fits one H100-80GB of 80 GiB (38 %)."
    data = FrontierData.of(exploration([point(90 * GIB, 0.1)]))
    card = point_card(data, View(budget_bytes=99 * GIB, headroom=0.05), 0)
    assert card.mark == "over"
    assert card.verdict == "Does not fit one H100-80GB of 80 GiB: needs 10.0 GiB more."


def test_idle_devices_are_what_most_of_a_step_is_where_they_are():
    idle = exploration([point(GIB, 1.0, compute_s=0.3, communication_s=0.1, exposed_s=0.1, idle_s=0.6)])
    assert "the device mostly waits for others (60 %)" in dominant_words(idle, 0)
    assert "time is mostly compute (67 %)" in dominant_words(exploration(), 0)


def test_what_is_proven_is_said_of_the_sums_and_not_of_the_simulated_figures():
    """The sums of the search may be half of what the simulator finds."""
    one = point(30 * GIB, 0.6, additive_memory_bytes=15 * GIB, additive_time_s=0.5, exact=False, gap=1e-6)
    data = FrontierData.of(exploration([one]))
    said = {f.name: f.words for f in point_card(data, View(), 0).facts}["proven"]
    assert "it takes at most 0.001 % longer than any searched plan with no more memory" in said
    assert "by the search's sums (15.0 GiB and 500 ms for this one)" in said
    assert "and not proven" in said


def test_what_dominates_is_named():
    lean = exploration([point(GIB, 1.0, memory=(0.1 * GIB, 0, 0, 0.9 * GIB, 0), terms={})])
    assert "kept activations (90 %)" in dominant_words(lean, 0)
    waiting = exploration([point(GIB, 1.0, compute_s=0.2, communication_s=0.8, exposed_s=0.8)])
    assert "communication (80 %)" in dominant_words(waiting, 0)
