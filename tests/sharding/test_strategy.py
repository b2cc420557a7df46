"""Strategies: their edges, homes and shapes on small models.

Strategies survive being written down; what does not fit is refused by name.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from typing import Any

import pytest

from tensoropt.errors import PlanError
from tensoropt.ops.layouts import PARTIAL_GRAD, REPLICATE
from tensoropt.sharding.storage import stored_layout
from tensoropt.sharding.strategy import Strategy, replicated_axes
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import gates, gpt2, llama, problem, two_layers


def changed(data: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    place = data
    for step in path[:-1]:
        place = place[step]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return data


def test_refusals_name_the_first_difference() -> None:
    graph, weight = problem(two_layers).graph, "p_model_first_weight"
    data = random_strategy(graph, (1, 2), micro_strategies(graph, 1), random.Random(0)).to_data()
    for wrong, message in (
        (changed(data, "groups", "linear", to=None), "says nothing about linear"),
        (changed(data, "groups", "linaer", to=["none", "none"]), r"names linaer .*nearest: linear"),
        (
            changed(data, "groups", "linear", to=["none", "sideways"]),
            "linear cannot be split as 'sideways'; possible",
        ),
        (changed(data, "groups", "linear", to=["none"]), "expected 2 names"),
        (changed(data, "stored", weight, to=["R", "S(7)"]), r"2 factors to split, .* no S\(7\)"),
        (changed(data, "stored", weight, to=["R", "Q"]), "'Q' is not a placement"),
        (changed(data, "stored", weight, to=["R", "held"]), "belong on the micro-batch axis"),
        (changed(data, "stored", weight, to=["R", "ahead"]), "belong on the micro-batch axis"),
        (changed(data, "mesh", to=[1, 0]), "mesh"),
        (changed(data, "mesh", to=[1, 7]), "does not divide|divide"),
        (changed(data, "hubs", to=None), "no section 'hubs'"),
    ):
        with pytest.raises(PlanError, match=message):
            Strategy.from_data(wrong, graph)


MODELS = [two_layers, gates, gpt2, llama]
MESHES = [(1, 2), (2, 2), (1, 2, 2)]


def randomly(build, mesh, seed=0, count=4):
    graph = problem(build).graph
    rng = random.Random(seed)
    micro = micro_strategies(graph, mesh[0])
    return [random_strategy(graph, mesh, micro, rng) for _ in range(count)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_every_read_and_use_has_one_edge(build, mesh):
    for strategy in randomly(build, mesh):
        graph = strategy.graph
        edges = list(strategy.edges())
        found = Counter((e.tensor, e.reader, e.kind) for e in edges)
        expected = Counter((n, g.name, "activation") for g in graph.groups for n in g.reads)
        expected.update((n, g.name, "parameter") for g in graph.groups for n in (*g.parameters, *g.shared))
        expected.update((n, "", "activation") for n in graph.hubs)
        expected.update((n, "", "output") for n in graph.atoms.graph.outputs)
        resolved = [(g.name, strategy.configurations[g.name].resolved) for g in graph.groups]
        expected.update((n, "", "unsharded") for n in strategy.unsharded)
        expected.update((r[0], name, "resolve") for name, r in resolved if r is not None)
        assert found == expected
        for edge in edges:
            check_ends(strategy, edge)


def check_ends(strategy, edge):
    """What a producer leaves goes to where its hub is materialised, from there to each reader."""
    stored = strategy.stored.get(edge.tensor)
    if edge.kind == "activation" and edge.reader:
        assert edge.source == strategy.hubs.get(edge.tensor, strategy.made[edge.tensor])
        assert edge.target == strategy.configurations[edge.reader].layout(edge.tensor)
    elif edge.kind == "activation":
        assert (edge.source, edge.target) == (strategy.made[edge.tensor], strategy.hubs[edge.tensor])
    elif edge.kind == "parameter":
        unsharded = strategy.unsharded.get(edge.tensor)
        assert edge.source[1:] == (unsharded.target if unsharded else stored)[1:]
    elif edge.kind == "unsharded":
        assert edge.source[1:] == stored[1:] != edge.target[1:]
    elif edge.kind == "output":
        assert all(code == REPLICATE for code in edge.target[1:])
    forward, backward = strategy.steps(edge)
    if not edge.moves:
        assert forward == backward == ()
    if not strategy.tensor(edge.tensor).requires_grad:
        assert backward == ()


@pytest.mark.parametrize("mesh", [(1,), *MESHES], ids=str)
@pytest.mark.parametrize("build", MODELS, ids=lambda b: b.__name__)
def test_written_down_and_read_again(build, mesh):
    for strategy in randomly(build, mesh, seed=2):
        data = strategy.to_data()
        again = Strategy.from_data(json.loads(json.dumps(data)), strategy.graph)
        assert again.to_data() == data
        assert (again.configurations, again.hubs) == (strategy.configurations, strategy.hubs)
        assert again.stored == strategy.stored
        assert set(again.edges()) == set(strategy.edges())


def test_the_largest_shard_is_that_of_the_first_rank():
    for strategy in randomly(gpt2, (1, 2, 2)):
        for name, layout in strategy.stored.items():
            shapes = [strategy.local_shape(name, layout, (0, a, b)) for a in (0, 1) for b in (0, 1)]
            largest = strategy.local_shape(name, layout)
            assert shapes[0] == largest
            assert all(s <= big for shape in shapes for s, big in zip(shape, largest, strict=True))


def test_parameters_are_stored_as_used_but_never_partial():
    tensor = problem(two_layers).graph.atoms.graph.tensors["p_model_first_weight"]
    assert stored_layout(tensor, (PARTIAL_GRAD, 0, -3)) == (PARTIAL_GRAD, 0, REPLICATE)
    assert replicated_axes((PARTIAL_GRAD, 0, REPLICATE, PARTIAL_GRAD)) == (2, 3)
