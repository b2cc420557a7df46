"""Timesteps of an unrolled network, found and coalesced."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tensoropt.planners.registry import planner
from tensoropt.planners.sharded.common.timesteps import coalesced, repeated
from tests.planners.problems import small

UNROLLED = ("unrolled", ((2,),), (1,))


def test_steps_repeat_each_other():
    [space] = small(*UNROLLED).spaces
    first = repeated(space)
    graph = space.tables.graph
    weights = {g.name: g.shared for g in graph.groups}
    for name, of in first.items():
        assert weights.get(name) == weights.get(of)
    again = [g.name for g in graph.groups if any("again" in w for w in g.shared)]
    assert len(again) == 3
    assert {first[name] for name in again} == {again[0]}
    anchors = {g.name: g.anchor.target for g in graph.groups}
    classes = Counter(first[name] for name in anchors)
    assert {3} <= set(classes.values()) <= {1, 2, 3, 4}
    assert all(anchors[name] == anchors[of] for name, of in first.items() if name in anchors)


@pytest.mark.parametrize("name", ["two layers", "gates", "gpt2"])
def test_without_steps_nothing_repeats(name):
    [space] = small(name, ((2,),), (1,)).spaces
    assert all(name == of for name, of in repeated(space).items())


def test_what_is_coalesced_adds_up():
    nodes = {"a": np.array([1.0, 2.0]), "b": np.array([4.0, 8.0]), "c": np.array([0.0])}
    inside, outside = np.array([[16.0, 99.0], [99.0, 32.0]]), np.array([[3.0], [5.0]])
    merged, edges = coalesced(
        nodes, [("a", "b", inside), ("b", "c", outside)], {"a": "a", "b": "a", "c": "c"}
    )
    assert {name: costs.tolist() for name, costs in merged.items()} == {"a": [21.0, 42.0], "c": [0.0]}
    [(a, c, table)] = edges
    assert (a, c, table.tolist()) == ("a", "c", [[3.0], [5.0]])


def test_tofu_splits_all_steps_alike():
    question = small(*UNROLLED)
    (plan,) = planner("tofu")(question, None, 0)
    first = repeated(question.spaces[0])
    assert all(plan.operators[name].axes == plan.operators[first[name]].axes for name in plan.operators)
    assert plan.settings["notes"][0].startswith("timesteps coalesced: ")
