"""Certificates, trimming, threads, laziness: what the result promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tensoropt.search.order as order
import tensoropt.search.paper as paper
from tensoropt.search import CostGraph, TableTooLargeError, certify, track_frontier
from tensoropt.search.entangled import conditioning
from tensoropt.search.entangled.fixing import split
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.reduced_graph import reduce_graph
from tensoropt.search.shared import build_program
from tests import naive
from tests.search.graphs import SHAPES, Case, Twice, seeds_of
from tests.search.test_exhaustive import check


def cases(seed):
    made = [Case(10 * seed + i, "chain", 5, 4) for i in range(4)]
    return [case for case in made if case.truth]


def test_a_point_is_certified_against_all_graphs():
    """Every strategy of every graph, measured by what all of them together offer."""
    for seed in seeds_of(60, 72):
        made = cases(seed)
        truths = [case.truth for case in made]
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


def clique(costs, table_of) -> Twice:
    """A graph of all pairs of operators with these costs."""
    made = Twice()
    for v, of in enumerate(costs):
        made.add_operator(v, np.array(of))
    for a, b in itertools.combinations(range(len(costs)), 2):
        made.add_edge(a, b, table_of(a, b))
    return made


@pytest.fixture
def few_tried(monkeypatch):
    """Nearly all operators of a clique are fixed, to few configurations."""
    monkeypatch.setattr(order.greedy_order, "__defaults__", (1,))
    monkeypatch.setattr(paper, "_ASSIGNMENTS", 1)


def chain(operators: int, configurations: int, seed: int = 0) -> CostGraph:
    rng = np.random.default_rng(seed)
    graph = CostGraph()
    for i in range(operators):
        graph.add_operator(i, rng.random((configurations, 2)))
    for i in range(operators - 1):
        graph.add_edge(i, i + 1, rng.random((configurations, configurations, 2)))
    return graph


@pytest.mark.parametrize("shape", SHAPES)
def test_trimmed_frontiers_are_achievable_and_certified(shape):
    for seed in seeds_of(100, 108):
        for settings in ({"max_points": 3}, {"epsilon": 0.05}, {"max_points": 2, "method": "ldp"}):
            found = check(Case(seed, shape, 6, 4), **settings)
            if found is not None and "max_points" in settings:
                assert len(found) <= settings["max_points"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("largest", [1, 4])
def test_fixed_operators_cost_exactness_never_truth(monkeypatch, shape, largest):
    monkeypatch.setattr(order.greedy_order, "__defaults__", (largest,))
    monkeypatch.setattr(paper, "_ASSIGNMENTS", 2)
    monkeypatch.setattr(conditioning, "_FEW_ASSIGNMENTS", 3 * largest - 2)
    for seed in seeds_of(200, 212):
        found = check(Case(seed, shape))
        if found is not None and not found.exact:
            assert "heuristic elimination" in found.notes[0]
        check(Case(seed, shape), epsilon=0.3)


@pytest.mark.parametrize("unit", [0, 8])
@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_below_the_least_memory_the_bound_is_infinite_though_operators_are_fixed(few_tried, method, unit):
    """Whatever is tried, the copies of fixed operators may not promise what no strategy can have."""
    inexact = 0

    def whole(costs):
        """All multiples of a unit that is not 1, or anything at all."""
        return np.rint(costs * 100) * unit if unit else costs

    for seed in seeds_of(0, 2):
        rng = np.random.default_rng(seed)
        costs = [whole(rng.random((3, 2)) * 0.1) for _ in range(5)]
        made = clique(costs, lambda a, b, rng=rng: whole(rng.random((3, 3, 2))))
        found = track_frontier(made.graph, method=method)
        inexact += not found.exact
        least, slowest = made.truth[0]
        assert found.lower_bound(least * (1 - 1e-9)) == np.inf
        assert found.lower_bound(least) <= slowest
        assert np.isfinite(found.gap).all()
    assert inexact


@pytest.mark.parametrize("method", ["auto", "elimination"])
def test_possible_strategies_are_found_among_many_impossible_ones(few_tried, method):
    for seed in seeds_of(0, 15):
        rng = np.random.default_rng(seed)
        secret = rng.integers(0, 3, 5)

        def table_of(a, b, rng=rng, secret=secret):
            table = np.where(rng.random((3, 3, 1)) < 0.6, np.inf, rng.random((3, 3, 1))) * np.ones(2)
            table[secret[a], secret[b]] = 1.0
            return table

        made = clique([[(1.0, float(k)) for k in range(3)]] * 5, table_of)
        found = track_frontier(made.graph, method=method)
        for m, t in made.truth:
            assert found.lower_bound(m) <= t * (1 + 1e-9)
        more = 1 + 1e-9
        for m, t in zip(found.memory, found.time, strict=True):
            assert any(x <= m * more and y <= t * more for x, y in made.truth)


def test_an_impossible_graph_is_refused_though_operators_are_fixed(few_tried):
    def table_of(a, b):
        table = np.full((3, 3, 2), np.inf)
        table[(np.arange(3) + (a == 2)) % 3, np.arange(3)] = 1.0
        return table

    with pytest.raises(ValueError, match="no strategy is possible"):
        track_frontier(clique([np.ones((3, 2))] * 4, table_of).graph)


@pytest.mark.parametrize("settings", [{}, {"epsilon": 0.01}, {"max_points": 9}, {"method": "ldp"}])
def test_the_bytes_do_not_depend_on_threads_or_on_the_run(monkeypatch, settings):
    monkeypatch.setattr("tensoropt.search.engine._INLINE_WORK", 0)
    graph = chain(12, 5)
    runs = [track_frontier(graph, threads=n, **settings) for n in (1, 2, 5, 2)]
    for run in runs[1:]:
        assert run.memory.tobytes() == runs[0].memory.tobytes()
        assert run.time.tobytes() == runs[0].time.tobytes()
        assert run.strategy(len(run) // 2) == runs[0].strategy(len(run) // 2)
        assert run.options(0) == runs[0].options(0)


@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_points_that_only_rounding_tells_apart_are_one(method):
    """0.1 + 0.2 lies an ulp beside 0.3: an exact frontier stays its own bound."""
    found_any = 0
    for seed in seeds_of(0, 30):
        rng = np.random.default_rng(seed)
        graph = CostGraph()
        for v in range(4):
            graph.add_operator(v, np.round(rng.random((4, 2)), 1))
        for v in range(3):
            graph.add_edge(v, v + 1, np.round(rng.random((4, 4, 2)), 1))
        found = track_frontier(graph, method=method)
        assert found.exact
        assert (np.diff(found.memory) > 1e-9).all()
        assert (np.diff(found.time) < -1e-9).all()
        assert [found.lower_bound(m) for m in found.memory] == found.time.tolist()
        assert (found.gap == 0).all()
        tenths = np.round(np.stack([found.memory, found.time]) * 10)
        assert np.allclose(tenths, np.stack([found.memory, found.time]) * 10)
        found_any += len(found) > 1
    assert found_any


def test_an_unpruned_search_stops_before_it_outgrows_memory(monkeypatch):
    monkeypatch.setattr("tensoropt.search.engine.memory_allowance", lambda: 10_000)
    with pytest.raises(TableTooLargeError, match="max_points"):
        track_frontier(chain(20, 6), method="ldp")
    found = track_frontier(chain(20, 6))
    assert not found.exact
    assert "not searched to the end" in found.notes[0]
    assert len(found) > 2


def test_a_table_that_would_not_fit_is_announced_before_it_is_made(monkeypatch):
    ring = chain(4, 6)
    ring.add_edge(0, 3, np.random.default_rng(1).random((6, 6, 2)))
    monkeypatch.setattr("tensoropt.search.program._WORTH_CHECKING", 30)
    monkeypatch.setattr("tensoropt.search.program.memory_allowance", lambda: 1_000)
    with pytest.raises(TableTooLargeError, match=r"over 2 operators \(.*36 entries.*half of the free"):
        track_frontier(ring, method="elimination")
    parts = split(reduce_graph(FlatTables.of(ring)), order.Order((), fixed=(0,), largest=0))
    with pytest.raises(TableTooLargeError, match=r"over 2 operators \(3\)"):  # the other one is a copy of 0
        build_program(parts.reduced, order.Order((3,), fixed=(), largest=0))
