"""Placed graphs: what flows between whole and split operators."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.ops.layouts import PARTIAL
from tensoropt.placement.graph import PlacedGraph, Value, placed_graph, split_choices
from tensoropt.sharding.groups import GroupGraph
from tests.models import Call


@pytest.fixture(scope="module")
def groups():
    """Two linear layers that share a weight, a norm over the batch, a mean loss."""

    def forward(m, x, y):
        return nn.functional.cross_entropy(m.head(m.second(m.norm(m.first(x)).relu())), y)

    first, second = nn.Linear(8, 8, bias=True), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    model = Call(forward, first=first, norm=nn.BatchNorm1d(8), second=second, head=nn.Linear(8, 4))
    found = capture(model, (torch.randn(8, 8), torch.randint(0, 4, (8,))), {}, loss=None, mode="train")
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


def test_without_splits_operators_are_groups_and_shared_parameters(groups):
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


def test_what_refers_to_a_variable_is_known(groups):
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


def test_every_choice_makes_a_sound_graph(groups):
    offered = 0
    for group in groups.groups:
        for label, count in split_choices(groups, group, 4):
            graph = placed_graph(groups, {group.name: (label, count)})
            check_flow(graph)
            pieces = [op for op in graph.operators if op.kind == "piece" and op.group is not None]
            assert sum(op.group.name == group.name for op in pieces) == count  # a batch norm has others
            assert graph.splits == {group.name: (label, count)}
            assert set(graph.holder) == {t.name for t in groups.atoms.graph.parameters}
            offered += 1
    assert offered > 10


def test_neighbours_cut_alike_pass_pieces_on(groups):
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


def test_a_term_added_once_is_read_by_the_first_piece_only(groups):
    last = by_target(groups, "linear")[-1]
    graph = placed_graph(groups, {last: ("in_features", 2)})
    first, second = (op for op in graph.operators if op.kind == "piece")
    bias = next(p for p in graph.holder if p.endswith("head_bias"))
    assert Value(bias) in first.reads
    assert bias not in {v.tensor for v in second.reads}
    assert graph.shape(Value(graph.operators[-1].writes[0].tensor)) == ()


def test_a_batch_norm_over_the_batch_runs_in_steps(groups):
    """Terms of sums of every piece, statistics of their total, pieces that are normalised."""
    (norm,) = (g for g in groups.groups if "batch_norm" in g.anchor.target)
    splits = {norm.name: ("batch", 2)}
    graph = placed_graph(groups, splits)
    check_flow(graph)
    ops = {op.name: op for op in graph.operators}
    sums, pieces = ([ops[f"{name}[{i}/2]"] for i in (1, 2)] for name in (f"{norm.name} sums", norm.name))
    join, statistics = ops[f"join {norm.name} sums"], ops[f"{norm.name} statistics"]
    assert [op.writes[0].code for op in sums] == [PARTIAL, PARTIAL]
    assert join.reads == tuple(op.writes[0] for op in sums)
    assert statistics.reads == join.writes
    changed = set(groups.atoms.graph.mutations.values()).intersection(norm.writes)
    assert {value.tensor for value in statistics.writes[1:]} == changed
    assert len(changed) == 2
    for index, (term, piece) in enumerate(zip(sums, pieces, strict=True)):
        (cut,) = term.reads
        assert (cut.code, cut.index) == (0, index)
        assert piece.reads[:2] == (cut, statistics.writes[0])
    # The running statistics are read where they change, and nowhere else.
    assert all(not op.group.free for op in (*sums, *pieces) if op.group)
    assert statistics.group is not None
    assert len(statistics.group.free) == 2
    # A graph in steps can be cut again in the same way, or no longer.
    assert [op.name for op in placed_graph(graph.groups, splits).operators] == [*ops]
    check_flow(placed_graph(graph.groups))


@pytest.mark.parametrize("change", ["frozen input", "statistics that others read", "channels"])
def test_other_cuts_of_a_batch_norm_run_as_before(groups, change):
    (norm,) = (g for g in groups.groups if "batch_norm" in g.anchor.target)
    if change == "channels":
        assert placed_graph(groups, {norm.name: ("channels", 2)}).groups is groups
        return
    if change == "frozen input":
        source = groups.atoms.graph
        frozen = replace(source.tensors[norm.reads[0]], requires_grad=False)
        source = replace(source, tensors={**source.tensors, frozen.name: frozen})
        groups = replace(groups, atoms=replace(groups.atoms, graph=source))
    else:
        norm = replace(norm, writes=(*norm.writes, norm.anchor.outputs[1]))
    assert {label for label, _ in split_choices(groups, norm, 2)} == {"channels"}


@pytest.mark.parametrize(("splits", "words"), [
    ({"nothing": ("rows", 2)}, "no operator group of this name"),
    ({"linear": ("rows", 3)}, "it can be split along"),
    ({"linear": ("nowhere", 2)}, "along nowhere into 2"),
    ({"linear": ("out_features", 1)}, "into 1"),
])  # fmt: skip
def test_impossible_splits_say_what_is_possible(groups, splits, words):
    with pytest.raises(TensorOptError, match=words):
        placed_graph(groups, splits)
