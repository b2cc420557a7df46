"""Why a plan is not faster: all of it together, as data and as text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.plan.plan import PlacedInfo
from tensoropt.plan.point_records import PlacedRecord
from tensoropt.report.levers import Lever
from tensoropt.report.why import looked_up, why_lines, why_point
from tests.plan.explorations import MIB, small_exploration


def unrecorded() -> Any:
    return replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())


def test_a_point_is_told_all_of_it(gpus: Any) -> None:
    found, last = gpus.found, len(gpus.found.points) - 1
    told = tensoropt.why(gpus.folder)
    assert told.point == last
    assert told.memory_bytes == found.points[last].memory_bytes
    assert [lever.key for lever in told.bounds] == ["memory:unlimited", "communication:free", "compute:peak"]
    assert {lever.how for lever in told.levers} == {"looked up", "simulated"}
    assert {lever.how for lever in told.deeper} <= {"to explore", "looked up"}
    assert told.notes == ()
    text = repr(told)
    assert text == "\n".join(why_lines(told))
    for part in (
        "binds",
        "at least",
        "what would buy",
        "with a search of its own",
        "simulated: this very plan",
    ):
        assert part in text
    command = next(lever.command for lever in told.deeper if lever.key == "bfloat16")
    assert command == f"tensoropt why {gpus.folder} --point {last + 1} --deep bfloat16 --out out/bfloat16"
    data = json.loads(json.dumps(told.to_dict(), allow_nan=False))
    assert data["point"] == last + 1
    assert data["bounds"][0]["point"] == last + 1


def test_the_budget_is_the_points_own_unless_one_is_given(gpus: Any) -> None:
    found = gpus.found
    leanest = looked_up(found, 0)
    assert leanest.within == max(
        i for i, p in enumerate(found.points) if p.memory_bytes <= found.points[0].memory_bytes
    )
    assert leanest.unchanged_s is None
    roomy = looked_up(found, 0, memory_bytes=2**40)
    assert roomy.within == len(found.points) - 1
    assert roomy.unchanged_s == found.points[-1].time_s
    with pytest.raises(InfeasibleError, match="more than the budget of 1 KiB"):
        looked_up(found, 0, memory_bytes=1024)
    with pytest.raises(TensorOptError, match="there is no point 9999"):
        looked_up(found, 9998)


def test_the_same_point_by_its_limits(gpus: Any) -> None:
    found = gpus.found
    budget = found.points[1].memory_bytes * (1 + 1e-9)
    assert tensoropt.why(found, memory_bytes=budget).point == 1
    assert tensoropt.why(found, knee=True).point == found.knee


def test_an_answer_takes_the_place_of_its_question(gpus: Any) -> None:
    told = looked_up(gpus.found, 0)
    answer = Lever("bfloat16", "computing in bfloat16", "explored", 0.1, 5.0, 3, "words")
    again = told.with_explored(answer, "a note")
    assert [lever.key for lever in again.deeper] == [lever.key for lever in told.deeper]
    assert answer in again.deeper
    assert again.notes == (*told.notes, "a note")
    other = replace(answer, key="bandwidth:all")
    assert again.with_explored(other).deeper == (*again.deeper, other)
    made = told.answered("k", "t", gpus.found)
    assert (made.point, made.how) == (told.within, "explored")


def test_without_saved_costs_it_says_what_is_missing() -> None:
    told = why_point(unrecorded(), 1)
    assert told.binding.key == "computation"
    assert [lever.key for lever in told.bounds] == ["memory:unlimited"]
    assert told.deeper == ()
    text = " ".join(told.notes)
    assert "operators and links are not told apart" in text
    assert "nothing can be explored from it" in text
    assert len(told.notes) == 3


def test_a_plan_that_is_no_point_of_the_frontier() -> None:
    found = unrecorded()
    other = found.points[0].changed(planner="zero", memory_bytes=5 * MIB, time_s=0.6, choice=(0, 0, 0, 0))
    told = looked_up(replace(found, others=(other,)), 4)
    assert told.title == "zero 1 of 1"
    assert told.unchanged_s is None  # nothing of the frontier fits
    assert told.levers[0].time_s is None
    assert "leanest takes 10 MiB" in told.levers[0].words


def test_a_plan_of_several_devices_is_bounded_by_its_busiest() -> None:
    found = unrecorded()
    recorded = PlacedRecord(PlacedInfo())
    point = found.points[0].changed(placed=recorded, compute_s=0.1)
    told = why_point(replace(found, points=(point,)), 0)
    assert told.bounds[1].key == "waiting:none"
    assert told.bounds[1].time_s == 0.1
    assert any("nothing can be explored" in note for note in told.notes)
