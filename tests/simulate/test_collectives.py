"""Collectives of a strategy against counts made by hand on two layers without biases.

``first`` is 24 -> 32, ``second`` 32 -> 8, the batch 16, float32: 3072 + 1024 bytes of weights.
"""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.simulate.collectives import Collective, predicted_collectives, sent_bytes
from tests.costs.models import problem, three, two_layers
from tests.models import Call
from tests.simulate.strategies import facts_by_group, written

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


def test_alone_nothing_is_sent():
    none = [[], [], []]
    assert counted(two_layers, none, {FIRST: [], SECOND: []}, mesh=(1,)) == {}
    assert counted(two_layers, none, {FIRST: [], SECOND: []}, mesh=(2,)) == {}


@pytest.mark.parametrize("micro", [1, 2])
def test_data_parallelism_reduces_one_bucket_and_the_loss(micro):
    batch = [["d0"], ["d0"], ["d0"]]
    found = counted(two_layers, batch, {FIRST: ["R/P"], SECOND: ["R/P"]}, mesh=(micro, 2))
    assert found == {
        Collective("all_reduce", (0,), W1 + W2): 1,  # gradients: once per step
        Collective("all_reduce", (0,), 4): micro,  # the loss, a sum of the ranks' shares
    }


@pytest.mark.parametrize("micro", [1, 2])
def test_column_then_row_reduces_once_forward(micro):
    """Megatron's pair of layers: the input of the model needs no gradient, so nothing is reduced backward."""
    found = counted(
        two_layers, [["out_features"], ["in_features"], ["none"]], {FIRST: ["S(0)"], SECOND: ["S(1)"]},
        mesh=(micro, 2),
    )  # fmt: skip
    assert found == {Collective("all_reduce", (0,), 16 // micro * 8 * 4): micro}


def test_column_then_row_reduces_once_backward():
    found = counted(
        three,
        [["none"], ["out_features"], ["in_features"], ["none"]],
        {"p_model_enter_weight": ["R"], FIRST: ["S(0)"], SECOND: ["S(1)"]},
    )
    assert found == {
        Collective("all_reduce", (0,), 16 * 8 * 4): 1,
        Collective("all_reduce", (0,), 16 * 24 * 4): 1,
    }


@pytest.mark.parametrize("micro", [1, 2])
def test_zero_gathers_twice_and_scatters_once(micro):
    """In every micro-batch, for gathered weights and for gradients that must not be kept whole."""
    batch = [["d0"], ["d0"], ["d0"]]
    found = counted(two_layers, batch, {FIRST: ["S(0)"], SECOND: ["S(0)"]}, mesh=(micro, 2))
    assert found == {
        Collective("all_gather", (0,), W1): micro,  # nobody asks for the input's gradient
        Collective("all_gather", (0,), W2): 2 * micro,
        Collective("reduce_scatter", (0,), W1): micro,
        Collective("reduce_scatter", (0,), W2): micro,
        Collective("all_reduce", (0,), 4): micro,
    }


def test_two_axes_act_as_one_group():
    batch = [["d0", "d0"], ["d0", "d0"], ["d0", "d0"]]
    stored = {FIRST: ["R/P", "R/P"], SECOND: ["R/P", "R/P"]}
    assert counted(two_layers, batch, stored, mesh=(1, 2, 2)) == {
        Collective("all_reduce", (0, 1), W1 + W2): 1,
        Collective("all_reduce", (0, 1), 4): 1,
    }
    mixed = [["d0", "out_features"], ["d0", "in_features"], ["d0", "none"]]
    stored = {FIRST: ["R/P", "S(0)"], SECOND: ["R/P", "S(1)"]}
    assert counted(two_layers, mixed, stored, mesh=(1, 2, 2)) == {
        Collective("all_reduce", (0,), (W1 + W2) // 2): 1,
        Collective("all_reduce", (1,), 8 * 8 * 4): 1,
        Collective("all_reduce", (0,), 4): 1,
    }


def classifier():
    """Cross entropy: its mean is over all targets, counted once per step."""
    model = Call(lambda m, x, y: F.cross_entropy(m.leave(x), y), leave=nn.Linear(24, 10, bias=False))
    return model, (torch.randn(16, 24), torch.randint(0, 10, (16,))), {}


@pytest.mark.parametrize("micro", [1, 2])
def test_a_mean_over_targets_sends_counts_only_without_micro_batches(micro):
    weight = "p_model_leave_weight"
    found = counted(classifier, [["d0"], ["d0"]], {weight: ["R/P"]}, mesh=(micro, 2))
    sent = {Collective("all_reduce", (0,), 24 * 10 * 4): 1, Collective("all_reduce", (0,), 4): micro}
    # Before micro-batches every rank counts the targets of the whole batch, which it has, by itself.
    assert found == (sent if micro > 1 else sent | {Collective("all_reduce", (0,), 8): 1})


def test_split_classes_reduce_maximum_and_sums():
    weight = "p_model_leave_weight"
    found = counted(classifier, [["out_features"], ["classes"]], {weight: ["S(0)"]})
    assert found == {
        Collective("all_reduce", (0,), 16 * 4): 1,  # the maximum per row
        Collective("all_reduce", (0,), 2 * 16 * 4): 1,  # sum of exponentials, and the target's logit
    }


def test_inference_gathers_what_leaves_and_sends_nothing_back():
    batch = [["d0"], ["d0"], ["d0"]]
    stored = {"p_first_weight": ["S(0)"], "p_second_weight": ["R"]}
    found = counted(two_layers, batch, stored, mode="inference")
    assert found == {Collective("all_gather", (0,), W1): 1, Collective("all_reduce", (0,), 4): 1}


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
