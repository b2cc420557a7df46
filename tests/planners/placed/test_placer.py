"""The Placer's rules, one by one."""

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.planners.placed.placer import place
from tests.planners.placed.hand import problem_of


def placed(seconds, edges, references=(), **settings):
    return place(replace(problem_of(seconds, edges, **settings), references=references), None, 0)


# 0 holds a parameter that 1 and 3 read.
SHARED = {
    "seconds": [0, 1, 1, 1],
    "edges": [(0, 1), (1, 2), (0, 3), (2, 3)],
    "stored": [4, 0, 0, 0],
    "references": ((0, 1, 3),),
}
GROUP = {"seconds": [1, 1], "edges": [], "devices": 4, "together": ((0, 1),)}
RULES = {
    "what is free lies on device 0": ((0, 0, 0), {"seconds": [1, 1, 1], "edges": [(0, 1), (1, 2)]}),
    "a pin lists devices best first": (
        (0, 2), {"seconds": [1, 1], "edges": [], "devices": 3, "pinned": ((1, (2, 1)),)}
    ),
    "the first that can run it": (
        (1,), {"seconds": [[1, 1, np.inf]], "edges": [], "devices": 3, "pinned": ((0, (2, 1, 0)),)}
    ),
    "orders count if they agree": ((3, 3), GROUP | {"pinned": ((0, (3, 2, 1)), (1, (0, 3, 1)))}),
    "orders that contradict do not": ((1, 1), GROUP | {"pinned": ((0, (3, 1)), (1, (1, 3)))}),
    "the order of the one that has one": ((3, 3), GROUP | {"pinned": ((1, (3, 1)),)}),
    "B: metadata follows its input": (
        (1, 1, 0),
        {"seconds": [1, 0, 1], "edges": [(0, 1), (1, 2)], "pinned": ((0, (1,)),), "stored": [1, 0, 0]},
    ),
    "B: unless it may not": (
        (1, 0), {"seconds": [1, 0], "edges": [(0, 1)], "pinned": ((0, (1,)), (1, (0,))), "stored": [1, 0]}
    ),
    "a variable is no generator": (
        (0, 1), {"seconds": [1, 1], "edges": [(0, 1)], "pinned": ((1, (1,)),), "stored": [4, 0]}
    ),
    "nor is what reads one": (
        (0, 0, 1), {"seconds": [1] * 3, "edges": [(0, 2)], "references": ((1, 0),), "pinned": ((2, (1,)),)}
    ),
    "C: a variable lies with all that read it": ((1, 1, 0, 1), SHARED | {"pinned": ((3, (1,)),)}),
    "C: also where what belongs to them is pinned": (
        (2, 2, 2, 2), SHARED | {"together": ((2, 3),), "pinned": ((2, (2, 1)),), "devices": 3}
    ),
    "C: what updates it lies with what reads it": (
        (1, 0, 1),
        {"seconds": [1] * 3, "edges": [(0, 1), (1, 2)], "references": ((2, 0),), "pinned": ((0, (1,)),)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    devices, settings = RULES[rule]
    answer = placed(**settings)
    assert answer.placement.device == devices
    assert answer.notes == ()
    forward = tuple(
        tuple(o for o, d in enumerate(devices) if d == k) for k in range(len(answer.placement.forward))
    )
    assert answer.placement.forward == forward  # in the model's order


def test_a_variable_whose_readers_are_pinned_apart_is_refused():
    with pytest.raises(InfeasibleError, match="no device can hold all of these operators"):
        placed(**SHARED | {"pinned": ((1, (1,)), (3, (0,)))})


def test_a_generator_follows_its_consumers_if_they_agree():
    # heuristic A: 0 has no input and feeds 1 and 2
    pinned = ((1, (1,)), (2, (1,)))
    problem = problem_of([1, 1, 1], [(0, 1)], pinned=pinned)
    shared = replace(problem, tensors=(replace(problem.tensors[0], readers=(1, 2)),))
    assert place(shared, None, 0).placement.device == (1, 1, 1)
    apart = replace(shared, pinned=((1, (1,)), (2, (0,))))
    assert place(apart, None, 0).placement.device == (0, 1, 0)


def test_it_knows_no_memory():
    problem = problem_of([1, 1], [(0, 1)], stored=4.0)
    with pytest.raises(InfeasibleError, match="placer finds no plan within 6 B: device 0 reaches 8 B"):
        place(problem, 6.0, 0)


def test_what_is_free_lies_on_the_best_device_that_can_run_it():
    # CPU ranks 0 and 1 before a GPU, which cannot run 1; 2 belongs to it
    seconds = [[9, 9, 1], [9, 9, np.inf], [9, 9, 1]]
    problem = problem_of(seconds, [(0, 1)], devices=3, together=((1, 2),), stored=[1, 0, 0])
    answer = place(replace(problem, devices=replace(problem.devices, order=(2, 0, 1))), None, 0)
    assert answer.placement.device == (2, 0, 0)
    assert answer.notes == ("2 operators cannot run on device 2 and lie on the next device that can",)
