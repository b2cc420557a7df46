"""A constant inside a contraction; random programs are in ``tests/sweep``."""

from __future__ import annotations

import random

import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.threads import largest_differences, step

BATCH = 4


def test_a_constant_inside_a_contraction_is_added_once():
    """Bloom's position biases: added by every rank, gradients were off by a fifth and the loss hardly."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(BATCH, 8, 8))

        def forward(self, x):
            added = torch.arange(8.0).expand(BATCH, 4, 8)
            return torch.softmax(torch.baddbmm(added, x, self.weight), -1).square().sum()

    torch.manual_seed(0)
    model, x = Biased(), torch.randn(BATCH, 4, 8)
    captured = capture(model, (x,))
    graph = group_operators(refine_graph(captured.graph))
    values = model_values(captured)
    whole = step(ShardedEngine(unsplit_strategy(graph), values, runtime=Runtime((1,), rank=0)), (x,))
    micro, rng = micro_strategies(graph, 1), random.Random(0)
    contracted = 0
    for _ in range(12):
        strategy = random_strategy(graph, (1, 2), micro, rng)
        loss, gradient, _ = largest_differences(strategy, values, (x,), whole)
        assert max(loss, gradient) < 1e-5
        (op,) = [op for op in captured.graph.operators if "baddbmm" in op.target]
        contracted += any("d2" in label for label in strategy.configurations[op.name].labels)
    assert contracted
