"""What a plan was chosen over, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.report.alternatives import alternatives, verdict_words
from tests.plan.explorations import MIB, point, small_exploration


def compared() -> Any:
    """ZeRO has two plans, of which one fits 25 MiB; another planner refuses."""
    found = replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())
    others = (
        point(15 * MIB, 0.3, 0, planner="zero", choice=(0, 1, 0, 0)),
        point(30 * MIB, 0.145, 0, planner="zero", choice=(0, 0, 1, 0)),
    )
    row = {"limit_bytes": None, "search_s": 0.1, "gap": None, "notes": []}
    comparison = (
        {**row, "planner": "frontier", "memory_bytes": 40 * MIB, "time_s": 0.14, "points": 4},
        {**row, "planner": "zero", "memory_bytes": 30 * MIB, "time_s": 0.145, "points": 2},
        {**row, "planner": "m_topo", "memory_bytes": None, "time_s": None, "points": 0, "notes": ["no room"]},
    )
    return replace(found, others=others, comparison=comparison)


def test_ends_planners_and_what_was_not_run() -> None:
    found = {one.name: one for one in alternatives(compared(), 1, 25 * MIB, "the budget")}
    assert set(found) == {
        "leanest (point 1)", "fastest within the budget (point 3)", "fastest (point 4)",
        "ZeRO, the fastest that fits of 2", "m-TOPO", "data parallel",
    }  # fmt: skip
    assert found["leanest (point 1)"].verdict == "slower by 100 %, with 2 MiB less memory"
    assert (
        found["fastest (point 4)"].verdict
        == "does not fit the budget of 25 MiB: 15 MiB too much; faster by 30 %"
    )
    assert found["ZeRO, the fastest that fits of 2"].time_s == 0.3
    assert found["m-TOPO"].verdict == "found no plan: no room"
    assert found["data parallel"].time_s is None
    assert "tensoropt recost DIR --planners data_parallel --only-beside" in found["data parallel"].verdict


def test_baselines_that_ran_beside_the_search_are_told_from_its_report() -> None:
    found = small_exploration()
    tried = {
        "zero": {"points": 2, "memory_bytes": 30 * MIB, "time_s": 0.4, "refusal": "", "merged": 0},
        "data_parallel": {"points": 0, "memory_bytes": None, "time_s": None, "refusal": "odd", "merged": 0},
    }
    found = replace(found, report={**found.report, "tried": tried})
    told = {one.name: one for one in alternatives(found, 1, 25 * MIB, "the budget")}
    assert told["ZeRO, its fastest"].time_s == 0.4
    assert "does not fit the budget" in told["ZeRO, its fastest"].verdict
    assert told["data parallel"].verdict == "found no plan: odd"


def test_a_planner_of_which_nothing_fits_shows_its_leanest() -> None:
    names = [one.name for one in alternatives(compared(), 0, 11 * MIB, "the budget")]
    assert "ZeRO, the leanest of 2" in names


def test_the_chosen_one_is_no_alternative_to_itself() -> None:
    found = compared()
    assert not any("(point 4)" in one.name for one in alternatives(found, 3, 50 * MIB, "the budget"))
    of_zero = [one for one in alternatives(found, 4, 25 * MIB, "the budget") if one.name.startswith("ZeRO")]
    assert of_zero == []  # its fastest that fits is the chosen one


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((10.0 * MIB, 1.0), "as fast, with as much memory"),
        ((10.0 * MIB, 1.1), "slower by 10 %, with as much memory"),
        ((12.0 * MIB, 0.5), "faster by 50 %, with 2 MiB more memory"),
        ((30.0 * MIB, 0.5), "does not fit the device of 20 MiB: 10 MiB too much; faster by 50 %"),
    ],
)
def test_verdicts(other: tuple[float, float], words: str) -> None:
    assert verdict_words((10.0 * MIB, 1.0), other, 20 * MIB, "the device") == words
