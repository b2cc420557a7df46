"""Prices of placed operators, against the simulator of sharded plans and by hand.

Constraints reach the placed problem, or are refused by name.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from tensoropt import load_cluster, load_model
from tensoropt.capture import capture
from tensoropt.costs.prices import DevicePrices, Queues
from tensoropt.engine.models import ModelSpec
from tensoropt.engine.models import load_model as load_captured
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.prices import PlacedPrices, lanes
from tensoropt.sharding.configurations import batch_strategies
from tensoropt.sharding.groups import GroupGraph
from tensoropt.verify.random_strategies import random_splits
from tests.placement.execute.cases import costs_on


@pytest.fixture(scope="module")
def priced():
    loaded = load_model("zoo:gpt2-tiny", device="meta", seed=0, batch=8)
    found = capture(loaded.model, loaded.args, loaded.kwargs, loss=None, mode="train")
    costs = costs_on("dgx-h100")
    return PlacedPrices(prepare_graph(found.graph).graph, costs.cluster, costs).price()


def test_stored_bytes_are_those_of_the_parameters(priced):
    graph = priced.prices.graph.atoms.graph
    size = sum(t.bytes for t in graph.parameters)
    assert priced.problem.parameter_bytes.sum() == size
    assert priced.problem.gradient_bytes.sum() == size
    assert priced.problem.optimizer_bytes.sum() == 2 * size


def test_one_device_takes_the_sum_of_its_operators(priced):
    problem = priced.problem
    simulated = simulate_placement(problem, Placement.in_order([0] * problem.size, problem.devices.count))
    total = problem.forward_s[:, 0] + problem.backward_s[:, 0] + problem.update_s[:, 0]
    assert simulated.ends.max() == pytest.approx(float(total.sum()))
    # A tiny model's host takes longer.
    assert simulated.host_s[0] == pytest.approx(float(problem.host_s[:, 0].sum()))
    assert simulated.time_s == simulated.host_s[0] > float(total.sum())


def test_data_parallel_pieces_share_the_work(priced):
    problem, graph = priced.problem, priced.prices.graph
    batch = batch_strategies(graph)
    at = {op.name: i for i, op in enumerate(priced.graph.operators)}
    splits = {
        g.name: (str(batch[g.name].label), 2)
        for g in graph.groups
        if (batch[g.name].label, 2) in priced.split_choices(at[g.name])
    }
    both = priced.split(splits)
    device = [op.index if op.kind == "piece" else 0 for op in both.graph.operators]
    simulated = simulate_placement(both.problem, Placement.in_order(device, 8))
    alone = simulate_placement(problem, Placement.in_order([0] * problem.size, 8))
    assert simulated.peak_bytes[1] < alone.memory_bytes
    assert simulated.peak_bytes[2:] == (0,) * 6
    pieces = [i for i, op in enumerate(both.graph.operators) if op.kind == "piece" and op.index == 1]
    assert both.problem.stored_bytes[pieces].sum() == 0  # parameters stay with their variables


def test_the_pieces_of_a_gradient_are_gone_before_it_is_cast():
    loaded = load_captured(ModelSpec("zoo:mlp", compute_dtype="bfloat16"))
    costs, splits = costs_on("cpu:2", measure="never"), random_splits(loaded.graph, 2, random.Random(0), 1.0)
    graph = PlacedPrices(loaded.graph, costs.cluster, costs).price(splits)
    tensors, seen = loaded.graph.atoms.graph.tensors, set()
    for number, op in enumerate(graph.graph.operators):
        cuts = {(v.code, v.count) for v in op.writes if v.code is not None}
        if op.kind == "variable" and len(cuts) <= 1:
            # bfloat16 as it is read, float32 as it is stored. One piece after another is joined.
            elements = tensors[op.parameters[0]].elements
            assert graph.problem.backward_peak_bytes[number] == 4 * elements
            seen.add(len(cuts))
    assert seen == {0, 1}


@pytest.mark.parametrize(("label", "again"), [("in_features", False), ("out_features", True)])
def test_pieces_are_joined_both_ways_and_terms_are_added_up_once(label, again):
    """Every term has the gradient of the sum as it is."""
    loaded, costs = load_captured(ModelSpec("zoo:mlp")), costs_on("cpu:2", measure="never")
    graph = PlacedPrices(loaded.graph, costs.cluster, costs).price({"linear_2": (label, 2)})
    (at,) = (n for n, op in enumerate(graph.graph.operators) if op.kind == "join" and op.reads[0].count == 2)
    assert (graph.problem.backward_s[at] > 0).tolist() == [again] * 2
    assert graph.problem.backward_peak_bytes[at] == 0


def test_backward_casts_again_the_weights_that_it_reads(monkeypatch):
    """All layers cast two gradients; the first one hands none back, for which it would need its weight."""
    monkeypatch.setattr(DevicePrices, "cast", lambda *_: Queues(1.0, 0.0))
    loaded = load_captured(ModelSpec("zoo:mlp", compute_dtype="bfloat16"))
    costs = costs_on("cpu:2", measure="never")
    problem = PlacedPrices(loaded.graph, costs.cluster, costs).price().problem
    assert [int(seconds) for seconds in problem.backward_s[1:4, 0]] == [2, 3, 3]


@cache
def normalised() -> GroupGraph:
    """A small VGG with two batch norms."""
    return load_captured(ModelSpec("tests.execute.models:vgg_norm_plain")).graph


def norms_of(groups: GroupGraph) -> list[str]:
    return [group.name for group in groups.groups if "batch_norm" in group.anchor.target]


def test_steps_of_a_batch_norm_count_as_parts_of_it():
    costs = costs_on("dgx-a100[2]")
    whole = PlacedPrices(normalised(), costs.cluster, costs).price()
    parallel = whole.split(whole.data_parallel())
    for name in norms_of(normalised()):
        assert parallel.graph.splits[name] == ("batch", 2)
        parts = [i for i in range(parallel.problem.size) if parallel.whole_of(i) == name]
        assert [parallel.graph.operators[i].name.removeprefix(name) for i in parts] == [
            " sums[1/2]", " sums[2/2]", " statistics", "[1/2]", "[2/2]",
        ]  # fmt: skip
        # From each part, the batch norm is cut anew as a whole, or no longer over the batch.
        for i in parts:
            assert {label for label, _ in parallel.split_choices(i)} == {"channels"}
        (again,) = {choice for i in parts for choice in parallel.split_choices(i)}
        assert not {name, f"{name} sums"} & set(parallel.split({name: again}).graph.steps)
        # Nothing is free: the input is read once more than by the whole norm, and results are as large.
        at = [op.name for op in whole.graph.operators].index(name)
        for seconds in ("forward_s", "backward_s"):
            both, alone = (getattr(graph.problem, seconds) for graph in (parallel, whole))
            assert both[parts, 0].sum() > alone[at, 0]


def test_splits_add_up(priced):
    first, second = [g.name for g in priced.prices.graph.groups if g.name.startswith("addmm")][:2]
    once = priced.split({first: ("rows.0", 2)})
    assert once.split({second: ("rows.0", 4)}).graph.splits == {first: ("rows.0", 2), second: ("rows.0", 4)}


def test_lanes_are_wires_ports_or_cards():
    wired = load_cluster("dgx-v100")
    assert lanes(wired, 0, 1) != lanes(wired, 1, 0)
    many = load_cluster("dgx-h100x2")
    assert lanes(many, 0, 1) == ("device 0 out", "device 1 in")
    across = lanes(many, 0, 8)
    assert across[0].startswith("node 0 card 0")
    assert lanes(many, 1, 8)[0] != across[0]


def test_results_of_a_call_are_given_to_all_devices():
    with torch.device("meta"):
        layers, inputs = (torch.nn.Linear(16, 64), torch.nn.Linear(64, 4096)), (torch.empty(8, 16),)
    found = capture(torch.nn.Sequential(*layers), inputs, {}, loss=None, mode="inference")
    costs = costs_on("dgx-h100[2]", mode="inference")
    problem = PlacedPrices(prepare_graph(found.graph).graph, costs.cluster, costs).price().problem
    (result,) = problem.results
    assert result.bytes == 8 * 4096 * 4
    assert result.seconds > 0
    alone = Placement.in_order([0] * problem.size, 2)
    priced, free = (simulate_placement(p, alone) for p in (problem, replace(problem, results=())))
    assert priced.ends.max() == pytest.approx(free.ends.max() + result.seconds)
    assert priced.communication_s(1) == pytest.approx(result.seconds)
    # The device that computes nothing has the result, too.
    assert (priced.peak_bytes[1], free.peak_bytes[1]) == (result.bytes, 0)


def test_a_training_step_gives_out_its_loss_alone(priced):
    assert priced.problem.results == ()
