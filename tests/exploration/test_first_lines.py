"""What the first lines say beside time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensoropt
from tensoropt.exploration.answer import _pace_words, answer, launcher_words
from tensoropt.exploration.recommended import a_config_says
from tensoropt.plan.point import Point
from tensoropt.units import share_words

READY_MADE = Path(__file__).parents[2] / "app" / "data"


@pytest.fixture(scope="module")
def found():
    return tensoropt.load(READY_MADE / "llama3-8b-4x80gib")


def test_a_rate_and_a_host_that_holds_the_plan_up(found, monkeypatch):
    (rate,) = _pace_words(found, 0)
    assert rate.endswith(" tokens/s")
    assert rate in answer(found, 2**40).costs() or answer(found, 2**40).row != 0
    monkeypatch.setattr(Point, "host_bound", True)
    assert _pace_words(found, 0) == [rate, "bound by the host"]


def test_the_plan_that_a_config_can_say_has_its_price(found):
    budgeted = answer(found, 2**40)
    said = [base for base in budgeted.baselines if a_config_says(found.names[base.row])]
    best = min((base for base in said if base.fits), key=lambda base: base.point.time_s)
    other = next(row for row, name in enumerate(found.names) if not a_config_says(name))
    (sentence,) = launcher_words(found, other, budgeted.baselines)
    assert sentence.startswith("A launcher's config can express ")
    more = best.point.time_s / found.all_points[other].time_s - 1.0
    assert sentence.endswith(f"(+{share_words(more)})." if more > 0 else "(as fast).")
    assert launcher_words(found, best.row, budgeted.baselines) == []  # it is one itself
    assert launcher_words(found, other, [base._replace(fits=False) for base in said]) == []


def test_one_device_has_no_baselines(found, monkeypatch):
    assert answer(found).baselines
    monkeypatch.setattr(type(found), "devices", 1)
    assert answer(found).baselines == ()
