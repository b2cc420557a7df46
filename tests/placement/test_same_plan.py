"""The same plan said in two ways has the same step: prices do not depend on the kind of a plan.

On two devices only: from three on, a placed plan sends whole parameters from the one device that stores
them, where a sharded plan gathers them with collectives. Cut over the batch, a batch norm is three operators
in a placed plan and one with collectives inside in a sharded one, so a placed plan has more calls to issue:
batches of models with them keep devices busier than their hosts.
"""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.evaluation.evaluate import evaluate_on
from tensoropt.evaluation.problem import Problem, model_flops, prepare, unsplit
from tensoropt.launchers import LaunchedJob
from tensoropt.pipeline import strategy
from tensoropt.pipeline.evaluate import evaluate_pipeline_on
from tensoropt.placement import Placement, SimulatedPlacement, simulate_placement
from tensoropt.placement.graph import OperatorKind
from tensoropt.placement.prices import PlacedPrices
from tensoropt.planners.pinned import simulate_pinned
from tensoropt.question.model_source import load_model
from tests.models import Call
from tests.pipeline.models import split_along_the_batch
from tests.placement.execute.cases import costs_on

TIME, MEMORY = 0.1, 0.03
"""The shares by which two ways of saying a plan may differ."""


def stack() -> nn.Module:
    """Equal layers, whose work is long beside everything else."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    return Call(lambda m, x: m.layers(x).square().mean(), layers=layers)


# Batches are so large that activations take more than a second copy of parameters, which only a sharded plan
# has beside the shard on its own rank.
BATCHES = {
    "stack": 32768, "gpt2-tiny": 64, "lenet": 1024, "gpt2-tiny-dropout": 64, "gpt-mini": 64, "bert-tiny": 64,
    "llama-tiny": 64, "mixtral-tiny": 64, "transformer-tiny": 256, "vgg11-tiny": 1024, "resnet-tiny": 16384,
}  # fmt: skip
FAST = ("stack", "gpt2-tiny", "lenet", "resnet-tiny")
MODELS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in BATCHES]
NODES = {
    "name": "two nodes",
    "nodes": [{"count": 2, "devices": [{"kind": "H100-80GB", "count": 1}]}],
    "links": {"inter_node": "IB-400G"},
}
CLUSTERS = {"CPU ranks": "cpu:2", "one node": "dgx-h100[2]", "two nodes": NODES}


@cache
def problem_of(name: str) -> Problem:
    if name == "stack":
        model = stack().to("meta")
        return prepare(capture(model, (torch.empty(BATCHES[name], 1024, device="meta"),), {}))
    loaded = load_model(f"zoo:{name}", device="meta", seed=0, batch=BATCHES[name])
    return prepare(capture(loaded.model, loaded.args, loaded.kwargs, loss=None, mode="train"))


@cache
def costs_of(cluster: str) -> CostSource:
    return costs_on(load_cluster(CLUSTERS.get(cluster, cluster)), measure="never")


def data_parallel(problem: Problem, costs: CostSource) -> SimulatedPlacement:
    """Every group's batch cut into a piece for each device, and whole parameters dealt out evenly."""
    devices = costs.cluster.device_count
    whole = PlacedPrices(problem.graph, costs.cluster, costs).price()
    cut = whole.split(whole.batch_cuts(devices))
    lies = [op.index if op.kind is OperatorKind.PIECE else 0 for op in cut.graph.operators]
    stored, load = cut.problem.parameter_bytes, np.zeros(devices)
    for number in np.argsort(-stored, kind="stable").tolist():
        if cut.graph.operators[number].kind is OperatorKind.VARIABLE:
            lies[number] = int(load.argmin())
            load[lies[number]] += stored[number]
    return simulate_placement(cut.problem, Placement.in_order(lies, devices))


def least_s(problem: Problem, costs: CostSource) -> float:
    """The seconds of a device's share of the work at its peak."""
    whole, device = unsplit(problem.graph, costs.facts.of), costs.cluster.device
    flops = model_flops(whole.values(), costs.facts.of, device.type, costs.kernels)
    return sum(count / device.flops[number] for number, count in flops.items()) / costs.cluster.device_count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", ["cpu:1", "dgx-h100[1]"])
def test_on_one_device_all_kinds_are_one(name, cluster):
    problem, costs = problem_of(name), costs_of(cluster)
    graph = PlacedPrices(problem.graph, costs.cluster, costs).price()
    placed = simulate_placement(graph.problem, Placement.in_order([0] * graph.problem.size, 1))
    metrics = simulate_pinned(problem, costs, LaunchedJob(launcher="megatron")).evaluation.metrics
    assert placed.time_s == pytest.approx(float(metrics.time_s[0]), rel=1e-3)
    assert placed.memory_bytes == pytest.approx(float(metrics.memory[0].sum()), rel=MEMORY)
    assert placed.communication_s(0) == metrics.communication_s[0] == 0.0
    assert placed.time_s >= least_s(problem, costs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_data_parallelism_placed_is_data_parallelism_sharded(name, cluster):
    problem, costs = problem_of(name), costs_of(cluster)
    placed = data_parallel(problem, costs)
    # Parameters are stored once, and gathered once in a step.
    metrics = simulate_pinned(
        problem, costs, LaunchedJob(launcher="megatron", data=2, stage=2)
    ).evaluation.metrics
    assert placed.time_s == pytest.approx(float(metrics.time_s[0]), rel=TIME)
    assert placed.memory_bytes == pytest.approx(float(metrics.memory[0].sum()), rel=MEMORY)
    assert min(placed.time_s, float(metrics.time_s[0])) >= least_s(problem, costs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_pipeline_of_one_stage_is_the_sharded_plan(name, cluster, monkeypatch):
    # Such a pipeline is refused, as it is none.
    monkeypatch.setattr(strategy, "check_schedule", lambda *_: None)
    problem, costs = problem_of(name), costs_of(cluster)
    pipeline = split_along_the_batch(problem.graph, (), (1, 1, 2))
    sharded = evaluate_on(pipeline.stages[0], Mesh(shape=(2,), names=("replica",)), costs).metrics
    staged = evaluate_pipeline_on(pipeline, Mesh(shape=(1, 2), names=("stage", "replica")), costs)
    assert staged.time_s == pytest.approx(float(sharded.time_s[0]), rel=TIME)
    assert staged.memory.sum() == pytest.approx(float(sharded.memory[0].sum()), rel=MEMORY)
    assert staged.time_s >= least_s(problem, costs)
