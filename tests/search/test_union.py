"""The union over several graphs equals searching each and merging."""

from __future__ import annotations

import numpy as np
import pytest

import tensoropt.search.auto as auto
from tensoropt.frontier import merge
from tensoropt.search import CostGraph, track_frontier, track_union
from tests import naive
from tests.search.graphs import Case, seeds_of


def cases(seed):
    made = [Case(10 * seed + i, "chain", 5, 4) for i in range(4)]
    return [case for case in made if naive.exhaustive(case.nodes, case.edges)]


@pytest.mark.parametrize("narrow", [0, 10**9])
def test_rivals_prune_nothing_that_the_union_needs(monkeypatch, narrow):
    monkeypatch.setattr(auto, "WORTH_NARROWING", narrow)
    for seed in seeds_of(0, 24):
        made = cases(seed)
        expected = merge([track_frontier(c.graph) for c in made])
        found = track_union(c.graph for c in made)
        assert found.exact
        # every graph has a grid of its own, so points may differ by its rounding
        for m, t in zip(expected.memory, expected.time, strict=True):
            assert ((found.memory <= m * (1 + 1e-9)) & (found.time <= t * (1 + 1e-9))).any()
            assert found.lower_bound(m * (1 + 1e-9)) <= t * (1 + 1e-9)
        for i in range(len(found)):
            cost = made[found.graph(i)].cost(found.strategy(i), found.options(i))
            assert np.allclose(cost, [found.memory[i], found.time[i]], rtol=1e-9, atol=0)
        assert found.lower_bound(found.memory[0] * 0.99 - 1) == np.inf
        assert (found.gap == 0).all()


def test_a_trimmed_union_is_certified():
    for seed in seeds_of(30, 42):
        made = cases(seed)
        exact = merge([track_frontier(c.graph) for c in made])
        found = track_union([c.graph for c in made], max_points=3)
        for m, t in zip(exact.memory, exact.time, strict=True):
            assert found.lower_bound(m) <= t * (1 + 1e-9)
        assert found.notes == ()


@pytest.mark.parametrize(("a", "b"), [(0.1, 0.6), (0.3, 0.6), (0.7, 1.2)])
def test_an_exact_union_is_its_own_bound_though_grids_differ(a, b):
    """The sum of a and b lies an ulp above what the other graph offers, and is faster."""
    alone, pair = CostGraph(), CostGraph()
    alone.add_operator("ab", [[[round(a + b, 1), 5.0]]])
    pair.add_operator("a", [[[a, 1.0]]])
    pair.add_operator("b", [[[b, 1.0]]])
    found = track_union([alone, pair])
    assert found.time.tolist() == [2.0]
    assert found.lower_bound(found.memory[0]) == 2.0
    assert (found.gap == 0).all()


def test_the_union_of_nothing_is_empty():
    assert len(track_union([])) == 0
    assert track_union([]).lower_bound(1.0) == np.inf
