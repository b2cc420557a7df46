"""Units of operators that share a device, and methods that run again with less room, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.placement import Placement
from tensoropt.planners.placed.common.units import MemoryBook, place_within_memory, units_of
from tests.planners.placed.hand import problem_of


def test_of_what_passes_the_largest_counts():
    problem = problem_of([1.0] * 3, [(0, 1), (1, 2)], message_s={(0, 1): 2e-6, (1, 2): 6e-6}, stored=4.0)
    units = units_of(problem)
    assert units.transient_bytes.tolist() == [2, 8, 6]
    memory = MemoryBook(units, np.array([16.0, 15.9]))
    memory.book(0, 0)
    memory.book(0, 1)
    assert memory.room(1).tolist() == [True, False]
    memory.book(1, 0)
    assert (memory.used.tolist(), memory.transient.tolist()) == ([8, 4], [8, 2])
    assert MemoryBook(units, np.array([4.0]), counts_transients=False).room(1).tolist() == [True]


def test_what_does_not_add_up_is_booked_below_the_limit():
    # 1 keeps what it gets from 0 for backward: 8 B on its device that are counted where they were made
    problem = problem_of([1.0, 1.0, 1.0], [(0, 1)], message_s=8e-6, stored=[0.0, 4.0, 4.0], training=True)
    kept = replace(problem.tensors[0], kept_by=(1,), gradient=False)
    problem = replace(problem, tensors=(kept,))
    caps: list[float] = []

    def attempt(memory: MemoryBook):
        caps.append(float(memory.caps[1]))
        memory.book(0, 0)
        memory.book(1, 1)
        third = int(memory.room(2)[1])
        memory.book(2, third)
        return Placement.in_order([0, 1, third], 2)

    answer = place_within_memory("method", problem, 13.0, attempt)
    assert caps == [13.0, 13.0 - (16.0 - 8.0)]
    assert answer.placement.device == (0, 1, 0)


def test_a_method_that_cannot_get_below_the_limit_is_refused():
    problem = problem_of([1.0], [], stored=10.0)

    def attempt(memory: MemoryBook):
        return Placement.in_order([0], 2)

    with pytest.raises(InfeasibleError, match="device 0 still reaches 10 B"):
        place_within_memory("method", problem, 5.0, attempt)


def test_units_join_what_belongs_together():
    problem = problem_of(
        [1.0] * 5, [(0, 1)], stored=[1, 2, 4, 8, 16], together=((0, 2), (2, 4)), pinned=((4, (1,)), (1, (0,)))
    )
    units = units_of(problem)
    assert units.members == ((0, 2, 4), (1,), (3,))
    assert units.of == (0, 1, 0, 2, 0)
    assert units.bytes.tolist() == [21, 2, 8]
    assert units.by_priority == ((1,), (0,), (0, 1))


def test_contradicting_pins_name_both_sides():
    problem = problem_of([1.0, 1.0], [], together=((0, 1),), pinned=((0, (0,)), (1, (1,))))
    with pytest.raises(TensorOptError, match="op0 on device 0; op1 on device 1"):
        units_of(problem)
