"""Gradients that are reduced beside the product of a weight's gradient: numbers, and what is issued when."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensoropt.engine import beside_weights
from tensoropt.engine.parameters import shard_of
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.regions import Region
from tensoropt.sharding.strategy import Strategy
from tensoropt.verify.fake_ranks import fake_job
from tests.engine.loops import Loop, captured_of, kept_graph, two_calls_and_one_backward, usual
from tests.engine.threads import ThreadRuntime, on_ranks, unsplit_engine

X = torch.randn(4, 6, 8)


class Gated(nn.Module):
    """A product of two projections: a tensor that two linear operators read, and one that only one reads."""

    def __init__(self, *, bias: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8, bias=bias)
        self.left, self.right = nn.Linear(8, 16, bias=bias), nn.Linear(8, 16, bias=bias)
        self.middle, self.leave = nn.Linear(16, 8, bias=bias), nn.Linear(8, 12, bias=bias)
        if frozen:
            for layer in (self.left, self.leave):
                layer.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.enter(x))
        x = torch.tanh(self.middle(torch.sigmoid(self.left(x)) * self.right(x)))
        return self.leave(x).square().sum()


@cache
def captured(bias: bool = True, frozen: bool = False) -> tuple[GroupGraph, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return captured_of(Gated(bias=bias, frozen=frozen), X)


WHOLE, ROWS = ("R", "none"), ("S(1)", "d1")


def strategy(graph: GroupGraph, source: tuple[str, str], micro: int = 1) -> Strategy:
    """Columns then rows of the weights on two ranks; what linear operators read first lies whole, or in
    shards of the sequence."""
    placed, label = source
    first = "d0" if micro > 1 else "none"
    labels, stored = {}, {}
    for group in graph.groups:
        weight = next((n.removeprefix("p_model_").split("_")[0] for n in group.parameters), "")
        along = {"left": "out_features", "right": "out_features", "leave": "out_features"}.get(weight)
        if weight == "middle":
            along = f"in_features@{placed}"
        elif weight == "enter":
            along = label
        elif not weight:  # the product of the two, and what follows the last projection
            along = "d2" if "mul" in group.name else "none"
        labels[group.name] = [first, along]
    graph_labels = {g.name: {str(s.label) for s in g.strategies} for g in graph.groups}
    for name, (_, along) in labels.items():
        assert along in graph_labels[name], (name, along, graph_labels[name])
    for tensor in graph.atoms.graph.parameters:
        part = tensor.name.removeprefix("p_model_").split("_")[0]
        split = {"left": "S(0)", "right": "S(0)", "leave": "S(0)"}.get(part, "R/P" if placed != "R" else "R")
        if part == "middle":
            split = "S(1)" if len(tensor.shape) == 2 else "P" if placed == "R" else "R"
        stored[tensor.name] = [("R/P" if micro > 1 else "R"), split if split != "P" else "R"]
    hubs = {name: [first.replace("d0", "S(0)").replace("none", "R"), "R/P"] for name in graph.hubs}
    return Strategy.from_data({"mesh": [micro, 2], "groups": labels, "hubs": hubs, "stored": stored}, graph)


def assert_as_unsplit(found: Strategy, values: dict[str, torch.Tensor], loop: Loop = usual) -> None:
    whole = unsplit_engine(found.graph, values)
    loop(whole, X)

    def work(own: ThreadRuntime) -> None:
        engine = ShardedEngine(found, values, runtime=own)
        loop(engine, X)
        for name, gradient in engine.shards.gradients.items():
            want = shard_of(own, name, found.atoms(name), found.stored[name], whole.shards.gradients[name])
            torch.testing.assert_close(gradient, want, msg=name)

    on_ranks(found.mesh, work)


@pytest.mark.parametrize("source", [WHOLE, ROWS], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("more", [{}, {"bias": False}, {"frozen": True}], ids=["bias", "no bias", "frozen"])
@pytest.mark.parametrize(
    ("loop", "micro"), [(usual, 1), (usual, 2), (two_calls_and_one_backward, 1), (kept_graph, 1)]
)
def test_gradients_are_those_of_the_unsplit_model(loop, micro, more, source):
    graph, values = captured(**more)
    found = strategy(graph, source, micro)
    # The hub is read by two linear operators, the other tensor by the last one.
    beside = found.reduced_beside
    assert [name in graph.hubs for name in beside] == [True, False]
    kinds = {found.steps(edge)[1][0].kind for _, edge in beside.values()}
    assert kinds == {"all_reduce" if source is WHOLE else "reduce_scatter"}
    assert_as_unsplit(found, values, loop)


@pytest.mark.parametrize("source", [WHOLE, ROWS], ids=["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("first", [0, 1], ids=["with the hub's producer", "without"])
def test_recomputed_gradients_are_the_same(source, first):
    graph, values = captured()
    names = tuple(group.name for group in graph.groups)
    found = replace(strategy(graph, source), recomputed=(Region("block", names[first:-1]),))
    # Where the hub comes from outside of the region its gradient is reduced by itself.
    assert len(found.reduced_beside) == (2 if first == 0 else 1)
    assert_as_unsplit(found, values)


@pytest.mark.parametrize("source", [WHOLE, ROWS], ids=["all_reduce", "reduce_scatter"])
def test_a_compiler_is_given_the_edge_and_the_product(source, monkeypatch):
    graph, values = captured()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(beside_weights._LinearBeside, "forward", None)
    assert_as_unsplit(strategy(graph, source), values)


class Issued(TorchDispatchMode):
    """Names of products and collectives in order, with the shapes of what products give."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in ("allreduce_", "_reduce_scatter_base_"):
            self.names.append(name)
        elif name == "mm":
            self.names.append(f"product {tuple(result.shape)}")
        return result


@pytest.mark.parametrize(
    ("source", "collective"), [(WHOLE, "allreduce_"), (ROWS, "_reduce_scatter_base_")], ids=["whole", "rows"]
)
def test_the_collective_is_issued_before_the_product(source, collective):
    graph, values = captured(bias=False)
    found = strategy(graph, source)
    with fake_job(0, 2):
        engine = ShardedEngine(found, values)
        loss = engine(X)[0]
        with Issued() as issued:
            loss.backward()
    rows = 4 * 6
    of_input, of_weight = f"product {(rows, 8)}", "product (8, 8)"
    assert issued.names[:9] == [
        *(of_input, collective, "product (6, 8)"),  # the last projection
        *(of_weight, of_input),  # of `middle` nothing is reduced: PyTorch's own product
        *(of_weight, of_input),  # the hub's second reader
        *(of_input, collective),  # its first
    ]
    assert issued.names[9] == of_weight


def test_nothing_is_split_where_no_gradient_flows():
    graph, values = captured()
    found = strategy(graph, WHOLE)

    def work(own: ThreadRuntime) -> None:
        engine = ShardedEngine(found, values, runtime=own)
        with torch.no_grad():
            (training,) = engine(X)
        (evaluated,) = engine(X, evaluating=True)
        evaluated.backward()
        torch.testing.assert_close(training, evaluated.detach())

    on_ranks(found.mesh, work)
