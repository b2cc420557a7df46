"""Gradient buckets: every trained parameter once, by axes and dtype, closed when full."""

import random
from math import prod

import numpy as np
import pytest

from tensoropt.sharding.buckets import arrival_order, bucket_numbers, gradient_buckets, reduction_axes
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import gates, gpt2, problem, two_layers

FIRST, SECOND = "p_model_first_weight", "p_model_second_weight"


def two_layer_strategy(first, second, mesh=(1, 2)):
    graph = problem(two_layers).graph
    labels = {g.name: ["none"] * len(mesh) for g in graph.groups}
    return Strategy.from_data(
        {"mesh": list(mesh), "groups": labels, "hubs": {}, "stored": {FIRST: first, SECOND: second}}, graph
    )


W1, W2 = 24 * 32, 32 * 8
BUCKETS = {
    # name: (the two weights' storage, mesh, limit, buckets)
    "the last layer first": (["R", "R/P"], ["R", "R/P"], (1, 2), 4096, [((1,), (SECOND, FIRST), W2 + W1)]),
    "full ones are closed": (
        ["R", "R/P"], ["R", "R/P"], (1, 2), 1024, [((1,), (SECOND,), W2), ((1,), (FIRST,), W1)],
    ),
    "one that is not full": (["R", "R/P"], ["R", "R/P"], (1, 2), 1025, [((1,), (SECOND, FIRST), W2 + W1)]),
    # A shard has its gradient to itself; the bucket holds it without axes.
    "shards": (["R", "R/P"], ["R", "S(0)"], (1, 2), 4096, [((), (SECOND,), W2 // 2), ((1,), (FIRST,), W1)]),
    "axes together": (
        ["R", "R/P", "S(0)"], ["R", "R/P", "R/P"], (1, 2, 2), 4096,
        [((1, 2), (SECOND,), W2), ((1,), (FIRST,), W1 // 2)],
    ),
    "an axis of one": (["R", "R/P"], ["R", "R/P"], (1, 1), 4096, [((), (SECOND, FIRST), W2 + W1)]),
    "micro-batches": (["R/P", "R/P"], ["R/P", "R/P"], (2, 2), 4096, [((1,), (SECOND, FIRST), W2 + W1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BUCKETS)
def test_gradients_by_hand(name):
    first, second, mesh, limit, expected = BUCKETS[name]
    found = gradient_buckets(two_layer_strategy(first, second, mesh), limit_bytes=limit)
    assert [(b.axes, b.parameters, b.elements) for b in found] == expected
    assert {b.dtype for b in found} == {"float32"}


def test_what_has_no_gradient_is_in_no_bucket():
    assert bucket_numbers(np.array([[-1, 0, 1]]), np.array([[8, 4, 8]]), 8).tolist() == [[-1, 1, 0]]


def test_a_tied_weight_comes_with_its_first_user():
    """The embedding's backward is the last one, although the head's is the first."""
    graph = problem(gpt2).graph
    (tied,) = graph.shared
    first = next(g for g in graph.groups if tied in g.shared)
    order = arrival_order(graph)
    after = order[order.index(tied) + 1 :]
    assert all(name in first.parameters or name in _before(graph, first) for name in after)
    assert order.index(tied) > len(order) // 2


def _before(graph, group):
    names = [g.name for g in graph.groups]
    return {n for g in graph.groups[: names.index(group.name)] for n in g.parameters}


@pytest.mark.parametrize("build", [two_layers, gates, gpt2], ids=lambda b: b.__name__)
def test_every_trained_parameter_is_in_one_bucket(build):
    graph = problem(build).graph
    rng = random.Random(3)
    for mesh in ((1, 2), (2, 2), (1, 2, 2)):
        for _ in range(5):
            strategy = random_strategy(graph, mesh, micro_strategies(graph, mesh[0]), rng)
            buckets = gradient_buckets(strategy, limit_bytes=4096)
            names = [n for b in buckets for n in b.parameters]
            assert sorted(names) == sorted(t.name for t in graph.atoms.graph.parameters if t.requires_grad)
            for bucket in buckets:
                sizes = [prod(strategy.local_shape(n, strategy.stored[n])) for n in bucket.parameters]
                assert bucket.elements == sum(sizes)
                assert {reduction_axes(strategy.stored[n], strategy.mesh) for n in bucket.parameters} == {
                    bucket.axes
                }
                assert all(sum(sizes[:i]) * 4 < 4096 for i in range(1, len(sizes)))
