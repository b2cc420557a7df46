"""When messages that places sent have come, and what waits between the two parts of a backward."""

from __future__ import annotations

import pytest

from tensoropt.pipeline.evaluate import stage_works
from tensoropt.pipeline.receipts import taken_back, taken_on
from tensoropt.pipeline.strategy import place_actions
from tensoropt.profiling.fact_finding import find_facts, find_split_facts
from tests.costs.models import four, problem
from tests.pipeline.models import split_along_the_batch

ROW = 24 * 4


@pytest.mark.parametrize(("axes", "rows"), [((), 4), ((2,), 2)])
def test_gradients_wait_for_those_of_parameters_to_be_made(axes, rows):
    # Of the result of each of two layers, for a micro-batch of 4 rows.
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, *axes), "zero_bubble")
    works = stage_works(strategy)[1]
    split = [find_split_facts(work) for name, work in works.items() if name.startswith("linear")]
    assert [facts.waiting_bytes for facts in split] == [rows * ROW] * 2
    # The gradient of the weight, and nothing else.
    assert [facts.weights_bytes for facts in split] == [24 * 24 * 4] * 2


def test_a_split_backward_releases_nothing_until_its_first_part_is_over():
    work = stage_works(split_along_the_batch(problem(four).graph, (2,), (4, 2), "zero_bubble"))[1]["linear_2"]
    whole, split = find_facts(work), find_split_facts(work)
    assert split.inputs_bytes >= whole.backward_peak_bytes - sum(
        spec.bytes for _, spec, role in work.inputs if role == "parameter"
    )
    # relu's result is released with the part behind the layer, unless a later layer holds it.
    assert split.released_bytes == whole.kept_bytes


def test_a_stage_learns_from_what_comes_that_its_gradients_have_come():
    # Of two places with two stages each stage 1 lies at place 1, whose place 0 sends what it takes.
    actions = place_actions("interleaved_1f1b", 2, 2, 4)
    order = [(a.kind, a.micro_batch) for a in actions[0] if a.stage == 0]
    found = taken_back("interleaved_1f1b", actions, 1)
    for micro_batch, taken in found.items():
        before = order[: order.index(("F", micro_batch))]
        assert all(("B", one) in before for one in taken)
    # Each at most once, and the last ones never: nothing comes behind them.
    every = [one for taken in found.values() for one in taken]
    assert len(set(every)) == len(every) < 4
    assert taken_back("gpipe", place_actions("gpipe", 2, 1, 4), 1) == {0: (), 1: (), 2: (), 3: ()}


def test_a_schedule_that_waits_has_sent_all():
    actions = place_actions("1f1b", 2, 1, 4)
    assert taken_back("1f1b", actions, 1) == {0: (), 1: (0,), 2: (1,), 3: (2,)}
    assert taken_back("1f1b", actions, 0) == {}


def test_a_stage_without_a_backward_learns_otherwise_that_what_it_sent_has_come():
    # It waits for a message before the next one, and before what would be its backward.
    places = place_actions("1f1b", 2, 1, 4)
    assert taken_on("1f1b", places, 0) == {
        ("F", 0): (), ("F", 1): (0,), ("B", 0): (1,), ("F", 2): (), ("B", 1): (2,), ("F", 3): (),
        ("B", 2): (3,), ("B", 3): (),
    }  # fmt: skip
    # For all of them when the forwards are over.
    found = taken_on("gpipe", place_actions("gpipe", 2, 1, 3), 0)
    assert {key: taken for key, taken in found.items() if taken} == {("B", 0): (0, 1, 2)}
    # By a later stage at the same place; the last one of a place has none.
    several = place_actions("interleaved_1f1b", 2, 2, 4)
    assert {key: taken for key, taken in taken_on("interleaved_1f1b", several, 1).items() if taken} == {
        ("B", n): (n,) for n in range(4)
    }
    assert not any(taken_on("interleaved_1f1b", several, 2).values())
    # The last stage sends nothing on.
    assert not any(taken_on("interleaved_1f1b", several, 3).values())
