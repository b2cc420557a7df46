"""Pruning targets lie below what is known and above its hull; passes pruned by them lose nothing."""

from __future__ import annotations

import numpy as np
import pytest

import tensoropt.search.exact as exact
from tensoropt.frontier import reduce
from tensoropt.search import CostGraph, track_frontier
from tensoropt.search.pruning_target import looseness, pruning_target
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
