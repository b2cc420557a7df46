"""Representatives lose as little hypervolume as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.frontier import dominated_area, hypervolume, reduce, representatives

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
