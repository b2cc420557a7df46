"""Following the sequence through decoders, encoders with cross attention, and what cannot follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.cost_graph import NO_OPTION, VariableTable
from tensoropt.costs.source import CostSource, build_tables
from tensoropt.evaluation.problem import prepare
from tensoropt.graph import OperatorGraph
from tensoropt.ops.families.attention import ATTENTION
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.search import track_frontier
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators
from tensoropt.sharding.sequence import sequence_strategies
from tests.models import Call


def followed(graph: OperatorGraph) -> dict[str, str]:
    """The label of each group, by the group's name."""
    groups = group_operators(refine_graph(graph))
    return {name: str(strategy.label) for name, strategy in sequence_strategies(groups).items()}


def graph_of(model: nn.Module, *args: Tensor) -> OperatorGraph:
    return capture(model, args, loss=lambda y: y.square().mean()).graph


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_all_of_a_decoder_follows_its_tokens(name: str, batch: int) -> None:
    built = zoo.build(name, batch=batch, device="meta")
    graph = capture(built.model, built.args, built.kwargs).graph
    labels = followed(graph)
    attention = [labels[op.name] for op in graph.operators if op.target == ATTENTION]
    assert attention == ["queries"] * len(attention)
    # Labels are shifted whole, and cut for the loss.
    whole = {name for name, label in labels.items() if label == "none"}
    assert not any(graph.tensors[graph.by_name[name].outputs[0]].requires_grad for name in whole), whole


def test_cross_attention_follows_its_queries() -> None:
    """Queries of a sequence over keys of another one, which is not an input's second dim there."""

    def crossing(m: Any, x: Tensor) -> Tensor:
        q = m.project(x).view(2, 8, 1, 8).expand(2, 8, 4, 8).transpose(1, 2)
        keys = m.keys.expand(2, 4, 6, 8)
        return F.scaled_dot_product_attention(q, keys, keys)

    model = Call(crossing, keys=(1, 4, 6, 8), project=nn.Linear(8, 8))
    assert "queries" in followed(graph_of(model, torch.randn(2, 8, 8))).values()


def test_what_mixes_positions_stays_whole() -> None:
    layers = {"before": nn.Linear(8, 8), "behind": nn.Linear(8, 8)}
    mixing = Call(lambda m, x: m.behind(torch.cumsum(m.before(x), 1)), **layers)
    graph = graph_of(mixing, torch.randn(2, 8, 8))
    labels = followed(graph)
    assert [labels.get(op.name) for op in graph.operators if "linear" in op.target] == ["d1", "none"]
    assert [labels.get(op.name) for op in graph.operators if "cumsum" in op.target] == ["none"]


def test_the_search_finds_every_way_to_split_attention_inside_a_sequence() -> None:
    """A ring (arXiv 2310.01889), and without it DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1): edges
    exchange the sequence for heads and back."""
    sizes = {"layers": 1, "hidden": 512, "heads": 8, "key_value_heads": 8, "inner": 1024, "vocabulary": 512}
    built = zoo.build("llama3-8b", batch=1, device="meta", sequence=65536, **sizes)
    settings = Settings(dtype="bfloat16", measure="never")
    problem = prepare(capture(built.model, built.args, built.kwargs, dtype=settings.dtype))
    costs = CostSource(load_cluster("dgx-h100[4]"), ProfileStore(":memory:"), settings)
    mesh = Mesh(shape=(4,), names=("gpu",))
    ((_, tables, _),) = build_tables(problem.graph, problem.micro, costs, [mesh], [1], (), None)
    costs_of = {}
    for found, others in (("ring", ()), ("heads", ("ring",)), ("queries", ("ring", "heads"))):

        def allowed(variable: VariableTable, index: int, left_out: tuple[str, ...] = others) -> Any:
            group = variable.key.kind == "group"
            return NO_OPTION if group and tables.labels(str(variable.key), index)[0] in left_out else None

        frontier = track_frontier(tables.restricted(allowed), epsilon=1e-3, max_points=64)
        last = len(frontier) - 1
        fastest = frontier.strategy(last)
        labels = {
            group.name: tables.labels(group.name, fastest[group.name])[0] for group in problem.graph.groups
        }
        operators = problem.graph.atoms.graph.operators
        assert [labels[op.name] for op in operators if op.target == ATTENTION] == [found]
        assert {labels[op.name] for op in operators if "linear" in op.target} == {"d1"}
        memory, *seconds = tables.breakdown(fastest, frontier.options(last))
        costs_of[found] = memory, sum(seconds)
    # Keys and values of the whole sequence are nowhere.
    assert costs_of["ring"][0] < costs_of["queries"][0]
    assert costs_of["ring"][1] < costs_of["heads"][1] < costs_of["queries"][1]
