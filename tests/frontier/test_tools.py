"""Merge, knee, hypervolume and distance of finished frontiers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.frontier import distance, hypervolume, knee, merge, reduce
from tests import naive

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
