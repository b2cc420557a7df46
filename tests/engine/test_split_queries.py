"""Attention whose queries are split, in models around it: loss and gradients against the unsplit model."""

import random
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from tensoropt.ops.families.attention import ATTENTION
from tensoropt.sharding.configurations import Configuration, enumerate_configurations
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.sequence import sequence_strategies
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.engine.loops import captured_of
from tests.engine.threads import largest_differences, step, unsplit_engine
from tests.verify.sweep_models import decoder

BATCH, SEQUENCE = 4, 120


KINDS = ("causal", "gqa", "full", "window", "bias", "cross")


@cache
def captured(kind: str) -> tuple[GroupGraph, Mapping[str, Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs, _ = decoder(kind, BATCH, SEQUENCE, shared=2 if kind == "gqa" else 1)
    return *captured_of(model.double(), *inputs), inputs


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [(1, 2), (1, 3), (1, 5), (2, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("split", [("queries",), ("ring",), ("queries", "ring")], ids=" ".join)
def test_split_sequences_give_the_loss_and_gradients_of_the_whole(kind, mesh, split):
    graph, values, inputs = captured(kind)
    for strategy in strategies(graph, mesh, set(split)):
        assert strategy.zigzag == (kind in ("causal", "gqa"))
        loss, gradient, worst = largest_differences(strategy, values, inputs, whole(kind))
        assert max(loss, gradient) < 1e-9, (strategy.zigzag, loss, gradient, worst)
