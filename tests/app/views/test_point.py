"""A point in words, and its prediction beside what was measured: nothing known, run for real, on fake ranks,
failed."""

from __future__ import annotations

import pytest
from samples_app import GIB, exploration, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import (
    dominant_words,
    point_card,
)

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
    assert "by the search's sums (15 GiB and 500 ms for this one)" in said
    assert "and not proven" in said


def test_what_dominates_is_named():
    lean = exploration([point(GIB, 1.0, memory=(0.1 * GIB, 0, 0, 0.9 * GIB, 0), terms={})])
    assert "kept activations (90 %)" in dominant_words(lean, 0)
    waiting = exploration([point(GIB, 1.0, compute_s=0.2, communication_s=0.8, exposed_s=0.8)])
    assert "communication (80 %)" in dominant_words(waiting, 0)
