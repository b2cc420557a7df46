"""Which blocks can be recomputed, and that a strategy counts their forwards.

Which parameters are gathered together, and which blocks lie before and behind.

Recomputed code against PyTorch's checkpoint and against code that keeps everything.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.errors import PlanError
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import (
    Neighbours,
    find_blocks,
    find_regions,
    fitting_once,
    needs_kept,
    recomputed,
    repeated_blocks,
)
from tensoropt.sharding.strategy import Strategy
from tests.costs.models import gates, gpt2, problem
from tests.models import Call
from tests.sharding.models import grouped_model


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


def test_backward_begins_a_block_with_what_needs_something_kept() -> None:
    """Sums and moves need nothing in backward, which therefore begins behind them."""
    layers = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
    passing = Call(lambda m, x: (m.second(m.first(x) + x).T + 1.0).sum(), **layers)
    graph = grouped_model(passing, torch.randn(4, 8), loss=None)
    with_parameters = [group.name for group in graph.groups if group.parameters]
    assert list(find_blocks(graph).last) == with_parameters


def test_backward_begins_no_block_with_what_has_no_gradient() -> None:
    """A batch norm counts its batches in a group of its own, which autograd never comes to."""
    counting = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    graph = grouped_model(counting, torch.randn(4, 8), loss=lambda y: y.square().sum())
    blocks = find_blocks(graph)
    tensors = graph.atoms.graph.tensors
    counters = [g.name for g in graph.groups if not any(tensors[n].requires_grad for n in g.writes)]
    assert counters
    assert not {*counters} & {*blocks.last}
    assert None not in blocks.last


def block(x: torch.Tensor, weight: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(x @ weight)
    unused.sin()
    return hidden * x, hidden.softmax(-1)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight, unused = torch.randn(4, 8), torch.randn(8, 8), torch.randn(3)
    return [t.requires_grad_() for t in (x, weight, unused)]


def test_it_runs_once_in_forward_and_once_when_backward_asks():
    runs = []

    def counted(x):
        runs.append(torch.is_grad_enabled())
        return torch.tanh(x).exp()

    x = torch.randn(3, requires_grad=True)
    result = recomputed(counted, x)
    assert len(runs) == 1
    result.sum().backward()
    assert runs == [True, True]


def kept_bytes(way) -> int:
    """What lives between forward and backward beside the inputs and the result."""
    made: list[weakref.ref] = []

    def chain(x):
        for _ in range(5):
            x = torch.tanh(x)
            made.append(weakref.ref(x))
        return x.sum()

    x = torch.randn(100, requires_grad=True)
    result = way(chain, x)
    alive = sum(ref().numel() * 4 for ref in made if ref() is not None)
    del result
    return alive


def test_nothing_of_the_inside_is_kept():
    assert kept_bytes(recomputed) == 0


def test_inputs_live_as_long_as_backward_may_come():
    x = torch.randn(5, requires_grad=True) * 2
    alive = weakref.ref(x)
    result = recomputed(lambda x: x.sin(), x)
    del x
    assert alive() is not None
    result.sum().backward()
    del result
    assert alive() is None


def test_a_kept_graph_can_be_gone_back_twice():
    own = inputs()
    total = sum(r.sum() for r in recomputed(block, *own))
    first = torch.autograd.grad(total, own[:2], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(total, own[:2]), strict=True):
        assert torch.equal(one, other)


def test_it_runs_again_in_the_precision_of_forward():
    own = inputs()
    found = []

    def noted(x, weight):
        found.append((x @ weight).dtype)
        return x @ weight

    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = recomputed(noted, *own[:2])
    result.float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = checkpoint(noted, *own[:2], use_reentrant=False, early_stop=False)
    assert torch.equal(own[1].grad, torch.autograd.grad(theirs.float().sum(), own[1])[0])
    assert set(found) == {torch.bfloat16}


def test_hooks_of_a_users_own_see_what_is_kept():
    seen = []
    x = torch.randn(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        result = recomputed(lambda x: torch.tanh(x).exp(), x)
    assert seen == [x.shape]
    result.sum().backward()
    assert x.grad is not None


def test_an_input_that_was_changed_is_refused():
    x = torch.randn(4, requires_grad=True)
    scale = torch.ones(4)
    result = recomputed(lambda x, scale: (x * scale).exp(), x, scale)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_code_that_does_other_things_the_second_time_is_refused():
    times = []

    def fickle(x):
        times.append(None)
        for _ in range(len(times)):
            x = torch.tanh(x)
        return x

    with pytest.raises(RuntimeError, match="saved 1 tensors in forward and 2 when it ran again"):
        recomputed(fickle, torch.randn(4, requires_grad=True)).sum().backward()


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
    return grouped_model(model, torch.randn(4, 8), torch.randn(4, 4), loss=None, mode=mode)


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


def pairs(m, x, y):
    for first, second in m.blocks:
        x = second(torch.relu(first(x)))
    return F.mse_loss(x[:, :4], y)


@pytest.mark.parametrize(
    ("build", "mode", "found"),
    [
        # Of nested lists the level with the smaller inside.
        (lambda: Stack(2, 2), "train", ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),
        # A layer that runs twice is two regions.
        (lambda: Stack(1, 2, order=(0, 1, 0)), "train", ["stages.0.0", "stages.0.1", "stages.0.0#2"]),
        (lambda: Stack(1, 1), "train", []),
        (lambda: Stack(1, 3), "inference", []),
        # Of two linears: what they keep beside their input is little.
        (lambda: Call(pairs, blocks=nn.ModuleList(map(two_linears, range(2)))), "train", []),
    ],
    ids=["nested", "twice", "one", "inference", "small"],
)
def test_which_blocks_are_regions(build, mode, found):
    assert names(graph_of(build(), mode)) == found


def two_linears(_: int) -> nn.Module:
    return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


def test_a_strategy_counts_forwards():
    graph = graph_of(Stack(1, 2))
    first, second = find_regions(graph)
    strategy = replace(unsplit_strategy(graph), recomputed=(first,))
    assert {strategy.forwards(name) for name in first.groups} == {2}
    assert {strategy.forwards(name) for name in second.groups} == {1}


def test_a_strategy_is_data_with_what_runs_once():
    graph = graph_of(Stack(1, 2))
    first, second = find_regions(graph)
    strategy = replace(unsplit_strategy(graph), recomputed=(first, second), once=frozenset(second.groups[:2]))
    again = Strategy.from_data(strategy.to_data(), graph)
    assert (again.recomputed, again.once) == (strategy.recomputed, strategy.once)
    assert [strategy.forwards(name) for name in second.groups] == [1, 1] + [2] * (len(second.groups) - 2)
    data = strategy.to_data()
    for once, says in (
        ([graph.groups[-1].name], "to run once in a recomputed block, but it is in no such block"),
        (list(first.groups), "but runs all of its groups once"),
    ):
        with pytest.raises(PlanError, match=says):
            Strategy.from_data({**data, "once": once}, graph)


def test_what_nobody_needs_again_runs_once_where_anything_does():
    graph = problem(gpt2).graph
    for region in find_regions(graph):
        (last,) = region.rest  # the sum with the block's input
        assert graph.group_of[last].anchor.target == "aten.add.Tensor"
        assert region.groups[-1] == last
        assert needs_kept(graph, graph.group_of[region.groups[-2]])
        assert fitting_once(graph, region, region.groups[:1]) == {region.groups[0], last}
        assert fitting_once(graph, region, ()) == frozenset()


def test_a_frozen_block_below_all_others_is_never_recomputed():
    model = Stack(1, 4)
    model.stages[0][0].requires_grad_(False)
    assert names(graph_of(model)) == ["stages.0.1", "stages.0.2", "stages.0.3"]
    # But it is a block, with which a stage may begin.
    assert [region.name for region in repeated_blocks(graph_of(model))] == [f"stages.0.{n}" for n in range(4)]


def test_of_a_trained_model_all_repeated_blocks_can_be_recomputed():
    for build in (gpt2, gates):
        graph = problem(build).graph
        assert repeated_blocks(graph) == find_regions(graph)
    assert repeated_blocks(problem(gpt2, "inference").graph) == ()
