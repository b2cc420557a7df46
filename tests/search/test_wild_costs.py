"""Costs of 27 decades in one graph, against sums of rational numbers, which round nothing."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from fractions import Fraction
from functools import cache, cached_property

import numpy as np
import pytest

import tensoropt.search.paper as paper
import tensoropt.search.shared as shared
import tensoropt.search.within as within
from tensoropt.costs.cost_graph import LEAST_COST, MOST_COST
from tensoropt.search import CostGraph, NoStrategyError, track_frontier
from tests import naive
from tests.search.graphs import seeds_of

NEAR = Fraction(1, 10**9)
"""Relative. A point is rounded by up to 4e-10 of its size, and of two such points one can beat the other."""


class Wild:
    """A random graph of up to four operators; costs are 0, impossible, or 1e-12 to 1e15."""

    def __init__(self, seed: int):
        draw = self.draw = random.Random(seed)
        self.operators = [
            [self._options(3) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 4))
        ]
        pairs = itertools.combinations(range(len(self.operators)), 2)
        self.edges = [(a, b, self._table(a, b)) for a, b in pairs if draw.random() < 0.6]

    def _cost(self) -> float:
        kind = self.draw.random()
        if kind < 0.12:
            return 0.0 if kind < 0.08 else math.inf
        if kind < 0.7:
            return 10.0 ** self.draw.uniform(-12, 15)
        return self.draw.randint(1, 9) * 10.0 ** self.draw.randint(-12, 15)  # many equal ones

    def _options(self, most: int) -> list[tuple[float, float]]:
        return [(self._cost(), self._cost()) for _ in range(self.draw.randint(1, most))]

    def _table(self, a: int, b: int) -> list[list[list[tuple[float, float]]]]:
        return [[self._options(2) for _ in self.operators[b]] for _ in self.operators[a]]

    def graph(self) -> CostGraph:
        graph = CostGraph()
        for v, costs in enumerate(self.operators):
            graph.add_operator(v, [np.array(options) for options in costs])
        for a, b, table in self.edges:
            graph.add_edge(a, b, [[np.array(options) for options in row] for row in table])
        return graph

    def options_of(self, strategy) -> list[list[tuple[float, float]]]:
        """The options of every operator and edge under a strategy."""
        of_edges = [table[strategy[a]][strategy[b]] for a, b, table in self.edges]
        return [*(costs[strategy[v]] for v, costs in enumerate(self.operators)), *of_edges]

    @cached_property
    def truth(self) -> list[tuple[Fraction, Fraction]]:
        found: set[tuple[Fraction, Fraction]] = set()
        for strategy in itertools.product(*(range(len(costs)) for costs in self.operators)):
            points = [(Fraction(0), Fraction(0))]
            for options in self.options_of(strategy):
                possible = [p for p in options if math.isfinite(p[0]) and math.isfinite(p[1])]
                points = naive.reduce(
                    (m + Fraction(x), t + Fraction(y)) for m, t in points for x, y in possible
                )
            found.update(points)
        return naive.reduce(found)


wild = cache(Wild)


def covered(point, points):
    """Whether one of ``points`` is no worse than ``point``, but for rounding."""
    m, t = (value * (1 + NEAR) for value in point)
    return any(x <= m and y <= t for x, y in points)


def check(seed: int, method: str = "auto") -> None:
    case = wild(seed)
    truth = case.truth
    if not truth:
        with pytest.raises(NoStrategyError):
            track_frontier(case.graph(), method=method)
        return
    found = track_frontier(case.graph(), method=method)
    points = [(Fraction(m), Fraction(t)) for m, t in zip(found.memory, found.time, strict=True)]
    assert found.exact
    assert all(covered(p, points) for p in truth), "a point is missing"
    assert all(covered(p, truth) for p in points), "a point is better than any strategy"
    for m, _ in truth:
        for budget in (float(m), float(m * Fraction(1001, 1000))):
            bound = found.lower_bound(budget)
            within = [t for x, t in truth if x <= Fraction(budget)]
            nearly = [t for x, t in truth if x <= Fraction(budget) * (1 + 2 * NEAR)]
            assert not within or Fraction(bound) <= min(within) * (1 + NEAR)
            assert bound == math.inf or Fraction(bound) >= min(nearly) * (1 - NEAR)
    for i, point in enumerate(points):
        taken = found.options(i)
        keys = [*range(len(case.operators)), *((a, b, 0) for a, b, _ in case.edges)]
        chosen = [
            options[taken[key]] for key, options in zip(keys, case.options_of(found.strategy(i)), strict=True)
        ]
        total = [sum(Fraction(option[side]) for option in chosen) for side in (0, 1)]
        assert covered(point, [total])
        assert covered(total, [point])


@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_wild_costs_lose_no_point(method):
    for seed in seeds_of(0, 60):
        check(seed, method)


def test_wild_costs_lose_no_point_to_pruning(monkeypatch):
    """Small graphs are searched without bounds unless they are told to count as large."""
    monkeypatch.setattr(shared, "_FEW_SUMS", 0)
    monkeypatch.setattr(within, "_WORTH_NARROWING", 1.0 - 1e-9)
    for seed in seeds_of(1000, 1050):
        check(seed)


def test_a_graph_that_was_taken_for_small_is_searched_with_bounds(monkeypatch, few_sums):
    monkeypatch.setattr(shared, "_FEW_SUMS", few_sums)
    monkeypatch.setattr(shared, "_MORE_SUMS", 50)
    for seed in seeds_of(1000, 1020):
        check(seed)


def test_thinned_wild_costs_are_bounded(monkeypatch):
    """Also options that the grid of costs makes equal in memory, which a large graph may have."""
    monkeypatch.setattr(shared, "_FEW_SUMS", 0)
    for seed in seeds_of(0, 60):
        with contextlib.suppress(NoStrategyError):
            thinned = track_frontier(Wild(seed).graph(), max_points=3)
            whole = track_frontier(Wild(seed).graph())
            for memory, time_s in zip(whole.memory, whole.time, strict=True):
                assert thinned.lower_bound(memory) <= time_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(2000, 6000, 500))
def test_many_wild_graphs(start):
    for seed in seeds_of(start, start + 500):
        check(seed)


@pytest.mark.parametrize("points", [
    [(1000.1, 1e-6), (1e9 + 0.1, 1e-9), (1e15, 1e-12), (1.0, 1e12)],
    [(1.5, 9.0), (0.5 / paper._RESOLUTION, 5.0), (2.0**51, 1.0)],
    [(1.0, 2.0**51), (5.0, 0.5 / paper._RESOLUTION), (9.0, 1.5)],
], ids=["both", "memory", "time"])  # fmt: skip
@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_what_is_too_small_for_the_first_grid_is_found_on_another(method, points):
    """One grid takes 1e-6, 1e-9 and 1e-12 s for nothing beside 1e12 s, so the leanest seems best. Others move
    1.5 by a half, and the second point is the least for which that is close enough."""
    graph = CostGraph()
    graph.add_operator("a", [np.array(points)])
    found = track_frontier(graph, method=method)
    assert found.exact
    assert list(zip(found.memory, found.time, strict=True)) == [
        pytest.approx(point, rel=1e-9) for point in sorted(points)
    ]
    for (memory, time_s), (more, _) in itertools.pairwise(sorted(points)):
        for budget in (memory * 1.0001, more * 0.9999):
            assert found.lower_bound(budget) == pytest.approx(time_s, rel=1e-9)


@pytest.mark.parametrize("cost", [1e-310, 1e308, LEAST_COST / 2, MOST_COST * 2])
def test_a_cost_that_floats_cannot_work_with_is_named(cost):
    with pytest.raises(ValueError, match=r"operator 'a'.*neither 0 nor between"):
        CostGraph().add_operator("a", [[[1.0, cost]]])


def test_sums_that_would_overflow_are_refused():
    """They gave an empty frontier that called itself exact."""
    graph = CostGraph()
    for name in "ab":
        graph.add_operator(name, [[[1.0, MOST_COST]]])
    with pytest.raises(ValueError, match=r"costs in time of 2 operators and edges can add up to 6.55e\+150"):
        track_frontier(graph)


def test_the_largest_and_the_smallest_costs_are_searched():
    graph = CostGraph()
    graph.add_operator("a", [[[1e150, 1e-150]], [[1e-150, 1e150]], [[1.0, 1.0]]])
    graph.add_operator("b", [[[2e-150, 5e-150]], [[1e20, 1e-150]]])
    found = track_frontier(graph)
    assert found.exact
    assert found.memory.tolist() == pytest.approx([3e-150, 1.0, 1e150], rel=1e-9)
    assert found.time.tolist() == pytest.approx([1e150, 1.0, 2e-150], rel=1e-9)


def test_a_budget_that_is_no_number_is_refused():
    graph = CostGraph()
    graph.add_operator("a", [[[1.0, 1.0]]])
    with pytest.raises(ValueError, match="budget is NaN"):
        track_frontier(graph).lower_bound(math.nan)


@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
def test_a_megabyte_beside_eight_hundred_terabytes(method):
    """The large entry is the fastest (both ends matter), then beaten (it must not spoil the grid)."""
    for fast in (1e-9, 9.0):
        graph = CostGraph()
        graph.add_operator("a", [[[1e6 + 0.1, 1.0 + 1e-12]], [[8e14 + 0.3, fast]]])
        graph.add_operator("b", [[[0.7, 0.1]], [[0.3, 0.2]]])
        graph.add_edge("a", "b", np.array([[[0.0, 0.3], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1e-7]]]))
        found = track_frontier(graph, method=method)
        assert found.exact
        assert found.memory[0] == pytest.approx(1e6 + 0.4, rel=1e-14)
        assert found.time[0] == pytest.approx(1.2 + 1e-12, rel=1e-14)
        if fast < 1:
            assert found.memory[-1] == pytest.approx(8e14 + 1, rel=1e-14)
            assert found.time[-1] == pytest.approx(0.1 + 1e-9, rel=1e-12)
        assert found.lower_bound(1e6 + 0.4 - 1e-6) == np.inf


def test_wild_costs_within_a_gap_are_certified_whatever_the_threads():
    for seed in seeds_of(0, 24):
        case = wild(seed)
        if not case.truth:
            continue
        found, alone = (track_frontier(case.graph(), threads=n, epsilon=0.01) for n in (3, 1))
        assert found.memory.tobytes() == alone.memory.tobytes()
        assert found.time.tobytes() == alone.time.tobytes()
        for m, t in case.truth:
            assert Fraction(found.lower_bound(float(m))) <= t * (1 + NEAR)
            assert found.time[found.memory <= float(m * (1 + NEAR))].min() <= float(t * (1 + NEAR)) * 1.01
