"""A point in words, and its prediction beside what was measured: nothing known, run for real, on fake ranks,
failed."""

from __future__ import annotations

from typing import Any

import pytest
from samples_app import GIB, exploration, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import (
    NOT_YET,
    assumptions,
    dominant_words,
    of_point,
    point_card,
    verified_lines,
    verified_words,
)

from tensoropt.exploration.verified import Verified
from tensoropt.plan.keys import plan_key

DATA = FrontierData.of(exploration())
LARGE = FrontierData.of(exploration([point(90 * GIB, 0.1)]))


@pytest.mark.parametrize(("data", "row", "budget", "headroom", "mark", "verdict"), [
    (DATA, 2, None, 0.05, "fits", "Fits one H100-80GB of 80 GiB (38 %)."),
    (DATA, 2, 200, None, "fits", "Fits one H100-80GB of 80 GiB (38 %)."),  # a budget above the card
    (DATA, 7, None, None, "tight", "Just fits one H100-80GB of 80 GiB (100 %)."),
    (DATA, 7, None, 0.1, "over", "Does not fit the budget of 72 GiB: needs 8.00 GiB more."),
    (DATA, 2, 25, None, "over", "Does not fit the budget of 25 GiB: needs 5.00 GiB more."),
    (LARGE, 0, 99, 0.05, "over", "Does not fit one H100-80GB of 80 GiB: needs 10.0 GiB more."),
    # The error of predictions decides how well a plan fits.
    (DATA, 2, 30, 0.05, "tight", "Just fits the budget of 30 GiB (100 %)."),
    (DATA, 2, 31, 0.05, "tight", "Just fits the budget of 31 GiB (97 %)."),
    (DATA, 2, 34, 0.05, "fits", "Fits the budget of 34 GiB (88 %)."),
    (DATA, 2, 79, 0.05, "fits", "Fits the budget of 79 GiB (38 %)."),
])  # fmt: skip
def test_the_card_says_whether_it_fits(data, row, budget, headroom, mark, verdict):
    limits = {"budget_bytes": budget and budget * GIB} | ({} if headroom is None else {"headroom": headroom})
    card = point_card(data, View(**limits), row)
    assert (card.mark, card.verdict) == (mark, verdict)


def test_the_card_says_memory_time_and_its_number():
    card = point_card(DATA, View(), 2)
    assert (card.memory, card.time, card.title) == ("30.0 GiB", "600 ms", "Point 3 of 8")


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
    assert "by the sums of costs that the search compares (15 GiB and 500 ms for this one)" in said
    assert "and not proven" in said


def test_what_dominates_is_named():
    lean = exploration([point(GIB, 1.0, memory=(0.1 * GIB, 0, 0, 0.9 * GIB, 0), terms={})])
    assert "kept activations (90 %)" in dominant_words(lean, 0)
    waiting = exploration([point(GIB, 1.0, compute_s=0.2, communication_s=0.8, exposed_s=0.8)])
    assert "communication (80 %)" in dominant_words(waiting, 0)


UNLIKE = [point.changed(choice=(i % 3, i // 3, 0, 1)) for i, point in enumerate(exploration().points)]
VERIFIED = FrontierData.of(exploration(UNLIKE))


def ran(**changes: Any) -> Verified:
    """Of point 2: 30 GiB and 600 ms predicted."""
    fields: dict[str, Any] = {
        "key": plan_key(VERIFIED.exploration.plan(2)), "mesh": "2x4", "micro_batches": 1,
        "memory_predicted_bytes": 30 * GIB, "time_predicted_s": VERIFIED.time[2],
        "memory_tracked_bytes": 33 * GIB, "time_measured_s": 0.54,
        "loss_difference": 1e-7, "gradient_difference": 1e-6, "ok": True, "checked_on": "8 ranks",
    }  # fmt: skip
    return Verified(**{**fields, **changes})


BOTH = "33.0 GiB tracked (30.0 GiB predicted, +10 %); 540 ms measured (600 ms predicted, −10 %); "


@pytest.mark.parametrize(("changes", "words"), [
    ({}, f"{BOTH}numbers match the unsplit model"),
    *(({"time_measured_s": 0.6 * factor}, words) for factor, words in (
        (1.0, "±0 %)"), (1.3, "+30 %, off)"), (4.33, "+333 %, far off)"), (0.2, "−80 %, far off)"),
    )),
    ({"time_measured_s": None, "loss_difference": None}, "+10 %); collectives as predicted"),  # fake ranks
    ({"ok": False}, "numbers do NOT match"),
    ({"error": "a rank died"}, "did not run: a rank died"),
])  # fmt: skip
def test_both_figures_are_shown_with_their_difference_and_failures_are_not_hidden(changes, words):
    assert words in verified_words(ran(**changes), VERIFIED)


def test_the_assumptions_name_the_points_that_ran():
    assert verified_lines(VERIFIED, ()) == (NOT_YET,)
    said = [f.words for f in assumptions(VERIFIED, View(), (ran(),)) if f.name == "predicted / measured"]
    assert len(said) == 1
    assert said[0].startswith("Point 3 of 8: 33.0 GiB tracked")
    damaged = assumptions(VERIFIED, View(), (), "verified.json is damaged")
    assert "verified.json is damaged" in [f.words for f in damaged]


def test_the_card_of_that_point_has_it_and_no_other():
    labels = [{f.name for f in point_card(VERIFIED, View(), row, (ran(),)).facts} for row in (2, 3)]
    assert ["verified" in one for one in labels] == [True, False]
    assert of_point(VERIFIED, 3, (ran(time_measured_s=9.0),)) is None
