"""Scalar passes, hull and limits against exhaustive search: bounds are true, and as tight as they claim.

Pruning targets lie below what is known and above its hull; passes pruned by them lose nothing.
"""

from __future__ import annotations

import numpy as np
import pytest

import tensoropt.search.exact as exact
from tensoropt.frontier import Frontier, merge, reduce
from tensoropt.search import CostGraph, track_frontier
from tensoropt.search.bounds import looseness, pruning_target
from tensoropt.search.engine import Corners, corners_of, envelope, least_time, reachable
from tensoropt.search.exact import build_program, gaps, seeds
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.hull import Hull, HullSearch, flatten, power_of_two
from tensoropt.search.order import greedy_order, paper_order
from tensoropt.search.reduced_graph import reduce_graph
from tests import naive
from tests.search.graphs import SHAPES, Case, seeds_of
from tests.search.test_exhaustive import check


def time_within(points, memory):
    return naive.lower_bound(list(zip(points.memory.tolist(), points.time.tolist(), strict=True)), memory)


@pytest.mark.parametrize("seed", range(20))
def test_an_aim_lies_between_hull_and_known(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    known = reduce(rng.random(n) ** 3, rng.random(n) ** 2 * (seed % 3 > 0))
    goal = pruning_target(known, 0.1)
    assert (np.diff(goal.memory) > 0).all()
    assert (np.diff(goal.time) < 0).all()
    assert goal.time[-1] == known.time[-1]
    for m, t in zip(goal.memory, goal.time, strict=True):
        assert t <= time_within(known, m)
        chords = [t]
        for i in range(len(known)):
            for j in range(i + 1, len(known)):
                a, b = known.memory[i], known.memory[j]
                if a <= m <= b:
                    share = (m - a) / (b - a)
                    chords.append(known.time[i] + share * (known.time[j] - known.time[i]))
        assert t >= min(chords) * (1 - 1e-12) or len(chords) == 1
    assert pruning_target(known, 1e9).time.tolist() == known.time.tolist()


def test_looseness_of_a_straight_line_and_of_one_point():
    assert looseness(reduce([1.0], [1.0])) == 0
    coarse, fine = (np.linspace(1, 2, n) for n in (5, 50))
    assert looseness(reduce(coarse, 3 - coarse)) > 5 * looseness(reduce(fine, 3 - fine)) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_targeted_passes_lose_nothing(monkeypatch, shape):
    monkeypatch.setattr(exact, "FEW_PAIRS", 0)
    monkeypatch.setattr(exact, "TIGHT", -1.0)
    monkeypatch.setattr(exact, "COARSE_POINTS", 3)
    for seed in seeds_of(700, 710):
        found = check(Case(seed, shape, 6, 4))
        assert found is None or found.exact
        check(Case(seed, shape, 6, 4), epsilon=0.02)


def test_a_targeted_pass_happens_where_seeds_are_loose(monkeypatch, caplog):
    monkeypatch.setattr(exact, "FEW_PAIRS", 0)
    caplog.set_level("DEBUG", logger="tensoropt.search.exact")
    rng = np.random.default_rng(1)
    graph = CostGraph()
    for i in range(12):
        graph.add_operator(i, rng.random((8, 2)))
    for i in range(11):
        graph.add_edge(i, i + 1, rng.random((8, 8, 2)))
    assert track_frontier(graph).exact
    assert "targeted pass, 256 points per entry" in caplog.text


def prepared(case):
    reduced = reduce_graph(FlatTables.of(case.graph))
    program = build_program(reduced, greedy_order(reduced, 0.1))
    search = HullSearch(program, flatten(program))
    return reduced, program, search, search.find_hull(12)


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_are_the_least_cost_through_every_class(shape):
    for seed in seeds_of(400, 406):
        case = Case(seed, shape, 4, 3)
        reduced, program, search, hull = prepared(case)
        if hull is None:
            continue
        inside, outside = search.messages()
        for w in range(0, len(hull.value), 3):
            best, through = naive.scalar_values(case.nodes, case.edges, hull.weight_m[w], hull.weight_t[w])
            assert hull.value[w] == pytest.approx(best, rel=1e-9)
            for v, name in enumerate(case.graph.names):
                leaf = reduced.leaves[reduced.node_leaf[v]]
                first = int(program.base[reduced.node_leaf[v]])
                for c in range(reduced.domains[v]):
                    configurations = leaf.configuration[leaf.offsets[c] : leaf.offsets[c + 1]]
                    least = min(through[name, int(k)] for k in configurations)
                    # equal operators share a table, whose bound is the least over its uses
                    assert inside[first + c, w] + outside[first + c, w] <= least * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize("shape", SHAPES)
def test_hull_and_crossovers_are_real_strategies(shape):
    for seed in seeds_of(500, 508):
        case = Case(seed, shape, 6, 4)
        reduced, _, _, hull = prepared(case)
        if hull is None:
            continue
        for source in seeds(reduced, hull):
            for i in range(len(source.memory)):
                chosen = source.rebuild(np.array([i]))
                cost = case.cost(chosen.strategy(0), chosen.options_of(0))
                assert np.allclose(cost, [source.memory[i], source.time[i]], rtol=1e-9, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_strategy_lies_below_a_bound_and_none_on_the_frontier_is_unreachable(shape):
    for seed in seeds_of(600, 606):
        case = Case(seed, shape, 4, 3)
        reduced, program, search, hull = prepared(case)
        if hull is None:
            continue
        truth = naive.exhaustive(case.nodes, case.edges)
        for m, t in truth:
            assert hull.bound(m + reduced.memory_tolerance) <= t * (1 + 1e-9)
        known = merge(seeds(reduced, hull))
        corners = corners_of(hull, known.memory, known.time, 4)
        inside, outside = search.messages()
        root = int(program.base[program.logical[program.root].table])
        assert reachable(inside[root], outside[root], corners.height, corners.roof)


def test_roofs_of_neighbouring_corners_change_no_answer():
    rng = np.random.default_rng(0)
    answers = set()
    for _ in range(300):
        lines, count = int(rng.integers(1, 5)), int(rng.integers(1, 90))
        height = np.cumsum(rng.random((lines, count)) - 0.5, axis=1) + 2.0
        corners = Corners(np.arange(count), -np.arange(count), height, np.ones(lines), np.ones(lines))
        inside, outside = rng.random((2, lines)) * 2.0
        expected = bool((inside[:, None] + outside[:, None] <= height).all(axis=0).any())
        assert reachable(inside, outside, height, corners.roof) == expected
        answers.add(expected)
    assert answers == {True, False}


def test_a_point_on_a_corner_is_reachable_however_far_above_the_line():
    """The sums of two halves round differently from the corner's, in proportion to themselves."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        weight_t = np.array([0.0, *np.sort(10.0 ** rng.uniform(-9, 0, 4)), 1.0])
        weight_m = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
        line = Hull(weight_m, weight_t, np.full(6, 1e-9), np.zeros(0), np.zeros(0), ())
        (m, t), (other_m, other_t) = rng.random((2, 2)) * [1e8, 1.0]
        corners = corners_of(line, np.array([0.0, m + other_m]), np.array([t + other_t, 0.0]), 4)
        inside, outside = weight_m * m + weight_t * t, weight_m * other_m + weight_t * other_t
        assert reachable(inside, outside, corners.height, corners.roof)


def test_the_envelope_is_the_highest_line():
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(2, 9))
        ratio = np.sort(rng.random(n))
        weight_t, weight_m = ratio, 1 - ratio
        weight_t[0], weight_m[-1] = 0.0, 0.0
        values = rng.random(n)
        slope, level, start = np.empty(n), np.empty(n), np.empty(n)
        size = envelope(values, weight_m, weight_t, slope, level, start)
        for x in rng.random(20) * 3 - 1:
            expected = max((values[w] - weight_m[w] * x) / weight_t[w] for w in range(n) if weight_t[w] > 0)
            assert least_time(x, size, slope, level, start) == pytest.approx(expected)


@pytest.mark.parametrize("values", [(5.0, 4.0, 4.5), (4.0, 5.0, 4.5), (4.5, 4.0, 5.0), (5.0, 5.0, 5.0)])
def test_of_lines_with_equal_weights_the_highest_counts(values):
    weight_m, weight_t = np.array([1.0, *[0.5] * 3, 0.0]), np.array([0.0, *[0.5] * 3, 1.0])
    slope, level, start = (np.full(5, np.nan) for _ in range(3))
    size = envelope(np.array([1.0, *values, 2.0]), weight_m, weight_t, slope, level, start)
    assert size == 2
    assert slope[:2].tolist() == [1.0, 0.0]
    assert level[:2] == pytest.approx([10.0, 2.0])
    assert start[:2] == pytest.approx([-np.inf, 8.0])


def test_gaps_are_how_much_faster_another_strategy_could_be():
    """Bounds: 10 bytes at least, memory + time at least 40, 5 s at least. Within 30 bytes 10 s are possible
    and 40 are known, within any number 5 and 10."""
    lines = np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.5, 1.0])
    hull = Hull(*lines, np.array([10.0, 20.0, 5.0]), np.zeros(1), np.zeros(1), ())
    origin = np.zeros((2, 2), np.int32)
    known = Frontier(np.array([10.0, 30.0]), np.array([40.0, 10.0]), origin)
    assert gaps(known, hull) == pytest.approx((2.0, 3.0))
    leaner_may_exist = Frontier(np.array([10.5, 30.0]), np.array([40.0, 10.0]), origin)
    assert gaps(leaner_may_exist, hull) == (np.inf, np.inf)
    tight = Frontier(np.array([10.0, 35.0]), np.array([5.0 + 1e-12, 5.0]), origin)
    assert gaps(tight, hull)[1] < 1e-12


@pytest.mark.parametrize(
    ("value", "power"), [(0.0, 1.0), (3.0, 4.0), (4.0, 8.0), (0.3, 0.5), (1e-9, 2.0**-29), (5e10, 2.0**36)]
)
def test_scales_are_powers_of_two(value, power):
    assert power_of_two(value) == power


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ends_of_the_hull_are_exact(shape):
    for seed in seeds_of(300, 312):
        *_, hull = prepared(Case(seed, shape))
        if hull is None:
            continue
        assert hull.weight_t[0] == hull.weight_m[-1] == 0.0
        least, fastest = hull.value[0] / hull.weight_m[0], hull.value[-1] / hull.weight_t[-1]
        assert hull.memory.min() == least
        assert hull.time.min() == fastest
        assert hull.bound(least) < np.inf
        assert hull.bound(np.nextafter(least, -1.0)) == np.inf


def test_vertices_are_the_lower_hull_of_what_was_found():
    rng = np.random.default_rng(0)
    search = HullSearch.__new__(HullSearch)
    for count in (1, 2, 3, 8, 20, 20, 20):
        points = rng.integers(0, 12, (count, 2)).astype(float)
        search.points = {(m, t): np.zeros((0, 2), np.int64) for m, t in points.tolist()}
        front = naive.reduce(search.points)
        hull = [front[i] for i in dict.fromkeys(naive.lower_hull(front))]
        assert search._vertices() == hull


def test_the_papers_orders_remove_everything_and_walk_the_chain_last():
    case = Case(0, "chain", 6, 3)
    reduced = reduce_graph(FlatTables.of(case.graph))
    n = len(reduced.domains)
    for linear in (False, True):
        order = paper_order(reduced, linear)
        assert sorted(order.removed) == list(range(n))
        assert order.fixed == ()
    assert paper_order(reduced, True).removed == tuple(range(n))
