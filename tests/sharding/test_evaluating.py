"""What an evaluation takes over of a plan."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tensoropt.sharding.configurations import Configuration, batch_strategies
from tensoropt.sharding.evaluating import evaluating_strategy, results_by_rows, rows_are_apart
from tensoropt.sharding.groups import GroupGraph
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.models import Call
from tests.sharding.models import grouped_model


def graph_of(rows: int) -> GroupGraph:
    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = m.second(torch.tanh(m.first(x)))
        return y, y.mean(), y.sum(1), y @ y.T

    model = Call(forward, first=nn.Linear(8, 12), second=nn.Linear(12, 4))
    return grouped_model(model, torch.ones(rows, 8), loss=None, mode="inference")


def test_results_with_rows() -> None:
    graph = graph_of(8)
    y, mean, total, products = graph.atoms.graph.outputs
    assert results_by_rows(graph) >= {y, total}
    assert mean not in results_by_rows(graph)
    assert not rows_are_apart(graph), products


def test_configurations_are_taken_over_where_they_fit() -> None:
    plans, calls = graph_of(8), graph_of(6)
    micro, data = micro_strategies(plans, 1), batch_strategies(plans, everywhere=False)
    given = {g.name: Configuration(g, (micro[g.name], data[g.name])) for g in plans.groups}
    plan = random_strategy(plans, (1, 4), micro, random.Random(0), given=given)
    planned = {t.name: t.name for t in calls.atoms.graph.parameters}
    found = evaluating_strategy(plan, calls, planned, (1,))
    # Six rows are not divided among four ranks.
    assert {label for c in found.configurations.values() for label in c.labels} == {"none"}
    assert found.leaving == {}
    assert all(found.stored[name][1:] == plan.stored[name][1:] for name in planned)
    found = evaluating_strategy(plan, graph_of(16), planned, (1,))
    first = plans.groups[0].name
    assert found.configurations[first].labels == plan.configurations[first].labels
    y = found.graph.atoms.graph.outputs[0]
    assert found.leaving[y][1] == 0
    assert found.output_edge(y).target == found.leaving[y]
    assert found.mesh == (1, 4)
