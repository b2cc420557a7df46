"""Placed graphs: what flows between whole and split operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement.graph import PlacedGraph, Value, placed_graph, split_choices
from tensoropt.sharding.groups import GroupGraph


class Net(nn.Module):
    """Two linear layers that share a weight, a norm over the batch, a mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=True)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.second(self.norm(self.first(x)).relu())), y)


@pytest.fixture(scope="module")
def groups() -> GroupGraph:
    found = capture(Net(), (torch.randn(8, 8), torch.randint(0, 4, (8,))), {}, loss=None, mode="train")
    return prepare_graph(found.graph).graph


def by_target(groups: GroupGraph, target: str) -> list[str]:
    return [g.name for g in groups.groups if target in g.anchor.target]


def check_flow(graph: PlacedGraph) -> None:
    """Every value is made once, before it is read."""
    made: set[Value] = set()
    for op in graph.operators:
        assert made.issuperset(op.reads), op.name
        assert made.isdisjoint(op.writes), op.name
        made.update(op.writes)


def test_without_splits_operators_are_groups_and_shared_parameters(groups: GroupGraph) -> None:
    graph = placed_graph(groups)
    assert [op.name for op in graph.operators if op.kind == "group"] == [g.name for g in groups.groups]
    (variable,) = (op for op in graph.operators if op.kind == "variable")
    assert variable.parameters == groups.shared
    check_flow(graph)


class Averaging(nn.Module):
    """A tied weight, and a buffer that one operator reads and others update."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x * torch.sigmoid(self.mean)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return nn.functional.cross_entropy(self.head(x), labels)


def test_what_refers_to_a_variable_is_known(groups: GroupGraph) -> None:
    tokens = torch.randint(16, (4,)), torch.randint(16, (4,))
    graph = placed_graph(prepare_graph(capture(Averaging(), tokens).graph).graph)
    # The operator that holds the parameter, or makes the buffer's new value, comes first.
    names = [tuple(graph.operators[o].name for o in found) for found in graph.references]
    assert sorted(names) == [
        ("add", "sigmoid", "mul_1"),
        ("variable p_model_head_weight", "embedding", "linear"),
    ]
    # A batch norm reads and updates its own statistics.
    assert [graph.operators[o].kind for found in placed_graph(groups).references for o in found] == [
        "variable", "group", "group",
    ]  # fmt: skip


def test_every_choice_makes_a_sound_graph(groups: GroupGraph) -> None:
    offered = 0
    for group in groups.groups:
        for label, count in split_choices(groups, group, 4):
            graph = placed_graph(groups, {group.name: (label, count)})
            check_flow(graph)
            assert sum(op.kind == "piece" for op in graph.operators) == count
            assert set(graph.holder) == {t.name for t in groups.atoms.graph.parameters}
            offered += 1
    assert offered > 10


def test_neighbours_cut_alike_pass_pieces_on(groups: GroupGraph) -> None:
    last, loss = by_target(groups, "linear")[-1], by_target(groups, "cross_entropy")[0]
    rows = split_choices(groups, next(g for g in groups.groups if g.name == last), 2)[0][0]
    batch = split_choices(groups, next(g for g in groups.groups if g.name == loss), 2)[0][0]
    alone = placed_graph(groups, {last: (rows, 2)})
    both = placed_graph(groups, {last: (rows, 2), loss: (batch, 2)})
    joined = [op.name for op in alone.operators if op.kind == "join"]
    assert len(joined) == 1
    assert joined[0] not in [op.name for op in both.operators]
    sums = [op for op in both.operators if op.kind == "join"]
    assert [op.reads[0].tensor for op in sums] == list(groups.atoms.graph.outputs)


def test_a_term_added_once_is_read_by_the_first_piece_only(groups: GroupGraph) -> None:
    last = by_target(groups, "linear")[-1]
    graph = placed_graph(groups, {last: ("in_features", 2)})
    first, second = (op for op in graph.operators if op.kind == "piece")
    bias = next(p for p in graph.holder if p.endswith("head_bias"))
    assert Value(bias) in first.reads
    assert bias not in {v.tensor for v in second.reads}
    assert graph.shape(Value(graph.operators[-1].writes[0].tensor)) == ()


def test_statistics_of_a_batch_are_not_cut(groups: GroupGraph) -> None:
    norm = next(g for g in groups.groups if "batch_norm" in g.anchor.target)
    for label, _ in split_choices(groups, norm, 2):
        strategy = next(s for s in norm.strategies if str(s.label) == label)
        assert strategy.placements[norm.reads[0]] == 1  # channels


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"nothing": ("rows", 2)}, "no group of this name"),
        ({"linear": ("rows", 3)}, "it can be split along"),
        ({"linear": ("nowhere", 2)}, "along nowhere into 2"),
        ({"linear": ("out_features", 1)}, "into 1"),
    ],
)
def test_impossible_splits_say_what_is_possible(groups: GroupGraph, splits, words: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        placed_graph(groups, splits)
