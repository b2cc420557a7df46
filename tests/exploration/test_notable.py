"""The few points of a frontier that stand for all, and what each is called."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.cluster import load_cluster
from tensoropt.exploration.answer import answer
from tensoropt.exploration.notable import _NOTABLE, notable, unconstrained_words
from tensoropt.units import format_bytes
from tests.plan.explorations import point, small_exploration

GIB = 2.0**30


def frontier(costs: list[tuple[float, float]], **settings: object):
    """An exploration on cards of 80 GiB, of points of (GiB, seconds), which all split the batch."""
    points = tuple(point(memory * GIB, time_s, 0) for memory, time_s in sorted(costs))
    cluster = load_cluster("dgx-h100[2]").to_dict()
    return replace(small_exploration(), points=points, settings=settings, cluster=cluster)


def long(count: int = 200, **settings: object):
    return frontier([(m, 40 / m) for m in np.linspace(1, 79, count)], **settings)


@pytest.mark.parametrize("asked", [None, 30 * GIB, 24 * GIB])
def test_a_point_says_what_it_is_once(asked):
    found = long(memory_bytes=asked)
    named = notable(found)
    assert list(named) == sorted(named)
    assert len(named) <= _NOTABLE
    assert named[0] == ["leanest"]
    fitting = found.within(found.limit_bytes).tolist()
    assert named[fitting[-1]][0] == "fastest"  # never what does not fit
    assert found.knee in fitting
    assert "knee" in named[found.knee]


def test_the_fastest_of_each_family_has_its_name(monkeypatch):
    found = long()
    names = ["TP 8"] * 50 + ["DP 8 · ZeRO-2"] * 50 + ["DP 8"] * 100
    monkeypatch.setattr(type(found), "names", tuple(names))
    named = notable(found)
    assert "fastest ZeRO" in named[99]
    assert "fastest TP" in named[49]
    assert "DP" not in str(named)  # which is what is fastest of all


@given(st.sets(st.tuples(st.integers(1, 90), st.integers(1, 90)), max_size=40))
def test_few_points_are_all_there_and_of_many_never_more_than_few(costs):
    best, left = 91, []
    for memory, time_s in sorted(costs):
        if time_s < best:
            best = time_s
            left.append((memory, time_s))
    named = notable(frontier(left))
    assert len(named) == min(len(left), _NOTABLE) or len(left) > _NOTABLE >= len(named) >= 2
    assert set(named) <= set(range(len(left)))


def test_what_hardly_differs_from_the_point_before_is_not_shown():
    """Neither where memory is bought for no time, nor where time is for no memory."""
    found = frontier([(25, 9.0), (25.05, 8.0), (30, 7.0), (41, 6.99), (42, 6.98), (50, 5.0), (60, 4.0)])
    shown = set(notable(found))
    assert {0, 2, 5, 6} <= shown
    assert not {3, 4} & shown
    assert len(notable(frontier([(20 + n / 1000, 9 - n / 1000) for n in range(300)]))) < 5


def test_where_memory_is_no_constraint_five_points_are_enough():
    found = frontier([(m / 10, 40 / m) for m in range(1, 31)])
    needs = format_bytes(found.needs[-1])
    assert unconstrained_words(found) == f"Memory is no constraint: the fastest plan needs {needs} of 80 GiB."
    assert len(notable(found)) == 5
    assert {0, 29, found.knee} <= set(notable(found))
    assert unconstrained_words(frontier([(m, 40 / m) for m in range(1, 31)])) == ""
    assert unconstrained_words(frontier([(1, 1.0)], memory_bytes=GIB)) == ""


def test_the_recommended_point_is_among_them():
    found = long()
    assert "recommended" in notable(found)[answer(found).row]
