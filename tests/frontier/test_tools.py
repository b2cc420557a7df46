"""Merge, knee, hypervolume and distance of finished frontiers.

Representatives lose as little hypervolume as they say.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.frontier import (
    distance,
    dominated_area,
    hypervolume,
    knee,
    merge,
    reduce,
    representatives,
)
from tests import naive

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
def test_few_are_kept_and_no_more_is_lost_than_allowed(pairs, most, loss):
    points = reduce(*np.array(pairs, float).T)
    chosen = representatives(points, most, loss)
    assert {0, len(points) - 1} <= set(chosen.tolist())
    assert len(chosen) <= most or loss < 1.0
    assert max(losses(points, chosen)) <= loss + 1e-9
    if len(chosen) > max(most, 2):  # one more would lose too much
        least = min(max(losses(points, np.delete(chosen, i))) for i in range(1, len(chosen) - 1))
        assert least > loss - 1e-9 or max(losses(points, chosen)) + least > loss - 1e-9


@given(POINTS)
def test_the_area_is_the_hypervolume(pairs):
    points = reduce(*np.array(pairs, float).T)
    expected = hypervolume(points, (points.memory[-1], points.time[0]))
    assert dominated_area(points.memory, points.time) == pytest.approx(expected)


def test_shares_that_add_up_to_a_last_bit_more_than_all_leave_no_more_points_than_asked_for():
    points = reduce(*np.array([(1, 4), (2, 3), (3, 2), (4, 1)], float).T)
    assert representatives(points, 2, 1.0).tolist() == [0, 3]


def test_named_points_stay():
    points = reduce(np.arange(1.0, 101.0), np.arange(100.0, 0.0, -1.0))
    chosen = representatives(points, 5, 1.0, keep=(50, 51))
    assert {0, 50, 51, 99} <= set(chosen.tolist())
    assert len(chosen) == 5


points = st.lists(
    st.tuples(st.integers(1, 9).map(float), st.integers(1, 9).map(float)), min_size=1, max_size=9
)


def frontier(pairs):
    array = np.array(pairs, dtype=float).reshape(-1, 2)
    return reduce(array[:, 0], array[:, 1])


@given(st.lists(points, min_size=1, max_size=4))
def test_merge_keeps_the_origin_of_every_point(lists):
    fronts = [frontier(a) for a in lists]
    merged = merge(fronts)
    expected = naive.union([list(zip(f.memory, f.time, strict=True)) for f in fronts])
    assert list(zip(merged.memory, merged.time, strict=True)) == expected
    for p, (which, index) in enumerate(merged.origin):
        assert fronts[which].memory[index] == merged.memory[p]
        assert fronts[which].time[index] == merged.time[p]


def test_merge_of_nothing_is_empty():
    assert len(merge([])) == 0


def test_the_knee_is_the_point_below_the_chord():
    assert knee(frontier([(1, 100), (2, 10), (50, 9), (100, 1)])) == 1
    assert knee(frontier([(1, 1)])) == 0
    assert knee(frontier([(0, 5), (1, 1), (7, 0)])) in (0, 1, 2)
    with pytest.raises(ValueError, match="knee"):
        knee(frontier([]))


def test_a_zero_counts_as_a_thousandth_of_the_least_other_cost():
    """Six decades from there to 1000: 1 is half of the way, 31.6 half of those from 1 to 1000."""
    assert knee(frontier([(0, 1000), (1, 30), (1000, 1)])) == 1
    assert knee(frontier([(0, 1000), (1, 33), (1000, 1)])) == 0
    assert knee(frontier([(1, 1000), (30, 1), (1000, 0)])) == 1
    assert knee(frontier([(1, 1000), (33, 1), (1000, 0)])) == 0


def test_hypervolume_is_the_area_to_the_reference():
    assert hypervolume(frontier([(1, 3), (2, 1)]), (4, 4)) == pytest.approx(1 * 1 + 2 * 3)
    assert hypervolume(frontier([]), (4, 4)) == 0.0


@given(points, points)
def test_distance_is_the_worst_factor(a, b):
    f, g = frontier(a), frontier(b)
    worst = max(
        min(max(m / x, t / y) for m, t in zip(f.memory, f.time, strict=True))
        for x, y in zip(g.memory, g.time, strict=True)
    )
    assert distance(f, g) == pytest.approx(worst - 1)
    assert distance(f, f) == pytest.approx(0)


def test_distance_to_a_zero_cost():
    assert distance(frontier([(0, 2)]), frontier([(0, 1)])) == pytest.approx(1)
    assert distance(frontier([(1, 1)]), frontier([(0, 1)])) == np.inf
    with pytest.raises(ValueError, match="empty"):
        distance(frontier([]), frontier([(0, 1)]))
