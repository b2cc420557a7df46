"""Attention whose queries are split, in models around it: loss and gradients against the unsplit model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensoropt.ops.families.attention import ATTENTION
from tensoropt.sharding.configurations import Configuration, enumerate_configurations
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.sequence import sequence_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.loops import captured_of
from tests.engine.threads import largest_differences, step, unsplit_engine

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 4, 120, 16, 4, 24


class Block(nn.Module):
    """One layer: attention of one kind, a gated feed-forward with dropout."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.queries = nn.Linear(HIDDEN, HIDDEN)
        self.keys = nn.Linear(HIDDEN, 2 * HIDDEN // (2 if kind == "groups" else 1))
        self.project, self.up = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q = self.queries(self.norm(x)).view(batch, sequence, HEADS, -1).transpose(1, 2)
        read = memory if self.kind == "cross" else x
        k, v = (
            part.view(batch, read.shape[1], -1, HIDDEN // HEADS).transpose(1, 2)
            for part in self.keys(read).chunk(2, -1)
        )
        places = torch.arange(sequence)
        angles = places[:, None] * torch.arange(1, HIDDEN // HEADS + 1)[None, :] * 0.1
        q = q * angles.cos() + q.flip(-1) * angles.sin()
        mask = None
        if self.kind == "window":
            distance = places[:, None] - places[None, :]
            mask = (distance >= 0) & (distance < 7)
        elif self.kind == "bias":
            mask = (-(places[:, None] - places[None, :]).abs() * 0.1).to(q.dtype)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.kind in ("causal", "groups"), enable_gqa=self.kind == "groups"
        )
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(x).chunk(2, -1)
        return x + F.dropout(self.down(F.silu(gate) * value), 0.2)


class Decoder(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.memory = nn.Parameter(torch.randn(10, HIDDEN))
        self.block, self.head = Block(kind), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        x = self.block(x, self.memory.expand(ids.shape[0], *self.memory.shape))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


KINDS = ("causal", "groups", "full", "window", "bias", "cross")


@cache
def captured(kind: str) -> tuple[GroupGraph, Mapping[str, Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    inputs = tuple(torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for _ in range(2))
    return *captured_of(Decoder(kind).double(), *inputs), inputs


@cache
def whole(kind: str) -> tuple[float, dict[str, Tensor]]:
    graph, values, inputs = captured(kind)
    engine = unsplit_engine(graph, values)
    return step(engine, inputs)


def strategies(graph: GroupGraph, mesh: tuple[int, ...], split: set[str]) -> Iterator[Strategy]:
    """Random ones whose attention splits along the sequence in these ways, then context parallelism."""
    micro, rng = micro_strategies(graph, mesh[0]), random.Random(1)
    attention = {
        group.name: configuration
        for group in graph.groups
        if group.anchor.target == ATTENTION
        for configuration in enumerate_configurations(graph.atoms, group, mesh, micro[group.name])
        if set(configuration.labels) == split
    }
    if not attention:
        assert split != {"queries"}
        return
    yield random_strategy(graph, mesh, micro, rng, given=attention)
    along = sequence_strategies(graph, ring="ring" in split)
    followed = {
        g.name: Configuration(g, (micro[g.name], *[along[g.name]] * (len(mesh) - 1))) for g in graph.groups
    }
    yield random_strategy(graph, mesh, micro, rng, given=followed)


@pytest.mark.parametrize("kind", ["causal", "groups", "full", "window", "bias", "cross"])
@pytest.mark.parametrize("mesh", [(1, 2), (1, 3), (1, 5), (2, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("split", [("queries",), ("ring",), ("queries", "ring")], ids=" ".join)
def test_split_sequences_give_the_loss_and_gradients_of_the_whole(kind, mesh, split):
    graph, values, inputs = captured(kind)
    for strategy in strategies(graph, mesh, set(split)):
        assert strategy.zigzag == (kind in ("causal", "groups"))
        loss, gradient, worst = largest_differences(strategy, values, inputs, whole(kind))
        assert max(loss, gradient) < 1e-9, (strategy.zigzag, loss, gradient, worst)
