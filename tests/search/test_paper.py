"""Costs of very different sizes: points keep their own precision, and nothing is lost between the bands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.search import CostGraph, track_frontier
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.paper import search_bands
from tensoropt.search.reduced_graph import reduce_graph
from tensoropt.search.track import check_settings
from tests import naive

METHODS = ("auto", "ldp", "elimination")


class Mixed:
    """A random chain with a chord; every cost has its own size, 10**-span/2 to 10**span/2."""

    def __init__(self, seed: int, span: float):
        rng = np.random.default_rng(seed)
        self.graph, self.nodes, self.edges = CostGraph(), {}, []

        def costs(*shape):
            sizes = 10.0 ** rng.uniform(-span / 2, span / 2, (*shape, 2))
            if rng.random() < 0.5:  # what saves memory costs time
                sizes[..., 1] = 1.0 / sizes[..., 0]
            return rng.random((*shape, 2)) * sizes

        count = int(rng.integers(1, 5))
        for v in range(count):
            table = costs(int(rng.integers(1, 4)))
            self.nodes[v] = [[tuple(point)] for point in table]
            self.graph.add_operator(v, table)
        for a, b in [*((i, i + 1) for i in range(count - 1)), *([(0, count - 1)] if count > 2 else [])]:
            table = costs(len(self.nodes[a]), len(self.nodes[b]))
            self.edges.append((a, b, lambda i, j, table=table: [tuple(table[i, j])]))
            self.graph.add_edge(a, b, table)

    def cost(self, strategy):
        parts = [self.nodes[v][strategy[v]][0] for v in self.nodes]
        parts += [f(strategy[a], strategy[b])[0] for a, b, f in self.edges]
        return np.sum(parts, axis=0)


def check(case, **options):
    truth = naive.exhaustive(case.nodes, case.edges)
    found = track_frontier(case.graph, **options)
    near = 1 + 1e-9
    assert (np.diff(found.memory) > 0).all()
    assert (np.diff(found.time) < 0).all()
    for i in range(len(found)):
        total = case.cost(found.strategy(i))
        assert np.allclose(total, [found.memory[i], found.time[i]], rtol=1e-9, atol=0)
    for m, t in truth:
        assert found.lower_bound(m) <= t * near
        if found.exact:
            assert ((found.memory <= m * near) & (found.time <= t * near)).any()
            assert found.lower_bound(m) >= naive.lower_bound(truth, m * near) / near
    assert found.lower_bound(truth[0][0] * (1 - 1e-6)) == np.inf
    return found, truth


@given(st.integers(0, 10**6), st.sampled_from([2.0, 9.0, 15.0, 30.0]), st.sampled_from(METHODS))
def test_every_point_is_as_precise_as_its_own_size(seed, span, method):
    found, _ = check(Mixed(seed, span), method=method)
    assert found.exact


@pytest.mark.parametrize("options", [{"epsilon": 0.01}, {"max_points": 3}])
def test_trimmed_bands_are_certified(options):
    for seed in range(12):
        found, truth = check(Mixed(seed, 20.0), **options)
        for m, t in truth if "epsilon" in options else []:
            assert found.time[found.memory <= m * (1 + 1e-9)].min() <= t * 1.01 * (1 + 1e-9)


@pytest.mark.parametrize("method", METHODS)
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


def test_costs_of_one_size_need_one_search():
    case = Mixed(3, 2.0)
    bands = search_bands(
        reduce_graph(FlatTables.of(case.graph)), "auto", check_settings(0.0, "auto", None, None)
    )
    assert len(bands) == 1


def test_the_bytes_of_bands_do_not_depend_on_threads():
    for seed in range(6):
        runs = [track_frontier(Mixed(seed, 20.0).graph, threads=n) for n in (1, 3)]
        assert runs[0].memory.tobytes() == runs[1].memory.tobytes()
        assert runs[0].time.tobytes() == runs[1].time.tobytes()
        assert [runs[0].strategy(i) for i in range(len(runs[0]))] == [
            runs[1].strategy(i) for i in range(len(runs[1]))
        ]
