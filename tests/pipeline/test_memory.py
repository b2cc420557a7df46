"""When places ask for messages, and when those that they sent have come.

What waits between the two parts of a backward.
"""

from __future__ import annotations

import pytest

from tensoropt.pipeline.memory import Receipt, receipts, taken_back, waiting_bytes
from tensoropt.pipeline.strategy import place_actions
from tests.costs.models import four, problem
from tests.pipeline.models import sliced, split_along_the_batch

ROW = 24 * 4


@pytest.mark.parametrize(("axes", "rows"), [((), 4), ((2,), 2)])
def test_gradients_wait_for_those_of_parameters_to_be_made(axes: tuple[int, ...], rows: int) -> None:
    # Of the result of each of two layers, for a micro-batch of 4 rows.
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, *axes), "zero_bubble")
    assert [sum(waiting_bytes(stage).values()) for stage in strategy.stages] == [2 * rows * ROW] * 2


def test_what_is_made_of_parameters_alone_counts_as_one() -> None:
    # Both halves of one parameter are read in a stage: the gradients of what reads them wait, not of the
    # halves.
    strategy = split_along_the_batch(problem(sliced).graph, (4,), (4, 2), "1f1b")
    for stage in strategy.stages:
        for name, size in waiting_bytes(stage).items():
            assert size <= 4 * ROW, name


ALL = [
    ("gpipe", 3, 1, 4), ("1f1b", 3, 1, 4), ("interleaved_1f1b", 2, 2, 4), ("zero_bubble", 2, 2, 4),
    ("zbv", 3, 2, 6),
]  # fmt: skip


@pytest.mark.parametrize("shape", ALL)
def test_every_message_is_asked_for_once_and_in_time(shape: tuple[str, int, int, int]) -> None:
    """By the place that takes it, and before the action that does; none comes from the place itself."""
    for own, asked in zip(place_actions(*shape), receipts(*shape), strict=True):
        here = {action.stage for action in own}
        open_: set[Receipt] = set()
        for action, new in zip(own, asked, strict=True):
            assert open_.isdisjoint(new)
            open_.update(new)
            sender = action.stage - 1 if action.kind == "F" else action.stage + 1
            if action.kind != "W" and sender not in here and 0 <= sender < shape[1] * shape[2]:
                open_.remove(Receipt(action.kind != "F", action.stage, action.micro_batch))
        assert not open_


def test_a_stage_learns_from_what_comes_that_its_gradients_have_come() -> None:
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


def test_a_schedule_that_waits_has_sent_all() -> None:
    actions = place_actions("1f1b", 2, 1, 4)
    assert taken_back("1f1b", actions, 1) == {0: (), 1: (0,), 2: (1,), 3: (2,)}
    assert taken_back("1f1b", actions, 0) == {}
