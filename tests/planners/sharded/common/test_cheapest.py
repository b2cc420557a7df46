"""The cheapest strategy by one objective against exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensoropt.planners.sharded.common import cheapest as module
from tensoropt.planners.sharded.common.cheapest import cheapest
from tensoropt.search import NoStrategyError, track_frontier


def total(nodes, edges, choice) -> float:
    return float(sum(nodes[n][choice[n]] for n in nodes) + sum(t[choice[a], choice[b]] for a, b, t in edges))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_it_is_the_optimum(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, int(rng.integers(1, 6)))
    nodes = {f"n{i}": rng.integers(0, 9, size).astype(float) for i, size in enumerate(sizes)}
    edges = []
    for a, b in itertools.permutations(range(len(sizes)), 2):
        if rng.random() < 0.4:
            table = rng.integers(0, 9, (sizes[a], sizes[b])).astype(float)
            table[rng.random(table.shape) < 0.1] = np.inf
            edges.append((f"n{a}", f"n{b}", table))
    choices = (dict(zip(nodes, each, strict=True)) for each in itertools.product(*map(range, sizes)))
    expected = min(total(nodes, edges, choice) for choice in choices)
    if not np.isfinite(expected):
        with pytest.raises(NoStrategyError):
            cheapest(nodes, edges)
        return
    choice, notes = cheapest(nodes, edges)
    assert total(nodes, edges, choice) == expected
    assert not notes


def test_what_is_not_proven_is_said(monkeypatch):
    def unproven(graph):
        return replace(track_frontier(graph), exact=False, notes=("fixed a",))

    monkeypatch.setattr(module, "track_frontier", unproven)
    choice, notes = cheapest({"a": np.array([2.0, 1.0])}, [])
    assert choice == {"a": 1}
    assert notes == ("fixed a", "at most 0.0% from the optimum")
