"""Which blocks can be recomputed, and that a strategy counts their forwards."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from tensoropt.capture import capture
from tensoropt.engine.counts import unsplit_strategy
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import GroupGraph, group_operators
from tensoropt.sharding.regions import find_regions


class Layer(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Stages of layers, and a head; ``order`` says which layers run, and how often."""

    def __init__(self, stages: int, layers: int, order: tuple[int, ...] | None = None):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(layers)) for _ in range(stages))
        self.order = order or tuple(range(layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for i in self.order:
                x = stage[i](x)
        return F.mse_loss(self.head(x), y)


def graph_of(model: nn.Module, mode: str = "train") -> GroupGraph:
    x, y = torch.randn(4, 8), torch.randn(4, 4)
    return group_operators(refine_graph(capture(model, (x, y), mode=mode).graph))


def names(graph: GroupGraph) -> list[str]:
    return [region.name for region in find_regions(graph)]


def test_every_layer_of_a_list_is_a_region():
    graph = graph_of(Stack(1, 3))
    regions = find_regions(graph)
    assert [r.name for r in regions] == ["stages.0.0", "stages.0.1", "stages.0.2"]
    paths = {g.name: g.anchor.module for g in graph.groups}
    for region in regions:
        assert all(paths[name].startswith(region.name) for name in region.groups)
    assert "head" in {path for name, path in paths.items() if not any(name in r.groups for r in regions)}


def test_of_nested_lists_the_level_with_the_smaller_inside_is_taken():
    assert names(graph_of(Stack(2, 2))) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_a_layer_that_runs_twice_is_two_regions():
    assert names(graph_of(Stack(1, 2, order=(0, 1, 0)))) == ["stages.0.0", "stages.0.1", "stages.0.0#2"]


def test_one_block_or_inference_has_none():
    assert names(graph_of(Stack(1, 1))) == []
    assert names(graph_of(Stack(1, 3), mode="inference")) == []


class Pairs(nn.Module):
    """Blocks of two linears: what they keep beside their input is little."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for first, second in self.blocks:
            x = second(torch.relu(first(x)))
        return F.mse_loss(x[:, :4], y)


def test_small_blocks_are_no_regions():
    assert names(graph_of(Pairs())) == []


def test_a_strategy_counts_forwards():
    graph = graph_of(Stack(1, 2))
    first, second = find_regions(graph)
    strategy = replace(unsplit_strategy(graph), recomputed=(first,))
    assert {strategy.forwards(name) for name in first.groups} == {2}
    assert {strategy.forwards(name) for name in second.groups} == {1}
    twice = {edge.reader for edge in strategy.edges() if strategy.forwards_of(edge) == 2} - {""}
    assert twice == set(first.groups)


def test_a_frozen_block_below_all_others_is_never_recomputed():
    model = Stack(1, 4)
    model.stages[0][0].requires_grad_(False)
    assert names(graph_of(model)) == ["stages.0.1", "stages.0.2", "stages.0.3"]
