"""What the first lines say beside time and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tensoropt
from tensoropt.exploration.answer import answer
from tensoropt.exploration.first_lines import launcher_words, pace_words
from tensoropt.plan.point import Point

READY_MADE = Path(__file__).parents[2] / "app" / "data"


@pytest.fixture(scope="module")
def found():
    return tensoropt.load(READY_MADE / "llama3-8b-4x80gib")


def test_a_rate_and_a_host_that_holds_the_plan_up(found, monkeypatch: pytest.MonkeyPatch) -> None:
    (rate,) = pace_words(found, 0)
    assert rate.endswith(" tokens/s")
    assert rate in answer(found, 2**40).costs() or answer(found, 2**40).row != 0
    monkeypatch.setattr(Point, "host_bound", True)
    assert pace_words(found, 0) == [rate, "bound by the host"]


def test_the_plan_that_a_config_can_say_has_its_price(found) -> None:
    budgeted = answer(found, 2**40)
    assert budgeted.row is not None
    (sentence,) = launcher_words(found, budgeted.row, budgeted.baselines)
    said = [
        base for base in budgeted.baselines if base.point.planner in ("data_parallel", "zero", "megatron")
    ]
    best = min((base for base in said if base.fits), key=lambda base: base.point.time_s)
    assert sentence.startswith("A launcher's config can say ")
    assert sentence.endswith(f"({best.verdict()}).")
    assert launcher_words(found, best.row, budgeted.baselines) == []  # it is one itself
    assert launcher_words(found, budgeted.row, [base._replace(fits=False) for base in said]) == []


def test_one_device_has_no_baselines() -> None:
    found = tensoropt.load(READY_MADE / "gpt2-dgx-h100")
    assert answer(found).baselines
    spaces = [replace(one, mesh=one.mesh.model_copy(update={"shape": (1,)})) for one in found.spaces]
    assert answer(replace(found, spaces=tuple(spaces))).baselines == ()
