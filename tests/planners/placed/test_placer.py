"""The Placer's rules, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.planners.placed.placer import place
from tests.planners.placed.hand import problem_of


def devices_of(*args, **kwargs) -> tuple[int, ...]:
    return place(problem_of(*args, **kwargs), None, 0).placement.device


def test_what_is_free_lies_on_device_0():
    assert devices_of([1, 1, 1], [(0, 1), (1, 2)], message_s=1.0) == (0, 0, 0)


def test_pins_and_groups_decide():
    assert devices_of([1, 1, 1], [(0, 1)], pinned=((1, (1,)),), together=((1, 2),), stored=[1, 0, 0]) == (
        0,
        1,
        1,
    )


def test_a_pin_lists_devices_best_first():
    assert devices_of([1, 1], [], devices=3, pinned=((1, (2, 1)),)) == (0, 2)
    # The first that can run the operator.
    seconds = [[1, 1, np.inf]]
    assert devices_of(seconds, [], devices=3, pinned=((0, (2, 1, 0)),)) == (1,)


def test_orders_of_a_group_count_if_they_agree():
    both = {"devices": 4, "together": ((0, 1),)}
    # 3 before 1 in both, whatever else they allow.
    assert devices_of([1, 1], [], pinned=((0, (3, 2, 1)), (1, (0, 3, 1))), **both) == (3, 3)
    assert devices_of([1, 1], [], pinned=((0, (3, 1)), (1, (1, 3))), **both) == (1, 1)
    # A group follows the order of the one member that has one.
    assert devices_of([1, 1], [], pinned=((1, (3, 1)),), **both) == (3, 3)


def test_metadata_follows_its_input():
    # heuristic B: 1 takes no time; it stays with 0, and 2 does not follow
    assert devices_of([1, 0, 1], [(0, 1), (1, 2)], pinned=((0, (1,)),), stored=[1, 0, 0]) == (1, 1, 0)


def test_metadata_that_may_not_follow_has_its_own_device():
    assert devices_of([1, 0], [(0, 1)], pinned=((0, (1,)), (1, (0,))), stored=[1, 0]) == (1, 0)


def test_a_generator_follows_its_consumers_if_they_agree():
    # heuristic A: 0 has no input and feeds 1 and 2
    pinned = ((1, (1,)), (2, (1,)))
    problem = problem_of([1, 1, 1], [(0, 1)], pinned=pinned)
    shared = replace(problem, tensors=(replace(problem.tensors[0], readers=(1, 2)),))
    assert place(shared, None, 0).placement.device == (1, 1, 1)
    apart = replace(shared, pinned=((1, (1,)), (2, (0,))))
    assert place(apart, None, 0).placement.device == (0, 1, 0)


def test_a_variable_is_no_generator():
    assert devices_of([1, 1], [(0, 1)], pinned=((1, (1,)),), stored=[4, 0]) == (0, 1)


def referring(references: tuple[tuple[int, ...], ...], *args, **kwargs):
    return place(replace(problem_of(*args, **kwargs), references=references), None, 0)


def test_a_variable_lies_with_all_that_read_it():
    # heuristic C: 0 holds a parameter that 1 and 3 read
    shared = {"seconds": [0, 1, 1, 1], "edges": [(0, 1), (1, 2), (0, 3), (2, 3)], "stored": [4, 0, 0, 0]}
    answer = referring(((0, 1, 3),), **shared, pinned=((3, (1,)),))
    assert answer.placement.device == (1, 1, 0, 1)
    assert answer.notes == ()
    # Not only a direct pin counts, but that of what belongs together, and the order of the pin.
    kept = {"together": ((2, 3),), "pinned": ((2, (2, 1)),), "devices": 3}
    assert referring(((0, 1, 3),), **shared, **kept).placement.device == (2, 2, 2, 2)


def test_what_updates_a_variable_lies_with_what_reads_it():
    # 0 reads a buffer, 2 makes its new value
    answer = referring(((2, 0),), [1, 1, 1], [(0, 1), (1, 2)], pinned=((0, (1,)),))
    assert answer.placement.device == (1, 0, 1)


def test_a_variable_whose_readers_are_pinned_apart_is_refused():
    with pytest.raises(InfeasibleError, match="no device is allowed for all operators that belong together"):
        referring(((0, 1, 2),), [0, 1, 1], [(0, 1), (0, 2)], pinned=((1, (1,)), (2, (0,))))


def test_what_reads_a_variable_is_no_generator():
    # 0 has no input but a variable, which 1 updates; 2 reads what it makes
    answer = referring(((1, 0),), [1, 1, 1], [(0, 2)], pinned=((2, (1,)),))
    assert answer.placement.device == (0, 0, 1)


def test_it_runs_in_the_models_order():
    placement = place(problem_of([1, 1, 1], [(0, 1)], pinned=((2, (1,)),)), None, 0).placement
    assert placement.forward == ((0, 1), (2,))
    assert placement.backward is None


def test_it_knows_no_memory():
    problem = problem_of([1, 1], [(0, 1)], stored=4.0)
    with pytest.raises(InfeasibleError, match="placer finds no plan within 6 B: device 0 reaches 8 B"):
        place(problem, 6.0, 0)


def test_a_device_that_cannot_run_an_operator_is_passed_over():
    answer = place(problem_of([[np.inf, 1.0], [1.0, 1.0]], []), None, 0)
    assert answer.placement.device == (1, 0)
    assert answer.notes == ("1 operators cannot run on device 0 and went to the next that can",)


def test_what_is_free_lies_on_the_best_device_that_can_run_it():
    # CPU ranks 0 and 1 before a GPU, which cannot run 1; 2 belongs to it
    seconds = [[9, 9, 1], [9, 9, np.inf], [9, 9, 1]]
    problem = problem_of(seconds, [(0, 1)], devices=3, together=((1, 2),), stored=[1, 0, 0])
    answer = place(replace(problem, devices=replace(problem.devices, order=(2, 0, 1))), None, 0)
    assert answer.placement.device == (2, 0, 0)
    assert answer.notes == ("2 operators cannot run on device 2 and went to the next that can",)
