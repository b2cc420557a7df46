"""Collectives of a strategy against counts made by hand on two layers without biases.

``first`` is 24 -> 32, ``second`` 32 -> 8, the batch 16, float32: 3072 + 1024 bytes of weights.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.regions import Region
from tensoropt.simulate.collectives import Collective, predicted_collectives, sent_bytes
from tests.costs.models import gates, problem, three, two_layers
from tests.models import Call
from tests.simulate.strategies import facts_by_group, memory_curve, written

FIRST, SECOND = "p_model_first_weight", "p_model_second_weight"
W1, W2 = 24 * 32 * 4, 32 * 8 * 4


def counted(build, labels, stored, mesh=(1, 2), mode="train") -> Counter[Collective]:
    """Collectives of the strategy written as labels per group, in order, and stored placements."""
    prepared, several = problem(build, mode), mesh[0] > 1
    first = [str(prepared.micro[g.name].label) if several else "none" for g in prepared.graph.groups]
    labels = [(one, *chosen) for one, chosen in zip(first, labels, strict=True)]
    stored = {name: ("R/P" if several else "R", *layout) for name, layout in stored.items()}
    strategy = written(prepared.graph, mesh, labels, stored)
    return predicted_collectives(strategy, facts_by_group(strategy, mode == "train"))


def classifier():
    """Cross entropy: its mean is over all targets, counted once per step."""
    model = Call(lambda m, x, y: F.cross_entropy(m.leave(x), y), leave=nn.Linear(24, 10, bias=False))
    return model, (torch.randn(16, 24), torch.randint(0, 10, (16,))), {}


LEAVE = "p_model_leave_weight"
SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"


def both(*stored: str) -> dict[str, list[str]]:
    return {FIRST: [*stored], SECOND: [*stored]}


@pytest.mark.parametrize(("build", "labels", "stored", "mesh", "sent"), [
    # Alone nothing is sent.
    *((two_layers, [[]] * 3, both(), (micro,), {}) for micro in (1, 2)),
    # Data parallelism: gradients once per step, and the loss, a sum of the ranks' shares.
    *((two_layers, [["d0"]] * 3, both("R/P"), (micro, 2),
       {(SUM, (0,), W1 + W2): 1, (SUM, (0,), 4): micro}) for micro in (1, 2)),
    # Megatron's pair: the input of the model needs no gradient, so nothing is reduced backward.
    *((two_layers, [["out_features"], ["in_features"], ["none"]], {FIRST: ["S(0)"], SECOND: ["S(1)"]},
       (micro, 2), {(SUM, (0,), 16 // micro * 8 * 4): micro}) for micro in (1, 2)),
    # Behind another layer it does.
    (three, [["none"], ["out_features"], ["in_features"], ["none"]],
     {"p_model_enter_weight": ["R"], FIRST: ["S(0)"], SECOND: ["S(1)"]}, (1, 2),
     {(SUM, (0,), 16 * 8 * 4): 1, (SUM, (0,), 16 * 24 * 4): 1}),
    # ZeRO gathers in every micro-batch, and scatters gradients that must not be kept whole. Nobody asks for
    # the input's.
    *((two_layers, [["d0"]] * 3, both("S(0)"), (micro, 2), {
        (GATHER, (0,), W1): micro, (GATHER, (0,), W2): 2 * micro, (SCATTER, (0,), W1): micro,
        (SCATTER, (0,), W2): micro, (SUM, (0,), 4): micro,
    }) for micro in (1, 2)),
    # Two axes act as one group.
    (two_layers, [["d0", "d0"]] * 3, both("R/P", "R/P"), (1, 2, 2),
     {(SUM, (0, 1), W1 + W2): 1, (SUM, (0, 1), 4): 1}),
    (two_layers, [["d0", "out_features"], ["d0", "in_features"], ["d0", "none"]],
     {FIRST: ["R/P", "S(0)"], SECOND: ["R/P", "S(1)"]}, (1, 2, 2),
     {(SUM, (0,), (W1 + W2) // 2): 1, (SUM, (1,), 8 * 8 * 4): 1, (SUM, (0,), 4): 1}),
    # Before micro-batches every rank counts the targets of the whole batch, which it has, by itself.
    (classifier, [["d0"]] * 2, {LEAVE: ["R/P"]}, (2, 2), {(SUM, (0,), 24 * 10 * 4): 1, (SUM, (0,), 4): 2}),
    (classifier, [["d0"]] * 2, {LEAVE: ["R/P"]}, (1, 2),
     {(SUM, (0,), 24 * 10 * 4): 1, (SUM, (0,), 4): 1, (SUM, (0,), 8): 1}),
    # Split classes: the maximum per row, then sums of exponentials with the target's logit.
    (classifier, [["out_features"], ["classes"]], {LEAVE: ["S(0)"]}, (1, 2),
     {(SUM, (0,), 16 * 4): 1, (SUM, (0,), 2 * 16 * 4): 1}),
])  # fmt: skip
def test_what_is_sent_by_hand(build, labels, stored, mesh, sent):
    assert counted(build, labels, stored, mesh) == {Collective(*key): count for key, count in sent.items()}


def test_inference_gathers_what_leaves_and_sends_nothing_back():
    stored = {"p_first_weight": ["S(0)"], "p_second_weight": ["R"]}
    found = counted(two_layers, [["d0"]] * 3, stored, mode="inference")
    assert found == {Collective(GATHER, (0,), W1): 1, Collective(SUM, (0,), 4): 1}


@pytest.mark.parametrize("reader", ["linear_1", "linear_2", "add"])
def test_what_runs_again_gathers_its_input_again_though_other_readers_do_not(reader):
    graph = problem(gates).graph
    first = written(graph, (1, 2), ["none", "none"], ["R", "R"], {"tanh": ["R", "S(0)"]})
    again = replace(first, recomputed=(Region("block", (reader,)),), once=frozenset())
    counts = [predicted_collectives(s, facts_by_group(s)).total() for s in (first, again)]
    assert counts == [4, 5]


def test_a_copy_that_is_gathered_again_is_there_from_the_last_reader_that_keeps_it():
    graph, size = problem(gates).graph, 1024
    labels = {g.name: ["none", "d0" if g.name == "linear" else "none"] for g in graph.groups}
    first = written(graph, (1, 2), labels, ["R", "R"], {"tanh": ["R", "R"]})
    again = replace(first, gathered_again=frozenset({"tanh"}))
    of = [memory_curve(s, facts_by_group(s), "sgd").points["backward linear_2"] for s in (first, again)]
    assert [after - before for before, after in zip(*of, strict=True)] == [-size, size]


def test_buckets_follow_backward():
    """The bucket's order is that in which backward completes gradients: last layer first."""
    (bucket,) = gradient_buckets(written(problem(two_layers).graph, (1, 2), ["none", "d0"], ["R", "R/P"]))
    assert bucket.parameters == (SECOND, FIRST)


def test_what_leaves_a_rank_is_what_its_group_does_not_have():
    issued = {
        Collective("all_reduce", (1,), 400): 2,  # twice three quarters of it, twice
        Collective("all_gather", (0,), 100): 1,
        Collective("reduce_scatter", (0, 1), 80): 3,
        Collective("send", (0, 5), 7): 4,
    }
    assert sent_bytes(issued, (2, 4)) == 2 * 2 * 300 + 50 + 3 * 70 + 4 * 7
    assert sent_bytes({}, (2, 4)) == 0.0
