"""Post: what its distribution learns, and the placements it draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tensoropt.placement import Placement, simulate_placement
from tensoropt.planners.placed.common.units import MemoryBook, units_of
from tensoropt.planners.placed.post import _Learner, place
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem
from tests.planners.placed.test_methods import LITTLE


def learner(problem, chosen=LITTLE):
    memory = MemoryBook.empty(problem.devices.within(None))
    return _Learner(problem, units_of(problem), memory, chosen, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_finds_the_best_devices_of_small_graphs(seed):
    problem = random_problem(seed, 6, 2, training=seed % 2 == 0)
    best_s = min(
        simulate_placement(problem, Placement.in_order(devices, 2)).time_s
        for devices in product(range(2), repeat=6)
    )
    answer = place(problem, None, 0, replace(LITTLE, placements=1_000))
    assert simulate_placement(problem, answer.placement).time_s == best_s


def test_a_fit_is_the_share_of_the_fastest_mixed_with_the_uniform_one():
    """Equation 10; algorithm 1, line 12. Operator 1 may lie on device 1 only."""
    problem = problem_of([[1.0, 1.0], [np.inf, 1.0]], [])
    post = learner(problem, replace(LITTLE, elite=0.5, uniform=0.2))
    drawn = np.array([[0, 1], [1, 1], [0, 1], [1, 1]])
    post._fit(drawn, np.array([1.0, 4.0, 2.0, 3.0]))  # the fastest two on device 0
    assert post.chances == pytest.approx(np.array([[0.9, 0.1], [0.0, 1.0]]))
    post._fit(drawn, np.array([1.0, 2.0, 3.0, 4.0]))  # one on each
    assert post.chances == pytest.approx(np.array([[0.5, 0.5], [0.0, 1.0]]))


def test_ascent_prefers_what_was_fast():
    """Placements with operator 0 on device 1 are fast, operator 1 makes no difference."""
    problem = problem_of([1.0, 1.0], [])
    post = learner(problem)
    drawn = np.array(list(product(range(2), repeat=2)))
    before = post.chances
    post._ascend(drawn, np.array([2.0, 2.0, 1.0, 1.0]))
    assert post.chances[0, 1] > before[0, 1]
    assert post.chances[1] == pytest.approx(before[1])
    assert post.chances.sum(axis=1) == pytest.approx(1.0)


def test_forbidden_devices_are_never_drawn():
    problem = replace(problem_of([1.0] * 4, [], devices=3), pinned=((0, (1,)), (1, (0, 2))))
    post = learner(problem)
    post.run()
    assert (post.chances[0] == [0, 1, 0]).all()
    assert post.chances[1, 1] == 0
    drawn = np.array([post._draw() for _ in range(200)])
    assert set(drawn[:, 0]) == {1}
    assert set(drawn[:, 1]) <= {0, 2}
