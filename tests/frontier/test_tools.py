"""Knee, hypervolume and distance of finished frontiers.

Representatives lose as little hypervolume as they say.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.frontier import distance, dominated_area, hypervolume, knee, reduce, representatives
from tests.frontier.test_algebra import frontier, pairs

POINTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=40)


def losses(points, chosen) -> list[float]:
    """Shares of hypervolume lost, in plain costs and in their logarithms."""
    found = []
    for scale in (lambda x: x, np.log):
        m, t = scale(points.memory), scale(points.time)
        whole = dominated_area(m, t)
        found.append(1 - dominated_area(m[chosen], t[chosen]) / whole if whole > 0 else 0.0)
    return found


@given(POINTS, st.integers(2, 12), st.sampled_from([0.0, 0.01, 0.2, 1.0]))
def test_few_are_kept_and_no_more_is_lost_than_allowed(costs, most, loss):
    points = frontier(costs)
    chosen = representatives(points, most, loss)
    assert {0, len(points) - 1} <= set(chosen.tolist())
    assert len(chosen) <= most or loss < 1.0
    assert max(losses(points, chosen)) <= loss + 1e-9
    if len(chosen) > max(most, 2):  # one more would lose too much
        least = min(max(losses(points, np.delete(chosen, i))) for i in range(1, len(chosen) - 1))
        assert least > loss - 1e-9 or max(losses(points, chosen)) + least > loss - 1e-9


@given(POINTS)
def test_the_area_is_the_hypervolume(costs):
    points = frontier(costs)
    expected = hypervolume(points, (points.memory[-1], points.time[0]))
    assert dominated_area(points.memory, points.time) == pytest.approx(expected)


def test_shares_that_add_up_to_a_last_bit_more_than_all_leave_no_more_points_than_asked_for():
    points = frontier([(1, 4), (2, 3), (3, 2), (4, 1)])
    assert representatives(points, 2, 1.0).tolist() == [0, 3]


def test_points_are_left_out_up_to_the_loss():
    points = frontier([(m, 4 - m) for m in range(5)])  # each inner one is a sixth of the area
    assert representatives(points, 2, 0.334).tolist() == [0, 2, 4]


def test_named_points_stay():
    points = reduce(np.arange(1.0, 101.0), np.arange(100.0, 0.0, -1.0))
    chosen = representatives(points, 5, 1.0, keep=(50, 51))
    assert {0, 50, 51, 99} <= set(chosen.tolist())
    assert len(chosen) == 5


costs = st.integers(1, 9).map(float)
points = st.lists(st.tuples(costs, costs), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("costs", "place"),
    [
        # The point below the chord.
        ([(1, 100), (2, 10), (50, 9), (100, 1)], 1),
        ([(1, 1)], 0),
        # A zero counts as a thousandth of the least other cost: six decades from there to 1000, so that 1 is
        # half of the way, and 31.6 half of those from 1 to 1000.
        ([(0, 1000), (1, 30), (1000, 1)], 1),
        ([(0, 1000), (1, 33), (1000, 1)], 0),
        ([(1, 1000), (30, 1), (1000, 0)], 1),
        ([(1, 1000), (33, 1), (1000, 0)], 0),
    ],
)
def test_the_knee(costs, place):
    assert knee(frontier(costs)) == place


def test_a_frontier_of_nothing_has_no_knee():
    with pytest.raises(ValueError, match="knee"):
        knee(frontier([]))


def test_hypervolume_is_the_area_to_the_reference():
    assert hypervolume(frontier([(1, 3), (2, 1)]), (4, 4)) == pytest.approx(1 * 1 + 2 * 3)
    assert hypervolume(frontier([]), (4, 4)) == 0.0


@given(points, points)
def test_distance_is_the_worst_factor(a, b):
    f, g = frontier(a), frontier(b)
    worst = max(min(max(m / x, t / y) for m, t in pairs(f)) for x, y in pairs(g))
    assert distance(f, g) == pytest.approx(worst - 1)
    assert distance(f, f) == pytest.approx(0)


def test_distance_to_a_zero_cost():
    assert distance(frontier([(0, 2)]), frontier([(0, 1)])) == pytest.approx(1)
    assert distance(frontier([(1, 1)]), frontier([(0, 1)])) == np.inf
    with pytest.raises(ValueError, match="empty"):
        distance(frontier([]), frontier([(0, 1)]))
