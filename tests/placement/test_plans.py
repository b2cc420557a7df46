"""Placed plans survive their files, and are refused for what they do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import PlanError
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.plans import placed_strategy, plan_part
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.plan.plan import MeshInfo, ModelInfo, Plan, Predicted, load_plan
from tensoropt.plan.problem import prepare_graph
from tensoropt.plan.settings import Settings
from tensoropt.profiling.store import ProfileStore


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def priced(folder, width: int = 8) -> PricedGraph:
    found = capture(net(width), (torch.randn(4, 8),), {}, loss=lambda y: y.mean(), mode="train")
    cluster = load_cluster("netsplit-paper")
    costs = CostSource(cluster, ProfileStore(folder / "profiles.db"), Settings(), None)
    return PlacedPrices(prepare_graph(found.graph).graph, cluster, costs).price(
        {"linear": ("out_features", 2)}
    )


def plan_of(graph: PricedGraph) -> Plan:
    device = [i % 3 for i in range(graph.problem.size)]
    simulated = simulate_placement(graph.problem, Placement.in_order(device, 3))
    part = plan_part(graph.graph, simulated)
    return Plan(
        planner="by hand",
        model=ModelInfo(source="net", fingerprint=graph.prices.graph.atoms.graph.fingerprint),
        cluster=graph.prices.cluster.to_dict(),
        mesh=MeshInfo(shape=(3,), names=("device",)),
        micro_batches=1,
        optimizer="adam",
        operators=part.operators,
        hubs={},
        parameters=part.parameters,
        placed=part.info,
        predicted=Predicted(
            memory_bytes=simulated.memory_bytes,
            time_s=simulated.time_s,
            compute_s=0,
            communication_s=0,
            additive_memory_bytes=0,
        ),
    )


def test_a_plan_gives_back_its_placement(tmp_path) -> None:
    graph = priced(tmp_path)
    plan = plan_of(graph)
    again = Plan.model_validate_json(plan.to_json())
    found = placed_strategy(again, graph.prices.graph)
    simulated = simulate_placement(graph.problem, found.placement)
    assert simulated.time_s == plan.predicted.time_s
    assert [(graph.problem.tensors[t].name, *rest) for t, *rest in simulated.transfers] == list(
        found.transfers
    )
    assert {found.device_of(op) for op in found.graph.operators} == {0, 1, 2}


def test_another_model_is_refused_with_the_first_difference(tmp_path) -> None:
    plan = plan_of(priced(tmp_path))
    wider = priced(tmp_path, 16).prices.graph
    with pytest.raises(PlanError, match="other shapes"):
        placed_strategy(plan, wider)
    missing = {k: v for k, v in plan.operators.items() if k != "linear_1"}
    with pytest.raises(PlanError, match="nothing of operator linear_1"):
        placed_strategy(plan.model_copy(update={"operators": missing}), wider)


def test_a_placed_plan_has_no_strategy_on_a_mesh(tmp_path) -> None:
    graph = priced(tmp_path)
    with pytest.raises(PlanError, match="one device each"):
        plan_of(graph).strategy(graph.prices.graph)
    with pytest.raises(PlanError, match="places none"):
        placed_strategy(plan_of(graph).model_copy(update={"placed": None}), graph.prices.graph)


def test_orders_count_from_nought(tmp_path) -> None:
    graph = priced(tmp_path)
    plan = plan_of(graph)
    first = next(iter(plan.operators))
    operators = {**plan.operators, first: plan.operators[first].model_copy(update={"order": 9})}
    with pytest.raises(PlanError, match="does not count"):
        placed_strategy(plan.model_copy(update={"operators": operators}), graph.prices.graph)


def test_a_plan_of_several_micro_batches_cuts_no_operator(tmp_path) -> None:
    graph = priced(tmp_path)
    plan = plan_of(graph).model_copy(update={"micro_batches": 2})
    with pytest.raises(PlanError, match="2 micro-batches cannot cut operators into pieces as well"):
        placed_strategy(plan, graph.prices.graph)


def test_an_older_plan_has_one_micro_batch(tmp_path) -> None:
    """Placed plans of earlier versions say so themselves, and keep their schema, which these read."""
    graph = priced(tmp_path)
    plan = plan_of(graph)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == "tensoropt.plan/1"
    assert placed_strategy(load_plan(tmp_path / "plan.json"), graph.prices.graph).micro_batches == 1


def test_an_unknown_schema_is_refused_with_those_that_are_known(tmp_path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"schema": "tensoropt.plan/9"}))
    with pytest.raises(PlanError, match=r"'tensoropt.plan/9', not '.*/1' or '.*/2' or '.*/3'"):
        load_plan(tmp_path / "plan.json")
