"""Long chains and trees, whose pruned tables are large, against a second program that prunes nothing."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from tensoropt.frontier import Frontier
from tensoropt.search import CostGraph, track_frontier
from tensoropt.search.engine import _BREAKPOINTS, Messages, ProgramRunner, corners_of
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.hull import HullSearch
from tensoropt.search.order import greedy_order
from tensoropt.search.reduced_graph import reduce_graph
from tensoropt.search.shared import CORNERS, build_program, seeds
from tests.search.graphs import Twice
from tests.search.oracle import Tree, any_tree, chain, with_twigs

PLAIN = bool(numba.config.DISABLE_JIT)
"""Kernels as plain Python are a hundred times slower: their graphs are smaller."""

CASES = {
    "chain of 100": lambda: Tree(1, chain(100), configurations=3, options=3, most=60),
    "chain of 140": lambda: Tree(2, chain(140), configurations=4, options=2, most=40),
    "chain of 80 with many options": lambda: Tree(3, chain(80), configurations=2, options=6, most=90),
    "twigs, 120": lambda: Tree(4, with_twigs(120, 4), configurations=3, options=2, most=50),
    "twigs, 90 with many options": lambda: Tree(5, with_twigs(90, 5), configurations=2, options=5, most=80),
    "tree of 80": lambda: Tree(6, any_tree(80, 6), configurations=4, options=3, most=60),
}
SMALL = {
    "chain of 14": lambda: Tree(7, chain(14), configurations=3, options=3, most=60),
    "twigs, 16": lambda: Tree(8, with_twigs(16, 8), configurations=3, options=2, most=50),
}
POINTS = 30 if PLAIN else 1500
SEEDS = range(20, 50)


def graph_of(tree: Tree) -> Twice:
    made = Twice()
    for v, configurations in enumerate(tree.nodes):
        made.add_operator(f"o{v}", configurations)
    for v, parent in enumerate(tree.parents):
        if parent is None:
            continue
        if v % 2:
            made.add_edge(f"o{parent}", f"o{v}", tree.edges[v])
        else:
            made.add_edge(f"o{v}", f"o{parent}", [list(row) for row in zip(*tree.edges[v], strict=True)])
    return made


def same(frontier, truth) -> bool:
    return list(zip(frontier.memory.tolist(), frontier.time.tolist(), strict=True)) == truth


def pruned_by(graph: CostGraph, known: Frontier | None):
    """The root table of one exact pass, pruned by ``known`` or by the strategies of the hull alone."""
    reduced = reduce_graph(FlatTables.of(graph))
    program = build_program(reduced, greedy_order(reduced, 0.1))
    search = HullSearch(program)
    hull = search.find_hull(32)
    if known is None:
        _, known = seeds(reduced, hull)
    corners = corners_of(hull, known.memory, known.time, CORNERS)
    result = ProgramRunner(program, 1).run_pass(Messages.of(*search.messages(), corners), 0)
    return result.tables[-1], max(int(np.diff(t.offsets).max()) for t in result.tables)


@pytest.fixture(scope="module", params=SMALL if PLAIN else CASES)
def solved(request):
    tree = {**CASES, **SMALL}[request.param]()
    return graph_of(tree), tree.frontier()


def test_the_frontier_of_a_long_graph_is_found_whole(solved):
    made, truth = solved
    assert len(truth) > POINTS
    found = track_frontier(made.graph, epsilon=0.0)
    assert found.exact
    assert same(found, truth)
    for i in range(0, len(truth), len(truth) // 25):
        assert tuple(made.cost(found.strategy(i), found.options(i))) == truth[i]


def test_limits_take_nothing_away_whatever_they_come_from(solved):
    """Tables long enough for limits, pruned by few strategies and by the frontier itself: its points lie on
    the very corners that they are held against."""
    made, truth = solved
    memory, time = (np.array(axis, float) for axis in zip(*truth, strict=True))
    for known in (None, Frontier(memory, time, np.zeros((len(truth), 2), np.int64))):
        root, longest = pruned_by(made.graph, known)
        assert PLAIN or longest > _BREAKPOINTS
        assert same(root, truth)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_frontiers_of_many_long_graphs_are_found_whole(seed):
    shape = (chain, lambda n: with_twigs(n, seed), lambda n: any_tree(min(n, 90), seed))[seed % 3]
    size, configurations, options = 80 + seed, 2 + seed % 4, 2 + seed % 5
    tree = Tree(seed, shape(size), configurations=configurations, options=options, most=20 + seed)
    found, truth = track_frontier(graph_of(tree).graph, epsilon=0.0), tree.frontier()
    assert found.exact
    assert same(found, truth)
