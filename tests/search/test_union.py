"""The union over several graphs equals searching each and merging."""

from __future__ import annotations

import numpy as np
import pytest

import tensoropt.search.exact as exact
from tensoropt.frontier import merge
from tensoropt.search import CostGraph, certify, track_frontier
from tests import naive
from tests.search.graphs import Case, seeds_of
from tests.search.union_search import track_union


def cases(seed):
    made = [Case(10 * seed + i, "chain", 5, 4) for i in range(4)]
    return [case for case in made if naive.exhaustive(case.nodes, case.edges)]


@pytest.mark.parametrize("narrow", [0, 10**9])
def test_rivals_prune_nothing_that_the_union_needs(monkeypatch, narrow):
    monkeypatch.setattr(exact, "WORTH_NARROWING", narrow)
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


def test_a_point_is_certified_against_all_graphs():
    """Every strategy of every graph, measured by what all of them together offer."""
    for seed in seeds_of(60, 84):
        made = cases(seed)
        truths = [naive.exhaustive(case.nodes, case.edges) for case in made]
        everything = naive.union(truths)
        candidates = np.array([point for truth in truths for point in truth])
        for settings in ({}, {"max_points": 3}):
            parts = [track_frontier(case.graph, **settings) for case in made]
            gap, exact = certify(parts, candidates[:, 0], candidates[:, 1])
            for (memory, time), of_point, proven in zip(candidates, gap, exact, strict=True):
                best = naive.lower_bound(everything, memory * (1 + 1e-9))
                assert np.isinf(of_point) or time <= best * (1 + of_point) * (1 + 2e-9)
                on_it = any(np.allclose(point, (memory, time), rtol=2e-9, atol=0) for point in everything)
                assert on_it or not proven
                if not settings:
                    assert proven == on_it
                    assert (of_point == 0) == (time <= best * (1 + 2e-9))


def test_a_point_that_is_as_fast_with_more_memory_is_not_exact():
    graphs = [CostGraph(), CostGraph()]
    graphs[0].add_operator("a", [[[2.0, 3.0]]])
    graphs[1].add_operator("a", [[[1.0, 3.0]], [[0.0, 9.0]]])
    parts = [track_frontier(graph) for graph in graphs]
    gap, exact = certify(parts, np.array([2.0, 1.0, 0.0, 0.5]), np.array([3.0, 3.0, 9.0, 12.0]))
    assert gap.tolist() == pytest.approx([0.0, 0.0, 0.0, 1 / 3])
    assert exact.tolist() == [False, True, True, False]
