"""Scalar passes, hull and limits against exhaustive search: bounds are true, and as tight as they claim.

Pruning targets lie below what is known and above its hull; passes pruned by them lose nothing.
"""

import numpy as np
import pytest

from tensoropt.frontier import Frontier, reduce
from tensoropt.search.bounds import pruning_target
from tensoropt.search.engine import (
    _BREAKPOINTS,
    Corners,
    _breakpoints,
    _envelope,
    _fill_limits,
    _least_time,
    _reachable,
    corners_of,
)
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.hull import SLACK, Hull, HullSearch
from tensoropt.search.order import greedy_order, paper_order
from tensoropt.search.reduced_graph import reduce_graph
from tensoropt.search.shared import build_program, gaps, seeds
from tests import naive
from tests.search.graphs import SHAPES, Case, Twice, seeds_of


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


def prepared(case):
    reduced = reduce_graph(FlatTables.of(case.graph))
    program = build_program(reduced, greedy_order(reduced, 0.1))
    search = HullSearch(program)
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


def test_a_crossover_may_lie_beyond_one_that_is_impossible():
    made = Twice()
    for name, size in zip("abc", (2.0, 2.0, 1.0), strict=True):
        made.add_operator(name, [[(0.0, size)], [(size, 0.0)]])
    made.add_edge("a", "b", np.where(np.eye(2)[..., None], 0.0, np.inf) * np.ones(2))
    reduced, _, _, hull = prepared(made)
    _, mixed = seeds(reduced, hull)
    assert sorted(zip(mixed.memory, mixed.time, strict=True)) == [(1.0, 4.0), (4.0, 1.0)]


def test_roofs_of_neighbouring_corners_change_no_answer():
    rng = np.random.default_rng(0)
    answers = set()
    for _ in range(300):
        lines, count = int(rng.integers(1, 5)), int(rng.integers(1, 90))
        height = np.cumsum(rng.random((lines, count)) - 0.5, axis=1) + 2.0
        corners = Corners(np.arange(count), -np.arange(count), height, np.ones(lines), np.ones(lines))
        inside, outside = rng.random((2, lines)) * 2.0
        expected = bool((inside[:, None] + outside[:, None] <= height).all(axis=0).any())
        assert _reachable(inside, outside, height, corners.roof) == expected
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
        assert _reachable(inside, outside, corners.height, corners.roof)


@pytest.mark.parametrize("values", [(5.0, 4.0, 4.5), (4.0, 5.0, 4.5), (4.5, 4.0, 5.0), (5.0, 5.0, 5.0)])
def test_of_lines_with_equal_weights_the_highest_counts(values):
    weight_m, weight_t = np.array([1.0, *[0.5] * 3, 0.0]), np.array([0.0, *[0.5] * 3, 1.0])
    slope, level, start = (np.full(5, np.nan) for _ in range(3))
    size = _envelope(np.array([1.0, *values, 2.0]), weight_m, weight_t, slope, level, start)
    assert size == 2
    assert slope[:2].tolist() == [1.0, 0.0]
    assert level[:2] == pytest.approx([10.0, 2.0])
    assert start[:2] == pytest.approx([-np.inf, 8.0])


LINES = np.array([2.0, 1.0, 0.5, 0.25, 0.0]), np.array([0.0, 0.25, 0.5, 1.0, 0.5])


def least_costs(points):
    """Per line the least weighted cost of points."""
    return (np.outer(LINES[0], points[0]) + np.outer(LINES[1], points[1])).min(axis=1)


def time_at(memory, values):
    """The least time within ``memory`` by the lines that say something of it."""
    of_lines = ((v * (1 - SLACK) - m * memory) / t for v, m, t in zip(values, *LINES, strict=True) if t)
    return np.max(list(of_lines), axis=0)


def test_of_any_lines_the_highest_counts():
    rng = np.random.default_rng(0)
    for _ in range(100):
        slope, level, start = rng.random((3, 5))
        values = least_costs(rng.random((2, 6))) * (0.8 + 0.2 * rng.random(5))
        size = _envelope(values, *LINES, slope, level, start)
        for x in (-1.0, *rng.random(5) * 3):
            assert _least_time(x, size, slope, level, start) == pytest.approx(time_at(x, values))


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("ends", [(1.9, 1.8), (np.inf, 1.8), (1.9, np.inf)])
def test_limits_are_what_corners_leave_at_even_steps_of_memory_and_of_time(count, ends):
    rng = np.random.default_rng(count)
    inside, outside = (least_costs(points) for points in rng.random((2, 2, 20)))
    corner_m, corner_t = np.sort(rng.random(count)) * 1.8, -np.sort(-rng.random(count)) * 1.7
    corner_m[-1], corner_t[0] = ends
    envelope, limit_m, limit_t = rng.random((3, 5)), np.empty(_BREAKPOINTS), np.empty(_BREAKPOINTS)

    _breakpoints(inside, outside, corner_m, *LINES, *envelope, limit_m)
    least, needed = inside[0] / 2, outside[0] / 2
    most = max(corner_m[np.isfinite(corner_m)] - needed, default=least)
    top, bottom = time_at(least, inside), time_at(most, inside)
    expected = []
    for share in np.arange(_BREAKPOINTS // 2) / (_BREAKPOINTS // 2):
        time = top + (bottom - top) * (share + 1 / _BREAKPOINTS)
        reached = [(v - t * time) / m for v, m, t in zip(inside, *LINES, strict=True) if t and m]
        expected += [least + (most - least) * share, min(max(least, *reached), most)]
    assert limit_m == pytest.approx(np.sort(expected))

    stack = np.empty((64, 4), np.int64)
    _fill_limits(outside, corner_m, corner_t, *LINES, *envelope, limit_m, limit_t, stack)
    room = np.minimum(corner_m[:, None] - limit_m, 1e6)
    left = np.where(room < needed, -np.inf, corner_t[:, None] - time_at(room, outside))
    assert limit_t == pytest.approx(left.max(axis=0))


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


@pytest.mark.parametrize("shape", SHAPES)
def test_both_ends_of_the_hull_are_exact(shape):
    for seed in seeds_of(300, 312):
        case = Case(seed, shape)
        _, program, _, hull = prepared(case)
        if hull is None:
            continue
        few = HullSearch(program).find_hull(4)  # no chord is looked at
        if case.style in ("integer", "zero"):
            ends = (few.memory[0], few.time[0]), min(zip(few.time, few.memory, strict=True))[::-1]
            assert ends == (case.truth[0], case.truth[-1])
        assert hull.weight_t[0] == hull.weight_m[-1] == 0.0
        least, fastest = hull.value[0] / hull.weight_m[0], hull.value[-1] / hull.weight_t[-1]
        assert hull.memory.min() == least
        assert hull.time.min() == fastest
        assert np.isinf(hull.bounds(np.array([least, np.nextafter(least, -1.0)]))).tolist() == [False, True]


def test_the_papers_orders_remove_everything_and_walk_the_chain_last():
    case = Case(0, "chain", 6, 3)
    reduced = reduce_graph(FlatTables.of(case.graph))
    n = len(reduced.domains)
    for linear in (False, True):
        order = paper_order(reduced, linear)
        assert sorted(order.removed) == list(range(n))
        assert order.fixed == ()
    assert paper_order(reduced, True).removed == tuple(range(n))


@pytest.mark.parametrize("most", [8, 40, 300])
@pytest.mark.parametrize("ends", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5)])
def test_coarser_corners_leave_room_for_all_that_finer_ones_do(most, ends):
    """Whatever lies below a corner lies below one of those that stand for it."""
    rng = np.random.default_rng(most)
    memory = np.sort(rng.choice(100_000, 1000, replace=False)).astype(float) + 1
    time = np.sort(rng.choice(100_000, 1000, replace=False))[::-1].astype(float) + 1
    values = np.array([memory[0] * 2 * ends[0], 100.0, time[-1] / 2 * ends[1]])
    hull = Hull(np.array([2.0, 0.5, 0.0]), np.array([0.0, 0.5, 0.5]), values, memory, time, ())
    every = 999 + (ends[0] < 1) + (ends[1] < 1)
    fine, coarse = (corners_of(hull, memory, time, count) for count in (every, most))
    assert len(fine.memory) == every
    assert not np.isnan(fine.height).any()
    assert 2 <= len(coarse.memory) <= most + 2
    for m, t in zip(fine.memory, fine.time, strict=True):
        assert ((coarse.memory >= m) & (coarse.time >= t)).any()
    for m, t in zip(coarse.memory, coarse.time, strict=True):  # and none stands for nothing
        assert (fine.memory == m).any()
        assert (fine.time == t).any()
