"""Which parameters are gathered together, and which blocks lie before and behind."""

from __future__ import annotations

import torch
from torch import nn

from tensoropt.sharding.blocks import Neighbours, find_blocks
from tests.costs.models import gates, gpt2, problem


def test_repeated_blocks_are_blocks_and_between_them_what_has_parameters() -> None:
    graph = problem(gpt2).graph
    blocks = find_blocks(graph)
    modules = {group.name: group.anchor.module for group in graph.groups}
    of_layer = [
        {number for name, number in blocks.of.items() if f"h.{layer}." in modules[name]} for layer in (0, 1)
    ]
    # The tokens' embedding is first; it is tied to the head, so that no group gathers it ahead.
    positions = {number for name, number in blocks.of.items() if modules[name].endswith("wpe")}
    assert (positions, of_layer) == ({1}, [{2}, {3}])
    assert {number for name, number in blocks.of.items() if "ln_f" in modules[name]} == {4}
    assert [blocks.first.index(name) for name in blocks.first] == list(range(len(blocks.first)))
    assert list(blocks.of.values()) == sorted(blocks.of.values())


def test_blocks_at_either_end_have_one_neighbour() -> None:
    graph = problem(gates).graph
    blocks = find_blocks(graph)
    assert blocks.behind == {4: 3, 3: 2, 2: 1, 1: 0}
    neighbours = {blocks.of[group.name]: blocks.neighbours(group.name) for group in graph.groups}
    assert neighbours == {
        0: Neighbours(before=False, behind=True),
        **dict.fromkeys((1, 2, 3), Neighbours(before=True, behind=True)),
        4: Neighbours(before=True, behind=False),
    }
    # The loss, which has no parameters, belongs to the last block, and backward begins with it.
    last = blocks.last[4]
    assert last == graph.groups[-1].name
    assert blocks.of[last] == 4


class Passing(nn.Module):
    """Sums and moves need nothing in backward, which therefore begins behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x) + x).T + 1.0).sum()


def test_backward_begins_a_block_with_what_needs_something_kept() -> None:
    graph = problem(lambda: (Passing(), (torch.randn(4, 8),), {})).graph
    blocks = find_blocks(graph)
    with_parameters = [group.name for group in graph.groups if group.parameters]
    assert list(blocks.last) == with_parameters


class Counting(nn.Module):
    """A batch norm counts its batches in a group of its own, which autograd never comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().sum()


def test_backward_begins_no_block_with_what_has_no_gradient() -> None:
    graph = problem(lambda: (Counting(), (torch.randn(4, 8),), {})).graph
    blocks = find_blocks(graph)
    tensors = graph.atoms.graph.tensors
    counters = [g.name for g in graph.groups if not any(tensors[n].requires_grad for n in g.writes)]
    assert counters
    assert not {*counters} & {*blocks.last}
    assert None not in blocks.last
