"""Programs of strategies: node by node for small models, and what holds for each node of any strategy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.pipeline.stages import Cutter
from tensoropt.sharding.program import (
    Argument,
    BeginBlock,
    BeginBlockBackward,
    Compute,
    Detach,
    EdgeSteps,
    ForwardProgram,
    KeepViews,
    Move,
    Node,
    Slice,
    lower_program,
)
from tensoropt.sharding.regions import find_regions
from tensoropt.sharding.storage import Gather, Storage
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import Recipe, four, gates, gpt2, llama_two, problem, unrolled
from tests.models import Call
from tests.sharding.test_regions import Layer, Stack
from tests.situations.readers import build_split_weights, build_target_without_gradient


def shown(node: Node) -> str:
    """A node in one line, with what it reads in parentheses: ``x`` as it was made, ``x'`` as it was brought,
    ``x^`` as a linear operator passes it on."""
    match node:
        case Argument():
            text = node.name
        case Slice():
            text = "slice"
        case Detach():
            text = "detach"
        case Move():
            text = f"{node.edge.kind} to {node.edge.reader or 'all'}" + " for its product" * node.product
        case Compute():
            text = node.op.name
        case KeepViews():
            text = "keep views"
    reads = [name + mark(name, provider) for name, provider in node.reads.items()]
    return text + (f"({', '.join(reads)})" if reads else "")


def mark(name: str, provider: Node) -> str:
    if isinstance(provider, Compute):
        return "^" if provider.passes_on == name else ""
    return "" if isinstance(provider, Argument) else "'"


def lines(program: ForwardProgram) -> list[str]:
    """All nodes but those of inputs, parameters and buffers, which come first."""
    first = 0
    while isinstance(program.nodes[first], Argument):
        first += 1
    return [shown(node) for node in program.nodes[first:]]


def strategy_of(build, labels, stored, hubs=None, mode: str = "train") -> Strategy:
    """The strategy on two devices written as a label per group, in order, and stored placements."""
    graph = problem(build, mode).graph
    data = {
        "mesh": [1, 2],
        "groups": {g.name: ["none", label] for g, label in zip(graph.groups, labels, strict=True)},
        "hubs": hubs or {},
        "stored": {name: ["R", placement] for name, placement in stored.items()},
    }
    return Strategy.from_data(data, graph)


def recipe(build) -> Recipe:
    module, args = build()
    return module, args, {}


def split_weights() -> Recipe:
    return recipe(build_split_weights)


def target_without_gradient() -> Recipe:
    return recipe(build_target_without_gradient)


def stack() -> Recipe:
    return Stack(1, 3), (torch.randn(4, 8), torch.randn(4, 4)), {}


def by_batch(build, ahead: Iterable[str] = (), mode: str = "train") -> Strategy:
    """Data parallelism with parameters in shards, some of them gathered ahead."""
    graph = problem(build, mode).graph
    labels = ["d0" if "d0" in {str(s.label) for s in group.strategies} else "none" for group in graph.groups]
    stored = dict.fromkeys((t.name for t in graph.atoms.graph.parameters), "S(0)")
    strategy = strategy_of(build, labels, stored, {hub: ["R", "S(0)"] for hub in graph.hubs}, mode)
    for name in ahead:
        strategy.stored[name] = Storage(strategy.stored[name], Gather.AHEAD).stored
    return strategy


# -- node by node ---------------------------------------------------------------------------------


COLUMNS = ["none", "out_features", "out_features", "d1", "none", "none", "none", "none"]


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_hub_lies_where_it_was_made_until_a_product_passes_it_on(evaluating: bool) -> None:
    names_of = [t.name for t in problem(gates).graph.atoms.graph.parameters]
    stored = {name: "S(0)" if "left" in name or "right" in name else "R" for name in names_of}
    strategy = strategy_of(gates, COLUMNS, stored, {"tanh": ["R", "R/P"]})
    product, passed = ("", "'") if evaluating else (" for its product", "^")
    assert lines(lower_program(strategy, evaluating=evaluating))[1:9] == [
        "tanh(linear)",
        f"activation to all{product}(tanh)",
        "linear_1(tanh', p_model_left_weight, p_model_left_bias)",
        "sigmoid(linear_1)",
        f"linear_2(tanh{passed}, p_model_right_weight, p_model_right_bias)",
        "mul(sigmoid, linear_2)",
        "activation to add(mul)",
        f"activation to add(tanh{passed})",
    ]


LAYERS = [f"p_model_layers_{number}_weight" for number in range(4)]


@pytest.mark.parametrize(
    ("ahead", "forward", "backward"),
    [(0, [0], [0, 1]), (1, [0, 1], [0, 1, 2]), (2, [1, 2], [0, 1, 2, 3]), (3, [2, 3], [1, 2, 3])],
)
def test_only_blocks_with_something_to_do_are_begun(ahead: int, forward: list, backward: list) -> None:
    """In forward a block and the one before it; in backward also what is before that, and the one behind."""
    nodes = lower_program(by_batch(four, LAYERS[ahead : ahead + 1])).nodes
    assert [node.block for node in nodes if isinstance(node, BeginBlock)] == forward
    assert [node.block for node in nodes if isinstance(node, BeginBlockBackward)] == backward


class Last(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class ReadAgain(Layer):
    """A block that reads a weight three times, once without gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        with torch.no_grad():
            y = self.down(torch.relu(self.up(x)))
        return self.up(self.down(torch.relu(self.up(x)))).relu().mean(1, keepdim=True) + x + y


def read_again() -> Recipe:
    return nn.Sequential(ReadAgain(), ReadAgain(), Last()), (torch.randn(4, 8),), {}


def test_a_block_gathers_once_for_all_groups_that_read_alike() -> None:
    strategy = by_batch(read_again)
    for name in strategy.stored:
        strategy.stored[name] = Storage(strategy.stored[name], Gather.AHEAD).stored
    gathered = lower_program(strategy).ahead[0]
    readers = [steps.readers for steps in gathered if steps.edge.tensor == "p_model_0_up_weight"]
    assert readers == [("linear",), ("linear_2", "linear_4")]


def test_views_of_a_parameter_are_kept_for_other_groups() -> None:
    weight = "p_model_weights_0"
    shown_lines = lines(lower_program(by_batch(split_weights)))
    start = shown_lines.index(f"parameter to split({weight})")
    assert shown_lines[start + 1 : start + 3] == [f"split({weight}')", f"keep views({weight}')"]
    graph = problem(split_weights).graph
    stored = dict.fromkeys((t.name for t in graph.atoms.graph.parameters), "R")
    whole = strategy_of(split_weights, ["none"] * len(graph.groups), stored)
    assert not any(isinstance(node, KeepViews) for node in lower_program(whole).nodes)


def test_a_use_without_gradient_is_detached_first() -> None:
    weight, bias = "p_model_encoder_0_weight", "p_model_encoder_0_bias"
    shown_lines = lines(lower_program(by_batch(target_without_gradient)))
    end = shown_lines.index(f"linear_5(args_1', {weight}', {bias}')")
    assert shown_lines[end - 4 : end] == [
        f"detach({weight})",
        f"parameter to linear_5({weight}')",
        f"detach({bias})",
        f"parameter to linear_5({bias}')",
    ]


def shifted() -> Recipe:
    class Shifted(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(x) + torch.ones(4, 8)).square().mean()

    return Shifted(), (torch.randn(4, 8),), {}


def test_a_constant_is_expanded_by_a_slice() -> None:
    """One that is kept at a reduced shape, also where every rank reads it whole."""
    strategy = by_batch(shifted)
    assert [tuple(kept.shape) for kept in strategy.graph.atoms.graph.constants.values()] == [(1, 1)]
    stored = dict.fromkeys(strategy.stored, "R")
    whole = strategy_of(shifted, ["none"] * len(strategy.graph.groups), stored)
    for each in (strategy, whole):
        start = lines(lower_program(each)).index("constant")
        assert lines(lower_program(each))[start + 1 :][:2] == [
            "slice(constant)",
            "add(layer_norm, constant')",
        ]


def ends_inside() -> Recipe:
    return nn.Sequential(Layer(), Last()), (torch.randn(4, 8),), {}


def test_results_leave_outside_of_the_last_region() -> None:
    strategy = replace(by_batch(ends_inside), recomputed=find_regions(problem(ends_inside).graph))
    *_, last, leaving = lower_program(strategy).nodes
    assert last.region is not None
    assert leaving.region is None
    assert shown(leaving) == "output to all(mean)"


def test_a_stage_takes_and_leaves_tensors_as_they_lie() -> None:
    graph = Cutter(problem(four).graph).stages((1, 2), frozenset())[1].graph
    micro = {group.name: group.unsplit for group in graph.groups}
    for seed in range(4):
        program = lower_program(random_strategy(graph, (1, 2), micro, random.Random(seed)))
        ((name, departing),) = program.results
        calls = [node for node in program.nodes if isinstance(node, Compute)]
        assert [node.op.outputs for node in calls] == [("linear_1",), ("relu_1",), (name,)]
        assert departing is calls[-1]
        assert program.outputs == (name,)
        taken = calls[0].reads["relu"]
        assert isinstance(taken.reads["relu"] if isinstance(taken, Move) else taken, Argument)


def repeats() -> Recipe:
    """Returns a result twice, and what it was given."""

    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = m.layer(x)
        return y, y, x

    return Call(forward, layer=nn.Linear(8, 8)), (torch.randn(4, 8),), {}


def test_a_result_leaves_once() -> None:
    program = lower_program(by_batch(repeats, mode="inference"))
    out = "output to all(linear)"
    assert lines(program)[-1] == out
    assert lines(program).count(out) == 1
    assert [shown(node) for _, node in program.results] == [out, out, "args_0"]
    assert program.outputs == ("linear", "linear", "args_0")


# -- any strategy ---------------------------------------------------------------------------------


def drawn(build, seed: int, dtype: str = "float32") -> Strategy:
    graph = problem(build, dtype=dtype).graph
    mesh = ((1, 2), (1, 2, 2), (1, 4), (2, 2))[seed % 4]
    return random_strategy(graph, mesh, micro_strategies(graph, mesh[0]), random.Random(seed), recompute=0.5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", [gates, unrolled, gpt2, llama_two, stack, target_without_gradient])
def test_every_edge_is_moved_along_once_and_gathered_once_for_its_readers(build, seed: int) -> None:
    strategy = drawn(build, seed, "bfloat16" if seed % 2 else "float32")
    program, learns = lower_program(strategy), strategy.graph.learns
    moves = [node for node in program.nodes if isinstance(node, Move)]
    cast = {t.name for t in strategy.graph.atoms.graph.parameters if t.master_dtype is not None}
    cast -= set(strategy.unsharded)
    moving = [e for e in strategy.edges() if e.back or e.tensor in cast or any(strategy.steps(e))]
    assert Counter(node.edge for node in moves) == Counter(e for e in moving if e.kind != "unsharded")
    for node in moves:
        assert (node.steps.forward, node.steps.backward) == strategy.steps(node.edge)
    shared = Counter(node.steps for node in moves)
    assert all(len(steps.readers) == count for steps, count in shared.items())
    assert {steps for each in program.ahead.values() for steps in each} == {
        node.steps for node in moves if node.edge.block is not None and node.edge.back is None
    }
    # Each is gathered as the block before begins, before any of its readers.
    issued: set[EdgeSteps] = set()
    for node in program.nodes:
        if isinstance(node, BeginBlock):
            gathered = [*node.own, *node.following]
            assert issued.isdisjoint(gathered)
            assert list(node.own) == (list(program.ahead.get(0, ())) if node.block == 0 else [])
            assert list(node.following) == list(program.ahead.get(node.block + 1, ()))
            issued.update(gathered)
        if isinstance(node, Move) and node.steps in program.ahead.get(node.edge.block, ()):
            assert node.steps in issued
            for reader in node.steps.readers:
                assert node.steps.recomputed == (reader in strategy.region_of)
                assert learns(node.edge.tensor, reader) == learns(node.edge.tensor, node.edge.reader)


def test_units_are_a_region_behind_what_it_reads_in_order() -> None:
    x = Argument(name="x")
    first, between, second = (
        Slice(reads={"x": x}, layout=(0,), mesh=(1, 2), region="r"),
        Detach(reads={"x": x}),
        Detach(),
    )
    last = Slice(reads={"y": between, "z": second, "x": first}, layout=(0,), mesh=(1, 2), region="r")
    program = ForwardProgram((x, first, between, second, last), (), (), (), (), {})
    assert list(program.units()) == [(x,), (between,), (second,), (first, last)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", [gpt2, llama_two, stack])
def test_a_region_runs_at_once_behind_what_it_reads(build, seed: int) -> None:
    graph = problem(build).graph
    regions = find_regions(graph)
    chosen = tuple(region for number, region in enumerate(regions) if seed == 3 or number != seed)
    once = frozenset(name for region in chosen[:1] for name in region.groups[seed % 2 :: 2])
    strategy = replace(drawn(build, seed), recomputed=chosen, once=once)
    program = lower_program(strategy)
    for node in program.nodes:
        if isinstance(node, (Argument, Slice, BeginBlock)):
            assert node.region is None
        group = graph.group_of[node.op.name].name if isinstance(node, Compute) else ""
        if isinstance(node, Move):
            group = node.edge.reader
        if group:
            region = strategy.region_of.get(group)
            outside = region is None or (group in region.rest and group in once)
            assert node.region == (None if outside else region.name)
            assert node.again == (strategy.forwards(group) == 2)
    units = list(program.units())
    assert Counter(node for unit in units for node in unit) == Counter(program.nodes)
    done = set[Node]()
    for unit in units:
        assert len({node.region for node in unit}) == 1
        assert all(provider in done or provider in unit for node in unit for provider in node.reads.values())
        assert [node for node in program.nodes if node in unit] == list(unit)
        done.update(unit)
    assert [unit[0].region for unit in units if unit[0].region] == [region.name for region in chosen]
