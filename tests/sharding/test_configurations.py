"""Configurations per mesh, and what follows the batch through micro-batches."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.ops.calls import OperatorShard
from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE
from tensoropt.ops.localise import localise
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import (
    MicroBatchRefused,
    batch_placements,
    batch_strategies,
    enumerate_configurations,
    micro_batch_strategies,
)
from tensoropt.sharding.groups import GroupGraph, group_operators
from tests.models import Call
from tests.sharding.models import grouped, grouped_model, make


@cache
def with_position_ids() -> GroupGraph:
    """GPT-2 with an input that has no batch dim."""
    network, args, kwargs, _ = make("gpt2")
    graph = capture(network, args, {**kwargs, "position_ids": torch.arange(8)[None]}).graph
    return group_operators(refine_graph(graph))


def configurations(graph: GroupGraph, index: int, mesh: tuple[int, ...]):
    group = graph.groups[index]
    micro = micro_batch_strategies(graph)[group.name] if mesh[0] > 1 else group.strategies[0]
    return enumerate_configurations(graph.atoms, group, mesh, micro)


def linear(batch: int = 8, inputs: int = 8, outputs: int = 12) -> GroupGraph:
    return grouped_model(nn.Linear(inputs, outputs), torch.randn(batch, inputs), loss=lambda y: y.exp().sum())


# -- enumeration --------------------------------------------------------------------------------


def test_one_axis():
    found = [c.labels for c in configurations(linear(), 0, (1, 2))]
    assert found == [
        ("none",),
        ("d0",),
        ("out_features",),
        ("in_features@R",),
        ("in_features@S(0)",),
        ("in_features@S(1)",),
    ]


def test_two_axes_are_all_pairs_that_divide():
    found = {c.labels for c in configurations(linear(), 0, (1, 2, 2))}
    assert ("none", "none") in found
    assert {("d0", "out_features"), ("out_features", "d0"), ("d0", "d0")} <= found
    assert len(found) == 36
    odd = {c.labels for c in configurations(linear(batch=6), 0, (1, 2, 2))}
    assert ("d0", "d0") not in odd  # 6 rows do not divide by 4
    assert ("d0", "none") in odd


def test_the_unsplit_configuration_is_always_there():
    graph = grouped("gpt2")
    for index in range(len(graph.groups)):
        assert any(set(c.labels) == {"none"} for c in configurations(graph, index, (1, 8)))


def test_uneven_shards_are_for_large_parameter_dims():
    def splits(vocabulary: int) -> bool:
        model = nn.Embedding(vocabulary, 4)
        graph = grouped_model(model, torch.randint(0, 5, (4, 2)), loss=lambda y: y.exp().sum())
        return any("vocabulary" in c.labels[0] for c in configurations(graph, 0, (1, 4)))

    assert splits(57)
    assert not splits(13)  # shards of 4, 4, 4 and 1 would be out of balance
    assert splits(12)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "parts"), [(32, 3), (32, 5), (32, 7), (25, 2), (25, 4), (3, 2)])
def test_batches_heads_and_sequences_are_cut_in_unequal_parts(size, parts):
    """Whatever the parts, if none is empty: the search prices the largest."""

    def splits(batch: int, length: int, heads: int, mesh: tuple[int, ...]) -> list[set[str]]:
        def attention(m, ids):
            thirds = m.qkv(m.tokens(ids)).chunk(3, 2)
            q, k, v = (part.unflatten(2, (heads, 2)).transpose(1, 2) for part in thirds)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return m.out(mixed.transpose(1, 2).flatten(2)).exp().sum()

        layers = {"tokens": nn.Embedding(50, 2 * heads), "qkv": nn.Linear(2 * heads, 6 * heads)}
        model = Call(attention, **layers, out=nn.Linear(2 * heads, 50))
        graph = grouped_model(model, torch.randint(0, 50, (batch, length)), loss=None)
        found = (configurations(graph, i, mesh) for i in range(len(graph.groups)))
        return [{" ".join(c.labels) for c in each} for each in found]

    mesh = (1, parts)
    assert all({"d0", "batch0"} & labels for labels in splits(size, 2, 2, mesh))
    _, qkv, attention, out = splits(2, 2, size, mesh)
    assert ("out_features.1" in qkv, "heads" in attention, "in_features.0@R" in out) == (True, True, True)
    tokens, qkv, attention, _ = splits(2, size, 2, mesh)
    assert ("d1" in tokens, "d1" in qkv, "queries" in attention) == (True, True, True)
    # Micro-batches are equal, and the parts of each need not be.
    assert all({"d0", "batch0"} & labels for labels in splits(2 * size, 2, 2, (2, parts)))
    # On two axes, or with an empty part, nothing is cut unevenly.
    assert not any({"d0 d0", "batch0 batch0"} & labels for labels in splits(size, 2, 2, (1, parts, 2)))
    assert not any({"d0", "batch0"} & labels for labels in splits(2, 2, 2, (1, 3)))


def test_layouts_and_resolutions():
    group = linear().groups[0]
    found = configurations(linear(), 0, (1, 2, 2))
    one = next(c for c in found if c.labels == ("d0", "in_features@S(1)"))
    (weight, bias) = group.parameters
    assert one.layout(weight) == (REPLICATE, PARTIAL_GRAD, 1)
    assert one.layout(bias) == (REPLICATE, PARTIAL_GRAD, PARTIAL)
    output = group.anchor.outputs[0]
    assert one.resolved == (output, (REPLICATE, 0, PARTIAL), (REPLICATE, 0, 1))
    plain = next(c for c in found if c.labels == ("d0", "d0"))
    assert plain.resolved is None


def test_heads_split_as_far_as_the_key_heads():
    """Two key/value heads: an axis of four cannot split them, two axes of two reach the queries' of each."""
    graph = grouped("llama")
    attention = next(i for i, g in enumerate(graph.groups) if "scaled_dot" in g.anchor.target)
    two = {c.labels[0] for c in configurations(graph, attention, (1, 2))}
    four = {c.labels[0] for c in configurations(graph, attention, (1, 4))}
    assert any(label.startswith("heads") for label in two)
    assert not any(label.startswith(("heads", "group")) for label in four)
    nested = {c.labels for c in configurations(graph, attention, (1, 2, 2))}
    assert {("heads", "group"), ("group", "heads"), ("group", "batch0")} <= nested
    split = next(c for c in configurations(graph, attention, (1, 2)) if c.labels == ("group",))
    queries, keys, values = graph.groups[attention].anchor.inputs()
    assert split.layout(queries) == (REPLICATE, 2)
    assert split.layout(keys) == split.layout(values) == (REPLICATE, PARTIAL_GRAD)


# -- micro-batches --------------------------------------------------------------------------------


def test_the_batch_is_the_first_dim_of_the_first_input():
    graph = grouped("bert-mask")
    assert set(batch_placements(graph).values()) == {0}
    positions = with_position_ids()
    assert Counter(batch_placements(positions).values()) == {0: 2, REPLICATE: 1}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-dropout", "bert-mask", "llama", "t5", "vit", "perceptron"])
def test_models_that_follow_the_batch(name):
    graph = grouped(name)
    chosen = micro_batch_strategies(graph)
    assert set(chosen) == {g.name for g in graph.groups}
    tensors = graph.atoms.graph.tensors
    for group in graph.groups:
        places = chosen[group.name].placements
        for n in (*group.parameters, *group.shared):
            assert places[n] == PARTIAL_GRAD  # whole in every micro-batch, gradients add up
        for n in group.reads:
            made = chosen[graph.group_of[graph.atoms.graph.producer[n].name].name].placements[n]
            assert places[n] == made  # nothing is communicated between micro-batches
        for op in group.operators:
            call = localise(OperatorShard(op, graph.atoms, (chosen[group.name].choices[op.name],), (2,)))
            assert not call.collectives
    (loss,) = graph.atoms.graph.outputs
    last = graph.group_of[graph.atoms.graph.producer[loss].name]
    assert chosen[last.name].placements[loss] == PARTIAL
    assert tensors[loss].shape == ()


def test_every_group_has_a_strategy_where_some_cannot_follow():
    """All pairs of the batch, and weights behind them, whose readers do not say how they want the result."""

    def pairs(m, x):
        h = m.a(x)
        return m.c(torch.relu(m.b(h @ h.t())).sum(0)).square().sum()

    model = Call(pairs, a=nn.Linear(8, 8), b=nn.Linear(4, 8), c=nn.Linear(8, 2))
    graph = grouped_model(model, torch.randn(4, 8), loss=None)
    chosen = batch_strategies(graph, everywhere=False)
    assert set(chosen) == {group.name for group in graph.groups}
    assert sum(chosen[group.name] is group.unsplit for group in graph.groups) >= 2
    with pytest.raises(MicroBatchRefused, match="cannot compute one part of the batch at a time"):
        batch_strategies(graph)


def test_position_ids_without_a_batch_dim_are_whole_in_every_micro_batch():
    graph = with_position_ids()
    assert set(micro_batch_strategies(graph)) == {g.name for g in graph.groups}


def test_batch_norm_is_refused_in_training():
    with pytest.raises(MicroBatchRefused, match="normalises over the whole batch"):
        micro_batch_strategies(grouped("vgg"))


def test_batch_norm_by_running_statistics_is_not_refused():
    def frozen(m, x):
        n = m.norm
        return nn.functional.batch_norm(m.conv(x), n.running_mean, n.running_var, n.weight, n.bias)

    model = Call(frozen, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    graph = grouped_model(model, torch.randn(4, 3, 8, 8))
    assert set(micro_batch_strategies(graph)) == {g.name for g in graph.groups}


def test_random_numbers_in_the_shape_of_an_activation_follow_its_batch():
    def sampled(m, x):
        mean = m.layer(x)
        return (mean + torch.randn_like(mean)).square().sum()

    graph = grouped_model(Call(sampled, layer=nn.Linear(8, 12)), torch.randn(8, 8))
    chosen = micro_batch_strategies(graph)  # raises where a group cannot follow
    drawn = next(g for g in graph.groups if any("randn_like" in op.target for op in g.operators))
    assert chosen[drawn.name].placements["randn_like"] == 0


def test_targets_that_are_made_of_parameters_are_not_counted_beforehand():
    """Classes that the model itself found, as the targets of a mean or of a sum."""

    def of(reduction):
        def forward(m, x):
            y = m.layer(x)
            return nn.functional.cross_entropy(y.tanh(), y.argmax(-1), reduction=reduction)

        return grouped_model(Call(forward, layer=nn.Linear(8, 8)), torch.randn(8, 8), loss=None)

    with pytest.raises(MicroBatchRefused, match=r"the targets of cross_entropy_loss .* depend on parameters"):
        micro_batch_strategies(of("mean"))
    assert micro_batch_strategies(of("sum"))
