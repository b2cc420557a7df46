"""Only what lies between parameters and the loss gets gradients, and random numbers stay random."""

from __future__ import annotations

import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.double import in_double
from tests.sharding.calls import graph_of_call
from tests.sharding.graph_check import check_graph


class Router(nn.Module):
    """Scores choose, but only the weights of what they chose are differentiable."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        scores = self.gate(x)
        chosen = (scores.sigmoid() + 1.0).topk(2, -1).indices
        return self.layer(x).gather(1, chosen).square().sum() + scores.float().mean()


def test_scores_that_only_choose_get_no_gradient():
    graph = capture(Router(), (torch.randn(6, 8),)).graph
    with_gradient = {op.target: graph.tensors[op.outputs[0]].requires_grad for op in graph.operators}
    assert not any(with_gradient[f"aten.{kind}.default"] for kind in ("sigmoid", "topk"))
    assert all(with_gradient[f"aten.{kind}.default"] for kind in ("linear", "gather", "mean"))


def test_random_numbers_are_drawn_at_every_step():
    """Gumbel noise depends on no input, but is no constant either; memory nobody wrote to is zero."""
    graph = graph_of_call("gumbel")
    assert [op.target for op in graph.operators if "exponential" in op.target] == ["aten.exponential.default"]
    assert all(not value.any() for value in graph.constants.values())
    report = check_graph(graph, parts=(2, 4))
    assert not report.mismatches, str(report)
    assert not report.unknown


def test_double_precision_keeps_every_operator():
    class Casts(nn.Linear):
        def forward(self, x):
            return super().forward(x).float().softmax(-1, dtype=torch.float32).half().float().mean()

    graph = capture(Casts(4, 4), (torch.randn(2, 4),)).graph
    wide = in_double(graph)
    assert [op.name for op in wide.operators] == [op.name for op in graph.operators]
    assert {t.dtype for t in graph.tensors.values()} == {"float32", "float16"}
    assert {t.dtype for t in wide.tensors.values()} == {"float64"}
    assert not any(name in str([op.args for op in wide.operators]) for name in ("float32", "float16"))
