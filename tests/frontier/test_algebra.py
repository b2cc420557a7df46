"""The algebra against its slow twins, from which its laws follow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensoropt.frontier import Frontier, product, reduce, union
from tensoropt.frontier.tools import segmented_staircase
from tests import naive

costs = st.one_of(st.integers(0, 8).map(float), st.just(float("inf")))
points = st.lists(st.tuples(costs, costs), max_size=12)


def frontier(pairs) -> Frontier:
    array = np.array(pairs, dtype=float).reshape(-1, 2)
    return reduce(array[:, 0], array[:, 1])


def pairs(f: Frontier):
    return list(zip(f.memory.tolist(), f.time.tolist(), strict=True))


@given(points)
def test_reduce_keeps_what_nothing_beats(a):
    f = frontier(a)
    assert pairs(f) == naive.reduce(a)
    assert all(a[i] == p for i, p in zip(f.origin[:, 1], pairs(f), strict=True))


@given(points, points)
def test_product_is_every_sum(a, b):
    f, g = frontier(a), frontier(b)
    both = product(f, g)
    assert pairs(both) == naive.product(pairs(f), pairs(g))
    for (i, j), p in zip(both.origin, pairs(both), strict=True):
        assert (f.memory[i] + g.memory[j], f.time[i] + g.time[j]) == p


@given(st.lists(points, max_size=4))
def test_union_is_the_frontier_of_all_points(lists):
    fronts = [frontier(a) for a in lists]
    both = union(fronts)
    assert pairs(both) == naive.union([pairs(f) for f in fronts])
    for (which, i), p in zip(both.origin, pairs(both), strict=True):
        assert pairs(fronts[which])[i] == p


@given(st.lists(points, min_size=1, max_size=5))
@example([[(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]])
def test_segmented_staircase_reduces_every_segment(lists):
    rows = sorted((e, m, t) for e, segment in enumerate(lists) for m, t in segment if m < np.inf)
    entry = np.array([r[0] for r in rows], np.int64)
    time = np.array([r[2] for r in rows], float)
    kept = segmented_staircase(entry, time)
    for e in range(len(lists)):
        best, expected = np.inf, []
        for row in rows:
            if row[0] == e:
                expected.append(row[2] < best or (best == np.inf and not expected))
                best = min(best, row[2])
        assert kept[entry == e].tolist() == expected


def test_bad_frontiers_are_refused():
    def made(memory, time):
        return Frontier(np.array(memory), np.array(time), np.zeros((2, 2), np.int32))

    for make, memory, time, words in (
        (reduce, [np.nan], [1.0], "NaN"),
        (reduce, [1.0, 2.0], [1.0], "one length"),
        (made, [2.0, 1.0], [1.0, 2.0], "reduce"),
        (made, [1.0, 1.0], [2.0, 1.0], "reduce"),
        (made, [1.0, 2.0], [1.0, 1.0], "reduce"),
        (made, [2.0], [1.0, 2.0], "memory"),
    ):
        with pytest.raises(ValueError, match=words):
            make(memory, time)


def test_nothing_united_or_multiplied_with_nothing_is_nothing():
    nothing = union([])
    assert len(nothing) == 0
    assert len(product(nothing, frontier([(1, 1)]))) == 0
