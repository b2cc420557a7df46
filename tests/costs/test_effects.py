"""Moves of all pairs of layouts at once against the effects of each.

What groups need while they run, and the search under caps on it.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tensoropt.costs.effects import (
    READ,
    READ_BACK,
    Effects,
    MoveEffects,
    WorkingSets,
    additive,
    working_sets,
)
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.prices import Prices
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.profiling.overheads import Overheads
from tensoropt.profiling.workload import workload
from tensoropt.search import track_frontier
from tensoropt.sharding.configurations import Configuration
from tests.costs.models import (
    ToyCommunication,
    ToyCompute,
    facts_of,
    gates,
    gpt2,
    problem,
    tables_of,
    three,
)
from tests.simulate.test_simulator import Hand, PerByte

COPY = 1e9


@pytest.fixture(scope="module")
def tables():
    return tables_of(problem(gpt2), (1, 2), "adam", COPY)


def test_every_option_of_every_group_has_one(tables):
    working = working_sets(tables)
    assert set(working.of) == {g.name for g in tables.graph.groups}
    for name, needed in working.of.items():
        assert [len(n) for n in needed] == [len(o) for o in tables.of[name].options]


def test_a_split_group_needs_less_than_a_whole_one(tables):
    """Of the largest group: its best configuration needs at most as much as its worst, and about half."""
    working = working_sets(tables)
    largest = max(working.of.values(), key=lambda needed: max(n.max() for n in needed))
    sizes = np.concatenate(largest)
    assert 0.4 * sizes.max() < sizes.min() < 0.75 * sizes.max()


def test_what_is_found_under_a_cap_keeps_to_it_and_is_never_better_in_sum(tables):
    working, free = working_sets(tables), track_frontier(tables, epsilon=0)
    fastest = len(free) - 1
    caps = working.caps(free.strategy(fastest), free.options(fastest), 0.0)
    assert caps == sorted(caps)
    assert caps
    for cap in caps:
        under = track_frontier(tables.restricted(working.within(cap)), epsilon=0)
        assert len(under)
        for i in np.linspace(0, len(under) - 1, 20, dtype=int).tolist():
            choice, options = under.strategy(i), under.options(i)
            needed = (of[choice[g]][options.get(g, 0)] for g, of in working.of.items())
            assert max(needed) <= cap
            assert under.time[i] >= free.lower_bound(under.memory[i]) * (1 - 1e-9)


def test_no_cap_where_little_can_be_spared():
    working = WorkingSets({"a": [np.array([5.0]), np.array([9.0])], "b": [np.array([4.0])]})
    assert working.caps({"a": 1, "b": 0}, {}, memory=100.0) == [5.0, pytest.approx(45**0.5)]
    assert working.caps({"a": 1, "b": 0}, {}, memory=1000.0) == []
    assert working.caps({"a": 0, "b": 0}, {}, memory=100.0) == []


OVERHEADS = Overheads(copy_s_per_byte=1.3e-9, call_s=1.7e-6, pass_s=3.1e-7)


@pytest.mark.parametrize("mesh", [(1, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("learns", [True, False])
def test_all_pairs_at_once_cost_what_each_does(mesh, learns):
    graph = problem(gates).graph
    prices = Prices(graph, mesh, ToyCompute(), ToyCommunication(), "adam", OVERHEADS)
    effects = MoveEffects(prices)
    name = next(n for n in graph.hubs if len(graph.atoms.atom_sizes(n)) >= 2)
    if not learns:
        effects.training = False
    codes = (0, 1, REPLICATE, PARTIAL_GRAD, PARTIAL)
    layouts = [(REPLICATE, *rest) for rest in itertools.product(codes, repeat=len(mesh) - 1)]

    forward_s, back_s = effects.moving_s(name, layouts, layouts[::-1])

    passed = 0
    for (i, source), (j, target) in itertools.product(enumerate(layouts), enumerate(layouts[::-1])):
        there, back = (effects.moved(when, name, source, target) for when in (READ, READ_BACK))
        assert forward_s[i, j] * mesh[0] == additive(Effects((there,)), prices).communication
        assert back_s[i, j] * mesh[0] == additive(Effects((back,)), prices).communication
        passed += there.passing.device_s > 0
    assert np.any(forward_s > 0)
    assert bool(passed) == learns == bool(np.any(back_s))


def test_what_a_second_forward_gathers_is_alive_in_all_of_it():
    """A product and its ReLU, of 8 rows per rank: beside the weight and what is kept, the product is
    alive, also while the ReLU reads no weight."""
    graph, name = problem(three).graph, "p_model_first_weight"
    group = graph.groups[1]
    along = next(s for s in group.strategies if str(s.label) == "d0")
    configuration = Configuration(group, (group.unsplit, along))
    work = workload(graph, configuration, (1, 2))
    effects = GroupEffects(Prices(graph, (1, 2), Hand(), PerByte(0.0), "sgd"))
    choice = Choice(configuration, work, facts_of(work), {name: (-1, 0)}, again=True)
    weight, rows = 24 * 32 * 4, 8 * 32 * 4
    again = [e for e in effects.group(choice).effects if e.when.phase == "again" and e.begins]
    assert [(e.begins[0].bytes, e.workspace_bytes) for e in again] == [(weight, rows), (rows, rows)]
