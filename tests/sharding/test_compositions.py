"""Random small models under random legal strategies, on ranks that are threads, beside the unsplit model.

The widest net for what no single rule can get wrong: atoms that views disagree about, partial sums that
travel too far, hubs, biases inside contractions, constants that are added up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import model_values
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.threads import largest_differences, step

MESHES = ((1, 2), (1, 4), (1, 2, 2), (2, 2))
BATCH = 4
Step = Callable[["Composition", torch.Tensor], torch.Tensor]


class Composition(nn.Module):
    """A chain of random operators; the values along the way are kept, and some are added or joined later."""

    def __init__(self, seed: int, length: int = 9):
        super().__init__()
        self.rng = random.Random(seed)
        self.weights = nn.ParameterDict()
        self.steps: list[Step] = []
        x = torch.zeros(BATCH, 4, 8)
        self.past: list[torch.Tensor] = [x]
        for index in range(length):
            drawn = self.draw(x) if index else linear(self, x)
            assert drawn is not None
            self.steps.append(drawn)
            x = self.steps[-1](self, x)
            self.past.append(x)

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = nn.Parameter(torch.randn(shape) * 0.4)
        return name

    def draw(self, x: torch.Tensor) -> Step:
        """An operator that fits ``x`` (the first dim stays the batch)."""
        drawn = self.rng.choice(MOVES)(self, x)
        return drawn if drawn is not None else self.draw(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past = [x]
        for operator in self.steps:
            x = operator(self, x)
            self.past.append(x)
        return x.square().sum()


Move = Callable[[Composition, torch.Tensor], "Step | None"]


def linear(c: Composition, x: torch.Tensor) -> Step | None:
    out = c.rng.choice([8, 12, 16])
    w, b = c.weight(out, x.shape[-1]), c.weight(out) if c.rng.random() < 0.7 else None
    return lambda m, v: F.linear(v, m.weights[w], m.weights[b] if b else None)


def pointwise(c: Composition, x: torch.Tensor) -> Step | None:
    function = c.rng.choice([torch.tanh, F.gelu, lambda v: v * 0.5, lambda v: v + 0.3, torch.sigmoid])
    return lambda m, v: function(v)


def scale(c: Composition, x: torch.Tensor) -> Step | None:
    w = c.weight(x.shape[-1])
    return lambda m, v: v * m.weights[w]


def permute(c: Composition, x: torch.Tensor) -> Step | None:
    order = list(range(1, x.dim()))
    c.rng.shuffle(order)
    return lambda m, v: v.permute(0, *order)


def factor(c: Composition, x: torch.Tensor) -> Step | None:
    dim, by = c.rng.randrange(1, x.dim()), c.rng.choice([2, 3, 4])
    if x.dim() > 4 or x.shape[dim] % by or x.shape[dim] == by:
        return None
    return lambda m, v: v.unflatten(dim, (by, -1))


def merge(c: Composition, x: torch.Tensor) -> Step | None:
    if x.dim() < 4:
        return None
    dim = c.rng.randrange(1, x.dim() - 1)
    return lambda m, v: v.flatten(dim, dim + 1)


def reduce(c: Composition, x: torch.Tensor) -> Step | None:
    if x.dim() < 4:
        return None
    dim, mean = c.rng.randrange(1, x.dim()), c.rng.random() < 0.5
    return lambda m, v: v.mean(dim) if mean else v.sum(dim) * 0.4


def softmax(c: Composition, x: torch.Tensor) -> Step | None:
    return lambda m, v: torch.softmax(v, -1) * 3.0


def norm(c: Composition, x: torch.Tensor) -> Step | None:
    w, b = c.weight(x.shape[-1]), c.weight(x.shape[-1])
    return lambda m, v: F.layer_norm(v, v.shape[-1:], m.weights[w], m.weights[b])


def add_past(c: Composition, x: torch.Tensor) -> Step | None:
    like = [i for i, p in enumerate(c.past[:-1]) if p.shape == x.shape]
    if not like:
        return None
    index = c.rng.choice(like)
    return lambda m, v: v + m.past[index]


def split_apart(c: Composition, x: torch.Tensor) -> Step | None:
    parts = c.rng.choice([2, 4])
    if x.shape[-1] % parts or x.shape[-1] // parts < 2:
        return None
    return lambda m, v: torch.stack(v.chunk(parts, -1), 1).prod(1)


def join(c: Composition, x: torch.Tensor) -> Step | None:
    if x.numel() > 4096:
        return None
    dim = c.rng.randrange(1, x.dim())
    return lambda m, v: torch.cat([v, torch.tanh(v)], dim)


def cut(c: Composition, x: torch.Tensor) -> Step | None:
    dim = c.rng.randrange(1, x.dim())
    if x.shape[dim] < 4:
        return None
    start = c.rng.choice([0, 1, x.shape[dim] // 2])
    return lambda m, v: v.narrow(dim, start, v.shape[dim] // 2)


def product(c: Composition, x: torch.Tensor) -> Step | None:
    if x.dim() < 3 or x.numel() > 4096:
        return None
    return lambda m, v: (v @ v.transpose(-1, -2)) * 0.2


def shifted(c: Composition, x: torch.Tensor) -> Step | None:
    dim = c.rng.randrange(1, x.dim())
    return lambda m, v: torch.roll(v, 1, dim)


def biased_product(c: Composition, x: torch.Tensor) -> Step | None:
    """A product to which a constant is added (position biases of attention)."""
    if x.dim() != 3:
        return None
    w = c.weight(x.shape[0], x.shape[2], 8)
    return lambda m, v: torch.baddbmm(
        torch.arange(8, dtype=v.dtype).expand(v.shape[0], v.shape[1], 8), v, m.weights[w], beta=0.1, alpha=0.5
    )


def wide(c: Composition, x: torch.Tensor) -> Step | None:
    if x.dim() > 3:
        return None
    return lambda m, v: v.unsqueeze(1).expand(v.shape[0], 2, *v.shape[1:])


MOVES: tuple[Move, ...] = (
    *(linear, linear, pointwise, scale, permute, factor, factor, merge, reduce, softmax, norm),
    *(add_past, split_apart, join, cut, product, shifted, biased_product, wide),
)


def strategies_hold(seed: int, count: int = 2) -> None:
    torch.manual_seed(seed)
    model = Composition(seed).double()
    x = torch.randn(BATCH, 4, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    graph: GroupGraph = group_operators(refine_graph(captured.graph))
    values = model_values(captured)
    whole = step(ShardedEngine(unsplit_strategy(graph), values, runtime=Runtime((1,), rank=0)), (x,))
    model.zero_grad()
    loss = model(x)
    loss.backward()
    assert whole[0] == pytest.approx(float(loss), rel=1e-10)
    rng = random.Random(seed)
    for mesh in MESHES:
        try:
            micro = micro_strategies(graph, mesh[0])
        except MicroBatchRefused:
            continue
        for _ in range(count):
            strategy = random_strategy(graph, mesh, micro, rng)
            far, gradient, worst = largest_differences(strategy, values, (x,), whole)
            chosen = {n: c.labels for n, c in strategy.configurations.items()}
            assert far < 1e-9, (mesh, far, chosen)
            assert gradient < 1e-9, (mesh, worst, gradient, chosen)


@pytest.mark.parametrize("seed", range(8))
def test_random_compositions(seed):
    strategies_hold(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_compositions(seed):
    strategies_hold(seed, count=3)


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
