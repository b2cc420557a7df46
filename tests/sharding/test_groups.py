"""Colocation: which operators share a configuration, and what is left for the search to decide.

Labels: their text is that of plans.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.ops.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, local_shape
from tensoropt.sharding.atoms import AtomGraph
from tensoropt.sharding.groups import PARTIAL_GRADIENT, PASSED_ON, WHOLE, GroupGraph, Label
from tests.models import Call
from tests.sharding.models import grouped, grouped_model

TEXTS = {
    "none": WHOLE,
    "partial": PASSED_ON,
    "partial_grad": PARTIAL_GRADIENT,
    "out_features": Label("out_features"),
    "rows.1": Label("rows", 1),
    "in_features@R": Label("in_features", resolve=REPLICATE),
    "heads.0@S(2)": Label("heads", 0, 2),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_back(text: str) -> None:
    assert Label.parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_what_it_says() -> None:
    label = Label.parse("rows.1@S(0)")
    assert (label.loop, label.dim, label.resolve) == ("rows", "rows.1", 0)
    assert label.splits
    assert not any(t.splits for t in (WHOLE, PASSED_ON, PARTIAL_GRADIENT))
    assert Label("rows", 1).resolved(0) == label


@pytest.mark.parametrize("text", ["rows.a", "rows@S", "rows@whole"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"placement|invalid"):
        Label.parse(text)


def anchors(graph: GroupGraph) -> list[str]:
    return [g.anchor.target.split(".")[1] for g in graph.groups]


def labels(graph: GroupGraph, target: str, index: int = 0) -> list[str]:
    group = [g for g in graph.groups if g.anchor.target.startswith(f"aten.{target}.")][index]
    return [str(s.label) for s in group.strategies]


def test_a_perceptron_is_its_linears_and_a_loss():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4), nn.Tanh())
    graph = grouped_model(model, torch.randn(4, 8))
    assert anchors(graph) == ["linear", "linear"]
    assert [op.target.split(".")[1] for op in graph.groups[0].operators] == ["linear", "relu", "dropout"]
    assert [op.target.split(".")[1] for op in graph.groups[1].operators] == ["linear", "tanh", "sum"]
    assert not graph.hubs
    assert not graph.shared


def test_a_partial_sum_is_resolved_before_a_nonlinearity():
    """``in_features`` alone would hand a partial sum to relu: only its resolved forms are offered."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    graph = grouped_model(model, torch.randn(4, 8), loss=lambda y: y.exp().sum())
    assert labels(graph, "linear") == [
        "none",
        "d0",
        "out_features",
        "in_features@R",
        "in_features@S(0)",
        "in_features@S(1)",
    ]
    bare = grouped_model(nn.Linear(8, 4, bias=False), torch.randn(4, 8), loss=torch.sum)
    assert "in_features" in labels(bare, "linear")  # a sum of sums needs no resolution


def test_a_placement_is_a_pair():
    """Megatron: the column-split linear reads R with a partial gradient, the row-split one makes P."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    graph = grouped_model(model, torch.randn(4, 8).requires_grad_(), loss=lambda y: y.exp().sum())
    first, second = graph.groups[:2]
    tensors = graph.atoms.graph.tensors
    column = next(s for s in first.strategies if str(s.label) == "out_features")
    assert {tensors[n].key: column.placements[n] for n in first.parameters} == {"0.weight": 0, "0.bias": 0}
    row = next(s for s in second.strategies if str(s.label) == "in_features@R")
    assert {tensors[n].key: row.placements[n] for n in second.parameters} == {
        "2.weight": 1,
        "2.bias": PARTIAL,
    }
    assert row.placements[second.reads[0]] == 1
    assert row.resolve == (second.anchor.outputs[0], REPLICATE)
    data = next(s for s in second.strategies if str(s.label) == "d0")
    assert {data.placements[n] for n in second.parameters} == {PARTIAL_GRAD}


def test_tied_weights_are_shared():
    def tied(m, ids):
        return F.cross_entropy(m.head(torch.tanh(m.embed(ids))).flatten(0, 1), ids.flatten())

    model = Call(tied, embed=nn.Embedding(12, 8), head=nn.Linear(8, 12, bias=False))
    model.head.weight = model.embed.weight
    graph = grouped_model(model, torch.randint(0, 12, (4, 3)), loss=None)
    (name,) = graph.shared
    assert graph.atoms.graph.tensors[name].key in ("embed.weight", "head.weight")
    users = [g for g in graph.groups if name in g.shared]
    assert anchors(graph)[0] == "embedding"
    assert len(users) == 2
    assert not any(name in g.parameters for g in graph.groups)


def test_a_tensor_with_several_readers_is_a_hub():
    def residual(m, x):
        x = m.a(x)
        return x + m.c(torch.relu(m.b(x)))

    graph = grouped_model(Call(residual, **{name: nn.Linear(8, 8) for name in "abc"}), torch.randn(4, 8))
    assert graph.hubs == ("linear",)
    assert anchors(graph) == ["linear", "linear", "linear", "add"]
    assert "partial" in labels(graph, "add")  # the residual sum may stay unreduced


def test_a_detached_tensor_stays_with_its_maker():
    """An edge into ``detach`` would be priced with a gradient that never comes back on it."""

    def gated(m, x):
        x = m.a(x)
        return torch.where(x > 0, x * x, m.b(x))

    graph = grouped_model(Call(gated, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(4, 8))
    (detached,) = (op for op in graph.atoms.graph.operators if op.target == "aten.detach.default")
    assert graph.group_of[detached.name] is graph.group_of["linear"]


REPEATS = {
    "expanded": lambda k, n: k[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2),
    "interleaved": lambda k, n: k.repeat_interleave(n, 1),
}


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("keys", [1, 2])
def test_copies_of_key_heads_are_split_and_the_keys_shared(repeat, keys):
    """More ranks than key heads: a rank repeats the keys for its query heads alone, and adds its part of
    their gradient."""

    def few_keys(m, x):
        q, k = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (m.q, m.k))
        k = REPEATS[repeat](k, 4 // keys)
        return m.out(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)).square().sum()

    model = Call(few_keys, q=nn.Linear(16, 16), k=nn.Linear(16, 4 * keys), out=nn.Linear(16, 16))
    graph = grouped_model(model, torch.randn(4, 8, 16), loss=None)
    (attention,) = (g for g in graph.groups if g.anchor.target.startswith("aten.scaled_dot_product"))
    (copies,) = (graph.group_of[graph.atoms.graph.producer[n].name] for n in attention.reads[1:])
    read, made = copies.reads[0], attention.reads[1]
    pairs = {(s.placements[read], s.placements[made]) for s in copies.strategies}
    # Of the repeated heads, the outer atom is the key head, if there are several, and the inner one the copy.
    assert (PARTIAL_GRAD, keys) in pairs
    split = [s for s in attention.strategies if s.placements[made] == keys]
    assert [s.label.loop for s in split] == ["heads"]
    assert [s.placements[attention.reads[0]] for s in split] == [keys]


def test_a_position_bias_meets_the_batch_in_a_group_of_its_own():
    """T5 adds a bias made of parameters to a mask of the batch: following, it could never be split."""
    graph = grouped("t5")
    wheres = [g for g in graph.groups if g.anchor.target.startswith("aten.where")]
    if not wheres:
        pytest.skip("T5 of this version of transformers adds its bias before the softmax")
    assert all("d0" in [str(s.label) for s in g.strategies] for g in wheres)


def check_loops_and_atoms(graph: AtomGraph) -> None:
    for space in graph.spaces.values():
        for operand in (*space.reads, *space.writes):
            sizes = tuple(space.dims[loop].size for dim in operand.dims for loop in dim)
            assert sizes == graph.atom_sizes(operand.tensor)
    for tensor in graph.graph.tensors.values():
        assert local_shape(graph.atoms[tensor.name], (-1,), (1,)) == tensor.shape


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize("name", ["gpt2-dropout", "bert-mask", "llama", "t5", "vgg", "lstm", "swin"])
def test_groups_are_a_partition_and_their_strategies_consistent(name):
    graph = grouped(name)
    check_loops_and_atoms(graph.atoms)
    operators = [op.name for g in graph.groups for op in g.operators]
    assert sorted(operators) == sorted(op.name for op in graph.atoms.graph.operators)
    tensors = graph.atoms.graph.tensors
    for group in graph.groups:
        assert str(group.strategies[0].label) == "none"
        assert len({s.label for s in group.strategies}) == len(group.strategies)
        touched = {n for op in group.operators for n in (*op.inputs(), *op.outputs)}
        for strategy in group.strategies:
            assert set(strategy.choices) == {op.name for op in group.operators}
            assert set(strategy.placements) == touched
            for n, code in strategy.placements.items():
                assert code < len(graph.atoms.atom_sizes(n))
                assert code != PARTIAL_GRAD or tensors[n].requires_grad
                assert code != PARTIAL or tensors[n].kind in ("activation", "parameter")


def test_frozen_parameters_say_nothing_about_gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    graph = grouped_model(model, torch.randn(4, 8))
    first = graph.groups[0]
    codes = {s.placements[n] for s in first.strategies for n in first.parameters}
    assert PARTIAL_GRAD not in codes
