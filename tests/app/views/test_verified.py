"""Predicted beside measured: nothing known, run for real, on fake ranks, failed."""

from __future__ import annotations

from typing import Any

from samples_app import GIB, exploration
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.point import (
    NOT_YET,
    assumptions,
    of_point,
    point_card,
    verified_lines,
    verified_words,
)

from tensoropt.exploration.verified import Verified
from tensoropt.plan.keys import plan_key

POINTS = [point.changed(choice=(i % 3, i // 3, 0, 1)) for i, point in enumerate(exploration().points)]
DATA = FrontierData.of(exploration(POINTS))


def found(**changes: Any) -> Verified:
    """Of point 2: 30 GiB and 600 ms predicted."""
    fields: dict[str, Any] = {
        "key": plan_key(DATA.exploration.plan(2)), "mesh": "2x4", "micro_batches": 1,
        "memory_predicted_bytes": 30 * GIB, "time_predicted_s": DATA.time[2],
        "memory_tracked_bytes": 33 * GIB, "time_measured_s": 0.54,
        "loss_difference": 1e-7, "gradient_difference": 1e-6, "ok": True, "checked_on": "8 ranks",
    }  # fmt: skip
    return Verified(**{**fields, **changes})


def test_both_figures_are_shown_with_their_difference():
    assert verified_words(found(), DATA) == (
        "33.0 GiB tracked (30.0 GiB predicted, +10 %); 540 ms measured (600 ms predicted, −10 %); "
        "numbers match the unsplit model"
    )


def test_a_miss_is_said_by_its_size():
    for factor, words in ((1.0, "±0 %)"), (1.3, "+30 %, off)"), (4.33, "+333 %, far off)"),
                          (0.2, "−80 %, far off)")):  # fmt: skip
        assert words in verified_words(found(time_measured_s=float(DATA.time[2]) * factor), DATA)
    assert of_point(DATA, 3, (found(time_measured_s=9.0),)) is None


def test_fake_ranks_have_no_time():
    fake = found(time_measured_s=None, loss_difference=None)
    assert verified_words(fake, DATA).endswith("+10 %); collectives as predicted")


def test_a_failure_is_not_hidden():
    assert "numbers do NOT match" in verified_words(found(ok=False), DATA)
    assert verified_words(found(error="a rank died"), DATA) == "did not run: a rank died"


def test_the_assumptions_name_the_points_that_ran():
    assert verified_lines(DATA, ()) == (NOT_YET,)
    said = [f.words for f in assumptions(DATA, View(), (found(),)) if f.name == "predicted / measured"]
    assert len(said) == 1
    assert said[0].startswith("Point 3 of 8: 33.0 GiB tracked")
    damaged = assumptions(DATA, View(), (), "verified.json is damaged")
    assert "verified.json is damaged" in [f.words for f in damaged]


def test_the_card_of_that_point_has_it_and_no_other():
    labels = [{f.name for f in point_card(DATA, View(), row, (found(),)).facts} for row in (2, 3)]
    assert ["verified" in one for one in labels] == [True, False]
