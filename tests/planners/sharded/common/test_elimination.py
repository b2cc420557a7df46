"""OptCNN's dynamic program against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.planners.sharded.common import elimination
from tensoropt.planners.sharded.common.elimination import ImpossibleError, IrreducibleError, cheapest


def exhaustive(nodes, edges) -> float:
    names = list(nodes)
    best = np.inf
    for picks in itertools.product(*(range(len(nodes[n])) for n in names)):
        at = dict(zip(names, picks, strict=True))
        cost = sum(nodes[n][at[n]] for n in names) + sum(t[at[a], at[b]] for a, b, t in edges)
        best = min(best, cost)
    return float(best)


def total(nodes, edges, choice) -> float:
    return float(sum(nodes[n][choice[n]] for n in nodes) + sum(t[choice[a], choice[b]] for a, b, t in edges))


@st.composite
def graphs(draw):
    """Chains with parallel edges, bypasses and leaves, some costs inf; or any graph."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 6))
    sizes = rng.integers(1, 4, count)
    nodes = {f"n{i}": rng.integers(0, 9, sizes[i]).astype(float) for i in range(count)}
    pairs = [(i - 1, i) for i in range(1, count) if rng.random() < 0.9]
    if count > 2 and rng.random() < 0.5:
        at = int(rng.integers(0, count - 2))
        pairs.append((at, at + 2))
    if draw(st.booleans()):
        pairs += [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.8]
    pairs += [pair[::-1] for pair in pairs if rng.random() < 0.2]
    edges = []
    for a, b in pairs:
        table = rng.integers(0, 9, (sizes[a], sizes[b])).astype(float)
        table[rng.random(table.shape) < 0.1] = np.inf
        edges.append((f"n{a}", f"n{b}", table))
    return nodes, edges


@given(graphs())
def test_it_is_the_optimum(graph):
    nodes, edges = graph
    expected = exhaustive(nodes, edges)
    if not np.isfinite(expected):
        with pytest.raises(ValueError, match="no strategy is possible"):
            cheapest(nodes, edges)
        return
    cost, choice, _ = cheapest(nodes, edges)
    assert cost == expected == total(nodes, edges, choice)


def test_a_chain_by_hand():
    """b's second configuration costs 1 more but saves 4 on the edges."""
    nodes = {"a": np.array([1.0]), "b": np.array([1.0, 2.0]), "c": np.array([3.0])}
    edges = [("a", "b", np.array([[3.0, 1.0]])), ("b", "c", np.array([[2.0], [0.0]]))]
    assert cheapest(nodes, edges) == (7.0, {"a": 0, "b": 1, "c": 0}, ())


def four_that_all_meet():
    rng = np.random.default_rng(7)
    nodes = {name: rng.random(2) for name in "abcd"}
    return nodes, [(a, b, rng.random((2, 2))) for a, b in itertools.combinations("abcd", 2)]


def test_what_elimination_leaves_is_enumerated():
    nodes, edges = four_that_all_meet()
    leaf = ("d", "e", np.array([[0.5, 2.0], [1.0, 0.25]]))
    found = cheapest({**nodes, "e": np.zeros(2)}, [*edges, leaf])
    assert found.final == ("a", "b", "c", "d")
    assert found.cost == pytest.approx(exhaustive({**nodes, "e": np.zeros(2)}, [*edges, leaf]), rel=1e-12)


def test_what_is_too_entangled_is_refused(monkeypatch):
    monkeypatch.setattr(elimination, "MOST_ENTRIES", 7)  # of three neighbours with two configurations: 8
    with pytest.raises(IrreducibleError) as caught:
        cheapest(*four_that_all_meet())
    assert caught.value.remaining == ("a", "b", "c", "d")


@pytest.mark.parametrize(("nodes", "edge"), [([np.nan, 1.0], 0.0), ([0.0, 1.0], np.nan)])
def test_nan_is_no_cost_and_not_the_same_as_impossible(nodes, edge):
    edges = [("a", "b", np.full((2, 1), edge))]
    with pytest.raises(ValueError, match="a cost is NaN") as refusal:
        cheapest({"a": np.array(nodes), "b": np.zeros(1)}, edges)
    assert not isinstance(refusal.value, ImpossibleError)
