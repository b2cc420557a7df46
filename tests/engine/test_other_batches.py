"""Batches with fewer or more rows: filled up, or cut where there are no gradients, if the loss can ignore
rows; refused with the reason elsewhere."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt import PlanError, parallelize
from tensoropt.capture import capture
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.other_batches import _shares_of_pieces, filled, ignored_targets, joined_loss
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.execute.jobs import captured_model, spec


class Classifier(nn.Module):
    """A classifier whose loss is computed in one of several ways."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.linear, self.norm = way, nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if self.way == "norm":
            logits = self.norm(logits)
        if self.way == "sum":
            return F.cross_entropy(logits, y, reduction="sum") / len(x)
        loss = F.cross_entropy(logits, y)
        if self.way == "penalty":
            loss = loss + logits.square().mean()
        if self.way == "scaled":
            loss = loss * len(x)
        if self.way == "read":
            loss = F.cross_entropy(logits * y.unsqueeze(1), y)
        return loss


def graph_of(way: str) -> GroupGraph:
    found = capture(Classifier(way), (torch.randn(8, 6), torch.randint(0, 5, (8,))))
    return group_operators(refine_graph(found.graph))


@pytest.mark.parametrize(("way", "says"), [
    ("norm", "batch"),
    ("sum", "computes with 8"),
    ("penalty", "depends on the batch in other ways"),
    ("scaled", "computes with 8"),
    ("read", "reads the targets, too"),
])  # fmt: skip
def test_what_cannot_ignore_rows(way, says):
    found = ignored_targets(graph_of(way))
    assert isinstance(found, str)
    assert says in found


def test_the_input_that_has_targets():
    assert ignored_targets(graph_of("plain")) == {"args_1": -100}
    # Behind a shift by one position, filled up with the ignored target.
    assert ignored_targets(captured_model("gpt2_ignored").graph) == {"labels": -100}
    assert "inference" not in str(ignored_targets(captured_model("mlp").graph))


def test_rows_are_filled_up():
    value = torch.arange(4).view(2, 2)
    assert filled(value, 3, None).tolist() == [[0, 1], [2, 3], [2, 3]]
    assert filled(value, 4, -100).tolist() == [[0, 1], [2, 3], [-100, -100], [-100, -100]]
    assert filled(value, 1, None, 1).tolist() == [[2, 3]]
    assert filled(value, 2, None, 4).tolist() == [[2, 3], [2, 3]]
    assert filled(value, 2, -100, 4).tolist() == [[-100, -100], [-100, -100]]


def test_training_and_evaluation_of_few_rows():
    """Loss and gradients are those of the rows that there are."""
    model, args, _ = spec("tokens").build()
    plain, _, _ = spec("tokens").build()
    parallelize(model, unsplit_strategy(captured_model("tokens").graph), args, {}, as_measured=False)
    for rows in (1, 3, 8):
        ids, labels = (value[:rows].clone() for value in args)
        labels[0, :4] = -100
        for each in (model, plain):
            each.zero_grad()
        ours, expected = model(ids, labels), plain(ids, labels)
        ours.backward()
        expected.backward()
        torch.testing.assert_close(ours, expected)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(ids, labels), expected.detach())
        model.train()
    with pytest.raises(PlanError, match=r"\(8, 6\).*but this call has \(9, 6\).*without gradients"):
        model(torch.cat([args[0], args[0][:1]]), torch.cat([args[1], args[1][:1]]))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("rows", [9, 16, 21])
def test_evaluation_of_many_rows(rows, micro):
    """The loss of pieces with unequal numbers of targets is that of the batch."""
    model, args, _ = spec("tokens").build()
    plain, _, _ = spec("tokens").build()
    graph = captured_model("tokens").graph
    strategy = random_strategy(graph, (micro, 1), micro_strategies(graph, micro), random.Random(0))
    parallelize(model, strategy, args, {}, as_measured=False)
    ids, labels = (torch.cat([value] * 3)[:rows].clone() for value in args)
    labels[0, :4] = labels[9:15] = -100
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels), plain(ids, labels))
    # The plan goes on with its own batches.
    model.train()(*args).backward()


def test_losses_that_count_other_targets_are_not_cut():
    alike = [
        {"a": torch.tensor(1.0), "b": torch.tensor(2.0)},
        {"a": torch.tensor(3.0), "b": torch.tensor(6.0)},
    ]
    assert [float(share) for share in _shares_of_pieces(alike)] == [0.25, 0.75]
    alike[1]["b"] = torch.tensor(1.0)
    with pytest.raises(PlanError, match="ignore different targets"):
        _shares_of_pieces(alike)


def test_a_piece_without_targets_counts_by_nothing():
    losses = [torch.tensor(2.0), torch.tensor(float("nan"))]
    assert float(joined_loss(losses, [{"a": torch.tensor(3.0)}, {"a": torch.tensor(0.0)}])) == 2.0
    assert joined_loss(losses, [{"a": torch.tensor(0.0)}] * 2).isnan()
    assert joined_loss(losses[:1], []) is losses[0]


def test_a_model_that_cannot_ignore_rows_says_why():
    model, args, _ = spec("mlp").build()
    parallelize(model, unsplit_strategy(captured_model("mlp").graph), args, {}, as_measured=False)
    with pytest.raises(PlanError, match="cannot be filled up, because its loss"):
        model(args[0][:3], args[1][:3])
