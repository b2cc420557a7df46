"""The recommendation: the simplest of the plans that are about as fast as the fastest that fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensoropt.exploration.recommended import a_config_says, kinds_of, recommended

MIXED = "DP 8 (TP 2/115) · ZeRO-2 72/146"


class Points(list):
    """Points with their times as an array."""

    @property
    def time(self) -> np.ndarray:
        return np.array([point.time_s for point in self])


@pytest.fixture(autouse=True)
def shares(monkeypatch):
    """Each fraction in a name stands for a hundredth of the operators."""
    counted = lambda points, *_: np.array([point.name.count("/") / 100 for point in points])  # noqa: E731
    monkeypatch.setattr("tensoropt.exploration.recommended.exceptions", counted)


def found(*plans: tuple[str, float, float, int]) -> Any:
    """Findings with plans of (name, seconds, need, micro-batches)."""
    names, times, needs, micro = zip(*plans, strict=True)
    points = Points(
        SimpleNamespace(name=name, time_s=time, space=n)
        for n, (name, time) in enumerate(zip(names, times, strict=True))
    )
    spaces = [SimpleNamespace(micro_batches=count) for count in micro]
    made = {"names": names, "all_points": points, "needs": np.array(needs), "spaces": spaces}
    return SimpleNamespace(**made, weights=None)


def test_what_a_config_says_is_taken_before_what_is_a_little_faster():
    chosen = recommended(found((MIXED, 0.98, 10, 1), ("DP 8 · ZeRO-2", 1.0, 12, 1)), 20)
    assert (chosen.row, chosen.fastest) == (1, 0)
    assert chosen.rule == "the simplest plan within 3 % of the fastest that fits"


def test_a_plan_beyond_three_per_cent_or_the_limit_is_never_taken():
    plans = found((MIXED, 0.96, 10, 1), ("DP 8", 1.0, 9, 1), ("DP 4", 0.96, 21, 1))
    chosen = recommended(plans, 20)
    assert chosen.row == chosen.fastest == 0
    assert chosen.rule == "the fastest plan that fits; none within 3 % of it is simpler"
    assert recommended(plans, 8) is None
    assert recommended(plans, 20, [1]).row == 1


@pytest.mark.parametrize("plans", [
    [("DP 8", 1.01, 10, 1), ("DP 8 · ZeRO-3", 1.0, 5, 1)],  # kinds of parallelism
    [("DP 8 (TP 1/99)", 1.01, 10, 1), ("DP 8 (TP 1/99) · 3/4 norms", 1.0, 5, 1)],  # exceptions
    [("DP 8", 1.01, 10, 2), ("DP 8", 1.0, 5, 4)],  # micro-batches
    [("DP 8", 1.0, 10, 2), ("DP 8", 1.01, 5, 2)],  # time
    [("DP 8", 1.0, 5, 2), ("DP 8", 1.0, 10, 2)],  # need
])  # fmt: skip
def test_what_decides_comes_in_this_order(plans):
    for order in (plans, plans[::-1]):
        assert order[recommended(found(*order), 20).row] == plans[0]


@pytest.mark.parametrize(("name", "said", "kinds"), [
    ("one device", True, 0),
    ("DP 4×2 · ZeRO-3 · 12/12 blocks recomputed · 4 micro-batches", True, 2),
    ("DP 2 · TP 4 + SP · 8 micro-batches · PP 4 1F1B", True, 4),
    ("CP 8 (ring)", True, 1),
    (MIXED, False, 3),
    ("DP 8 · 12/12 blocks recomputed (10 norms and activations, 2 in part)", False, 1),
    ("DP 8 · 2 inputs gathered again", False, 1),
    ("placed on 8 devices · 114 cut", False, 1),
    ("other dims 8", False, 1),
])  # fmt: skip
def test_a_name_says_how_simple_a_plan_is(name, said, kinds):
    assert (a_config_says(name), kinds_of(name)) == (said, kinds)
