"""Why a plan is not faster: all of it together, as data and as text.

What binds a step: parts that add up to it, links by what is waited for, and the budget in words.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.plan.plan import StagesInfo
from tensoropt.plan.point_records import StagesRecord
from tensoropt.report.detail import detail
from tensoropt.report.levers import Lever
from tensoropt.report.step_parts import waited_lanes, waiting_by_links
from tensoropt.report.why import binding, looked_up, why_lines, why_point
from tensoropt.simulate.recording import TimelineEvent
from tests.plan.explorations import MIB, point, small_exploration

BUDGET = "the memory budget of 10 MiB"


def event(lane: str, start: float, duration: float) -> TimelineEvent:
    return TimelineEvent("x", lane, start, duration, "forward", "g")


def test_a_link_is_waited_for_only_while_nothing_is_computed() -> None:
    found = waited_lanes(
        [
            event("compute", 0.0, 2.0),
            event("link a", 1.0, 3.0),  # 1 beside computation, then 1 alone, then 1 beside link b
            event("link b", 3.0, 2.0),  # 1 beside link a, then 1 alone
            event("compute", 6.0, 1.0),
            event("link c", 6.25, 0.5),  # beside computation
            event("link d", 7.0, 0.0),
        ]
    )
    assert found == {"link a": pytest.approx(1.5), "link b": pytest.approx(1.5)}


def test_one_after_the_other_is_no_overlap() -> None:
    found = waited_lanes([event("compute", 0.0, 1.0), event("link a", 1.0, 1.0), event("compute", 2.0, 1.0)])
    assert found == {"link a": 1.0}


def test_the_parts_of_real_plans_add_up_to_their_step(gpus: Any) -> None:
    found = gpus.found
    for index in range(0, len(found.points), max(1, len(found.points) // 6)):
        one, told = found.points[index], detail(found, index)
        bound = binding(found, index, told, one.memory_bytes, index)
        assert sum(part.seconds for part in bound.parts) == pytest.approx(one.time_s)
        assert sum(part.share for part in bound.parts) == pytest.approx(1.0)
        # Not only after scaling: the timeline itself has what the simulator says is waited for.
        # They differ by what computation is slower beside collectives.
        waited = sum(waited_lanes(told.timeline).values())
        assert waited == pytest.approx(one.exposed_s, rel=0.02, abs=1e-12)


def test_links_are_named_by_level_and_axes(gpus: Any) -> None:
    found = gpus.found
    index = max(range(len(found.points)), key=lambda i: found.points[i].exposed_s)
    waits = waiting_by_links(found, index, detail(found, index).timeline)
    assert waits
    for words, seconds in waits:
        assert " links (" in words
        assert " over ax" in words
        assert seconds > 0


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({}, "computation", "Computation binds: 75 %"),
        ({"compute_s": 0.1, "exposed_s": 0.3}, "communication",
         "Communication that is waited for (communication) binds: 75 %"),
        ({"compute_s": 0.1, "exposed_s": 0.1, "idle_s": 0.2}, "idle",
         "Waiting for other devices binds: 50 %"),
        ({"compute_s": 0.1, "exposed_s": 0.1, "idle_s": 0.2, "host_s": 0.4}, "host",
         "The host, which issues work more slowly than the device does it, binds: 50 %"),
        ({"compute_s": 0.1, "exposed_s": 0.0, "idle_s": 0.3, "host_s": 0.2}, "idle",
         "Waiting for other devices binds: 50 %"),
    ],
)  # fmt: skip
def test_what_takes_most_binds(changes: dict[str, float], key: str, words: str) -> None:
    found = replace(small_exploration(), points=(point(10 * MIB, 0.4, 0, **changes),))
    bound = binding(found, 0, None, 10 * MIB, 0, limit=BUDGET)
    assert bound.key == key
    assert bound.sentence.startswith(words)
    assert "The memory budget of 10 MiB does not bind" in bound.sentence


def test_the_budget_binds_where_more_memory_is_faster() -> None:
    found = small_exploration()
    leanest = binding(found, 0, None, 10 * MIB, 0, limit="the memory budget of 10 MiB").sentence
    assert "The memory budget of 10 MiB binds, too" in leanest
    assert "40 MiB and takes 140 ms (−65 %)" in leanest
    roomy = binding(found, 0, None, 15 * MIB, 1, limit="the memory budget of 15 MiB").sentence
    assert "Point 2 fits 15 MiB and is faster: 200 ms (−50 %)." in roomy
    assert "The memory budget of 15 MiB binds, too" in roomy
    all_fit = binding(found, 0, None, 50 * MIB, 3, limit="the memory budget of 50 MiB").sentence
    assert "Point 4 fits 50 MiB and is faster" in all_fit
    assert "binds, too" not in all_fit
    assert "does not bind" not in all_fit


def test_a_budget_that_nobody_set_is_not_said_to_bind() -> None:
    found = small_exploration()
    sentence = binding(found, 0, None, 10 * MIB, 0).sentence
    assert "budget of" not in sentence
    assert "binds, too" not in sentence
    assert "No memory budget is set; the frontier's fastest plan needs 40 MiB" in sentence
    last = len(found.points) - 1
    sentence = binding(found, last, None, found.points[last].memory_bytes, last).sentence
    assert sentence.endswith("No plan that was searched is faster.")


def unrecorded() -> Any:
    return replace(small_exploration(), cluster=load_cluster("dgx-h100[2]").to_dict())


def test_a_point_is_told_all_of_it(gpus: Any) -> None:
    found, last = gpus.found, len(gpus.found.points) - 1
    assert tensoropt.why(gpus.folder).index == found.index()
    told = tensoropt.why(gpus.folder, last + 1)
    assert told.index == last
    assert told.memory_bytes == found.needs[last]
    assert [lever.key for lever in told.bounds] == ["memory:unlimited", "communication:free", "compute:peak"]
    assert {lever.how for lever in told.levers} == {"looked up", "simulated"}
    assert {lever.how for lever in told.deeper} <= {"to explore", "looked up"}
    assert told.notes == ()
    text = repr(told)
    assert text == "\n".join(why_lines(told))
    for part in (
        "binds",
        "at least",
        "what would make it faster",
        "with a separate search",
        "simulated: the same plan",
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
    budget = float(found.needs[1])
    assert tensoropt.why(found, memory_bytes=budget).index == found.index(memory_bytes=budget)
    assert tensoropt.why(found, knee=True).index == found.knee


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
    assert (made.index, made.how) == (told.within, "explored")


def test_without_saved_costs_it_says_what_is_missing() -> None:
    told = why_point(unrecorded(), 1)
    assert told.binding.key == "computation"
    assert [lever.key for lever in told.bounds] == ["memory:unlimited"]
    assert told.deeper == ()
    text = " ".join(told.notes)
    assert "operators and links are not distinguished" in text
    assert "nothing can be explored from it" in text
    assert len(told.notes) == 3


def test_a_plan_that_is_no_point_of_the_frontier() -> None:
    found = replace(unrecorded(), cluster={"name": "toy"})  # of whose devices nothing is known
    other = found.points[0].changed(planner="zero", memory_bytes=5 * MIB, time_s=0.6, choice=(0, 0, 0, 0))
    told = looked_up(replace(found, others=(other,)), 4)
    assert told.title == "zero 1 of 1"
    assert told.unchanged_s is None  # nothing of the frontier fits
    assert told.levers[0].time_s is None
    assert "leanest takes 10 MiB" in told.levers[0].words


def test_a_plan_of_several_devices_is_bounded_by_its_busiest() -> None:
    found = unrecorded()
    recorded = StagesRecord(StagesInfo())
    point = found.points[0].changed(record=recorded, compute_s=0.1)
    told = why_point(replace(found, points=(point,)), 0)
    assert told.bounds[1].key == "waiting:none"
    assert told.bounds[1].time_s == 0.1
    assert any("nothing can be explored" in note for note in told.notes)
