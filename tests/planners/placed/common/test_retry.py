"""Methods asked again with less room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement
from tensoropt.planners.placed.common.answer import PlacedAnswer
from tensoropt.planners.placed.common.memory import MemoryBook
from tensoropt.planners.placed.common.retry import place_within_memory
from tensoropt.planners.placed.common.units import units_of
from tests.planners.placed.hand import problem_of


def test_what_does_not_add_up_is_booked_below_the_limit():
    # 1 keeps what it gets from 0 for backward: 8 B on its device that are counted where they were made
    problem = problem_of([1.0, 1.0, 1.0], [(0, 1)], message_s=8e-6, stored=[0.0, 4.0, 4.0], training=True)
    kept = replace(problem.tensors[0], kept_by=(1,), gradient=False)
    problem = replace(problem, tensors=(kept,))
    units = units_of(problem)
    caps: list[float] = []

    def attempt(memory: MemoryBook):
        caps.append(float(memory.caps[1]))
        memory.book(units, 0, 0)
        memory.book(units, 1, 1)
        third = int(memory.room(units, 2)[1])
        memory.book(units, 2, third)
        return PlacedAnswer(Placement.in_order([0, 1, third], 2), ("told",))

    answer = place_within_memory("method", problem, units, 13.0, attempt)
    assert caps == [13.0, 13.0 - (16.0 - 8.0)]
    assert answer.placement.device == (0, 1, 0)
    assert answer.notes == (
        "told",
        "what is in flight does not add up: booked at most 5 B of 13 B on device 1, attempt 2",
    )


def test_a_method_that_cannot_get_below_the_limit_is_refused():
    problem = problem_of([1.0], [], stored=10.0)

    def attempt(memory: MemoryBook):
        return PlacedAnswer(Placement.in_order([0], 2))

    with pytest.raises(InfeasibleError, match="device 0 still reaches 10 B"):
        place_within_memory("method", problem, units_of(problem), 5.0, attempt)
