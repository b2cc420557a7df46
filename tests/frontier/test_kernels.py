"""Every kernel against its slow twin, ties and infinite limits included."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensoropt.frontier import kernels
from tests import naive

number = st.integers(0, 9).map(float)
staircase = st.lists(st.tuples(number, number), max_size=8).map(naive.reduce)
LONG = [([(m, 39.0 - m) for m in range(40)], [(0.0, 0.0)])]
"""More than one block of points."""


def arrays(front):
    array = np.array(front, dtype=float).reshape(-1, 2)
    return np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, 1])


def flat(fronts):
    offsets = np.cumsum([0, *(len(f) for f in fronts)]).astype(np.int64)
    return offsets, *arrays([p for f in fronts for p in f])


def scratch(size=1):
    return (np.empty(size), np.empty(size), np.empty(size, np.int32))


@given(staircase, staircase)
def test_merge_runs_is_the_union_of_two(a, b):
    m, t = arrays([*a, *b])
    k = np.array([0] * len(a) + [1] * len(b), np.int32)
    end = kernels._merge_runs(m, t, k, 0, len(a), len(m), *scratch(len(a) + 1))
    assert list(zip(m[:end], t[:end], strict=True)) == naive.union([a, b])
    assert all(p in (a, b)[w] for p, w in zip(zip(m[:end], t[:end], strict=True), k[:end], strict=True))
    assert all(w == 0 for p, w in zip(zip(m[:end], t[:end], strict=True), k[:end], strict=True) if p in a)


@given(
    st.lists(st.tuples(staircase, staircase), max_size=4),
    st.lists(st.tuples(number, st.one_of(number, st.just(np.inf), st.just(-np.inf))), max_size=4),
)
@example(LONG, [(0.0, 30.0), (20.0, 10.0), (35.0, 1.0)])
@example(LONG, [(0.0, 0.0)])
def test_union_of_products_under_a_limit(pairs, limit):
    limit = naive.descending(limit)
    loff, lm, lt = flat([a for a, _ in pairs])
    roff, rm, rt = flat([b for _, b in pairs])
    index = np.arange(len(pairs))
    limit_m, limit_t = arrays(limit)
    n, m, t, k, *_ = kernels.union_of_products(
        index,
        index,
        loff,
        lm,
        lt,
        roff,
        rm,
        rt,
        limit_m,
        limit_t,
        *scratch(),
        *scratch(),
        np.empty(64, np.int64),
    )
    found = list(zip(m[:n].tolist(), t[:n].tolist(), strict=True))
    assert found == naive.union_of_products(pairs, limit)
    for p, label in zip(found, k[:n].tolist(), strict=True):
        assert p in naive.product(*pairs[label])


@given(st.lists(number, max_size=6).map(sorted), number)
def test_locate_finds_the_last_breakpoint_at_or_below(breaks, value):
    expected = max((i for i, b in enumerate(breaks) if b <= value), default=-1)
    assert kernels._locate(np.array(breaks, float), value) == expected


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 7, 12])
def test_thin_keeps_the_point_nearest_the_hull_of_every_stretch(wanted):
    rng = np.random.default_rng(wanted)
    for n, most in ((0, 9), (1, 9), (2, 9), (5, 9), (8, 9), *[(13, 20), (30, 1000)] * 3):
        m = np.sort(rng.choice(most, n, replace=False)).astype(float)
        t = np.sort(rng.choice(most, n, replace=False))[::-1].astype(float)
        chosen = np.empty(n, np.int64)
        kept = kernels.thin(m, t, n, wanted, chosen, np.empty(n, np.int64))
        assert chosen[:kept].tolist() == naive.thin(list(zip(m, t, strict=True)), wanted)


def test_of_points_that_the_grid_made_equal_in_memory_the_fastest_stays():
    m, t, chosen = np.array([0.0, 0.0, 0.0, 1.0]), np.array([5.0, 4.0, 3.0, 0.0]), np.empty(4, np.int64)
    assert kernels.thin(m, t, 4, 3, chosen, np.empty(4, np.int64)) == 3
    assert chosen[:3].tolist() == [0, 2, 3]


@given(staircase, staircase)
def test_find_pair_finds_the_parents_of_every_sum(a, b):
    for x, y in naive.product(a, b):
        i, j = kernels.find_pair(*arrays(a), *arrays(b), x, y)
        assert (a[i][0] + b[j][0], a[i][1] + b[j][1]) == (x, y)
    assert kernels.find_pair(*arrays(a), *arrays(b), -1.0, -1.0) == (-1, -1)
