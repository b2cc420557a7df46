"""When operators have to be fixed: look-alikes, copies that pay prices, searches around points."""

from __future__ import annotations

import numpy as np
import pytest

from tensoropt.frontier import reduce
from tensoropt.search import track_frontier
from tensoropt.search.entangled import conditioning, relaxation
from tensoropt.search.entangled.relaxation import _unit, relax, tighten
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.order import greedy_order
from tensoropt.search.reduced_graph import reduce_graph
from tests.search.graphs import Case, Twice, seeds_of
from tests.search.test_exhaustive import check


class Repeated(Twice):
    """Steps of two operators each, all with the same costs, that share two weights."""

    def __init__(self, seed: int, steps: int = 3, choices: int = 3) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        weight, step = rng.random((2, choices, 2)), rng.random((2, choices, 2))
        use, along = rng.random((2, choices, choices, 2)), rng.random((2, choices, choices, 2))
        for w in range(2):
            self.add_operator(f"weight {w}", weight[w])
        for s in range(steps):
            for w in range(2):
                self.add_operator(f"step {s}.{w}", step[w])
                self.add_edge(f"weight {w}", f"step {s}.{w}", use[w])
            self.add_edge(f"step {s}.0", f"step {s}.1", along[0])
            if s:
                self.add_edge(f"step {s - 1}.1", f"step {s}.0", along[1])


@pytest.fixture
def cramped(monkeypatch):
    """Limits so small that small graphs count as entangled."""
    order = greedy_order
    for module in (conditioning, relaxation):
        monkeypatch.setattr(module, "greedy_order", lambda p, g, allowed=10: order(p, g, min(allowed, 10)))
    monkeypatch.setattr(conditioning, "_FEW_ASSIGNMENTS", 1)


def cases():
    yield from (Repeated(seed, steps=2) for seed in range(6))
    yield from (Case(seed, "clique", 6, 3) for seed in seeds_of(900, 908))


def test_prices_bound_every_strategy_and_only_raise_the_bound():
    raised = 0
    for case in cases():
        reduced = reduce_graph(FlatTables.of(case.graph))
        order = greedy_order(reduced, 0.1, 4)
        if not order.fixed:
            continue
        truth = np.array(case.truth)
        if not len(truth):
            continue
        before = relax(reduced, order)
        after = tighten(before, reduce(truth[:, 0], truth[:, 1]))
        hull = after.hull
        least = (hull.weight_m[:, None] * truth[:, 0] + hull.weight_t[:, None] * truth[:, 1]).min(axis=1)
        assert (hull.value <= least * (1 + 1e-12)).all()
        assert (hull.value >= before.hull.value * (1 - 1e-11)).all()
        raised += int((hull.value > before.hull.value * (1 + 1e-6)).sum())
        inside, outside = after.search.messages()
        root = after.program.base[after.program.logical[after.program.root].table]
        assert np.allclose((inside + outside)[root], inside[root])
    assert raised > 20


def test_the_unit_is_the_largest_power_of_two_in_all_costs():
    assert _unit([np.array([24.0, 0.0]), np.array([40.0])], 0.5) == 8.0
    assert _unit([np.zeros(2)], 0.5) == 0.5  # of nothing but zeros


def test_entangled_graphs_keep_every_promise(cramped):
    exact = 0
    for case in cases():
        found = check(case)
        assert found is None or found.exact or any("tried" in note for note in found.notes)
        exact += found is not None and found.exact
    assert exact > 0


def test_steps_that_share_weights_lose_little_to_fixing_them(cramped):
    for seed in range(4):
        case = Repeated(seed, steps=2)
        truth = np.array(case.truth)
        found = track_frontier(case.graph)
        best = [found.time[found.memory <= memory * (1 + 1e-9)].min(initial=np.inf) for memory in truth[:, 0]]
        assert np.mean(np.array(best) / truth[:, 1]) < 1.02
