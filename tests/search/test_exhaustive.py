"""Every method against exhaustive search on random graphs with everything the contract allows."""

import numpy as np
import pytest

import tensoropt.search.shared as shared
import tensoropt.search.within as within
from tensoropt.search import CostGraph, track_frontier
from tests import naive
from tests.search.graphs import SHAPES, Case, seeds_of


def close(a, b):
    return np.allclose(a, b, rtol=1e-9, atol=0)


def check(case, **settings):
    truth = case.truth
    if not truth:
        with pytest.raises(ValueError, match="possible"):
            track_frontier(case.graph, **settings)
        return None
    found = track_frontier(case.graph, **settings)
    assert (np.diff(found.memory) > 0).all()
    assert (np.diff(found.time) < 0).all()
    for i in range(len(found.memory)):
        assert close(case.cost(found.strategy(i), found.options(i)), [found.memory[i], found.time[i]])
    # ties that rounding breaks in the plain sums leave near-duplicates in the naive frontier
    for m, t in truth:
        if found.exact:
            near = (found.memory <= m * (1 + 1e-9)) & (found.time <= t * (1 + 1e-9))
            assert near.any(), (m, t)
        assert found.lower_bound(m) <= t * (1 + 1e-9)
    if found.exact and case.style in ("integer", "zero"):
        assert found.memory.tolist() == [m for m, _ in truth]
        assert found.time.tolist() == [t for _, t in truth]
        for m in (*found.memory, *(found.memory + 0.5), -1.0, found.memory[0] - 0.5):
            assert found.lower_bound(m) == naive.lower_bound(truth, m)
    assert found.lower_bound(truth[0][0] * 0.999 - 1e-300) == np.inf
    return found


@pytest.mark.parametrize("method", ["auto", "ldp", "elimination"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_method_matches_exhaustive_search(method, shape):
    for seed in seeds_of(0, 12):
        found = check(Case(seed, shape), method=method)
        if found is not None and (method == "auto" or shape not in ("clique",)):
            assert found.exact


@pytest.mark.parametrize("shape", SHAPES)
def test_small_graphs_are_searched_without_bounds(monkeypatch, few_sums, shape):
    monkeypatch.setattr(shared, "_FEW_SUMS", few_sums)
    monkeypatch.setattr(within, "HullSearch", None)  # not called
    for seed in seeds_of(20, 30):
        found = check(Case(seed, shape))
        assert found is None or found.exact
        check(Case(seed, shape), max_points=3)


def test_an_empty_graph_costs_nothing():
    found = track_frontier(CostGraph())
    assert (found.memory.tolist(), found.time.tolist(), found.exact) == ([0.0], [0.0], True)
    assert found.strategy(0) == found.options(0) == {}
    assert (found.lower_bound(0.0), found.lower_bound(-1.0)) == (0.0, np.inf)
