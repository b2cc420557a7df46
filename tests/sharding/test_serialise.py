"""Strategies survive being written down; what does not fit is refused by name."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import PlanError
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.serialise import strategy_from_dict, strategy_to_dict
from tensoropt.verify.random_strategies import micro_strategies, random_strategy


def graph_of(name: str) -> GroupGraph:
    return load_model(ModelSpec(f"tests.execute.models:{name}")).graph


@pytest.mark.parametrize("mesh", [(1,), (1, 2), (2, 2, 2)])
def test_round_trip(mesh: tuple[int, ...]) -> None:
    graph = graph_of("transformer")
    rng = random.Random(0)
    for _ in range(5):
        strategy = random_strategy(graph, mesh, micro_strategies(graph, mesh[0]), rng)
        data = strategy_to_dict(strategy)
        again = strategy_from_dict(json.loads(json.dumps(data)), graph)
        assert strategy_to_dict(again) == data
        assert again.configurations == strategy.configurations
        assert again.hubs == strategy.hubs
        assert again.stored == strategy.stored
        assert set(again.edges()) == set(strategy.edges())


def test_same_seed_same_strategy() -> None:
    graph = graph_of("mlp")
    micro = micro_strategies(graph, 1)
    first, second = (
        strategy_to_dict(random_strategy(graph, (1, 2), micro, random.Random(4))) for _ in range(2)
    )
    assert first == second


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
    graph = graph_of("mlp")
    data = strategy_to_dict(random_strategy(graph, (1, 2), micro_strategies(graph, 1), random.Random(0)))
    weight = "p_first_weight" if "p_first_weight" in data["stored"] else "p_model_first_weight"
    for wrong, message in (
        (changed(data, "groups", "linear", to=None), "says nothing about linear"),
        (changed(data, "groups", "linaer", to=["none", "none"]), r"names linaer .*nearest: linear"),
        (
            changed(data, "groups", "linear", to=["none", "sideways"]),
            "linear cannot be split as 'sideways'; it has",
        ),
        (changed(data, "groups", "linear", to=["none"]), "expected 2 names"),
        (changed(data, "stored", weight, to=["R", "S(7)"]), r"has 2 parts that can be split, so S\(7\)"),
        (changed(data, "stored", weight, to=["R", "Q"]), "'Q' is not a placement"),
        (changed(data, "stored", weight, to=["R", "held"]), "belong on the micro-batch axis"),
        (changed(data, "stored", weight, to=["R", "ahead"]), "belong on the micro-batch axis"),
        (changed(data, "mesh", to=[1, 0]), "mesh"),
        (changed(data, "mesh", to=[1, 7]), "does not divide|divide"),
        (changed(data, "hubs", to=None), "no 'hubs'"),
    ):
        with pytest.raises(PlanError, match=message):
            strategy_from_dict(wrong, graph)
