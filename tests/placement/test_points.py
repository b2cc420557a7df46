"""Placed points beside a frontier: saved, loaded, shown, explained, exported.

Placed plans survive their files, and are refused for what they do not fit.
"""

import csv
from dataclasses import replace

import pytest
import torch
from torch import nn

from tensoropt import Plan, PlanError
from tensoropt.capture import capture
from tensoropt.costs.process_memory import CONSTANTS
from tensoropt.evaluation.problem import prepare_graph
from tensoropt.exploration.exploration import load_exploration
from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv
from tensoropt.placement import Placement, simulate_placement
from tensoropt.placement.points import events_of, operator_rows, owned_on, placed_strategy
from tensoropt.placement.prices import PlacedPrices, PricedGraph
from tensoropt.plan.spent import NOTHING, spent_by_group
from tensoropt.planners.placed.common.units import PlacedAnswer
from tensoropt.planners.results import _simulated_answer
from tensoropt.simulate.recording import MEMORY_KINDS
from tests.placement.execute.cases import costs_on, plan_of
from tests.planners.problems import frontier, small


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def priced(width: int = 8) -> PricedGraph:
    found = capture(net(width), (torch.randn(4, 8),), {}, loss=lambda y: y.mean(), mode="train")
    costs = costs_on("netsplit-paper")
    prices = PlacedPrices(prepare_graph(found.graph).graph, costs.cluster, costs)
    return prices.price({"linear": ("out_features", 2)})


@pytest.fixture(scope="module")
def graph():
    return priced()


@pytest.fixture(scope="module")
def plan(graph):
    device = [i % 3 for i in range(graph.problem.size)]
    return plan_of(graph, Placement.in_order(device, 3), "net")


def test_a_plan_gives_back_its_placement(graph, plan):
    again = Plan.model_validate_json(plan.to_json())
    found = placed_strategy(again, graph.prices.graph)
    simulated = simulate_placement(graph.problem, found.placement)
    assert simulated.time_s == plan.predicted.time_s
    assert [(graph.problem.tensors[t].name, *rest) for t, *rest in simulated.transfers] == list(
        found.transfers
    )
    assert set(found.placement.device) == {0, 1, 2}


def changed(plan: Plan, what: str) -> Plan:
    operators = dict(plan.operators)
    if what == "an operator less":
        del operators["linear_1"]
    elif what == "an order":
        first = next(iter(operators))
        operators[first] = operators[first].model_copy(update={"order": 9})
    more = {"micro-batches": {"micro_batches": 2}, "no stages": {"stages": None}}.get(what, {})
    return plan.model_copy(update={"operators": operators, **more})


@pytest.mark.parametrize(("what", "width", "says"), [
    ("", 16, "other shapes"),
    ("an operator less", 16, "nothing of operator linear_1"),
    ("an order", 8, "must number operators"),
    ("micro-batches", 8, "2 micro-batches cannot cut operators into pieces as well"),
    ("no stages", 8, "places no operators on single devices"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(graph, plan, what, width, says):
    groups = (graph if width == 8 else priced(width)).prices.graph
    with pytest.raises(PlanError, match=says):
        placed_strategy(changed(plan, what), groups)


def test_a_placed_plan_has_no_strategy_on_a_mesh(graph, plan):
    says = r"each of its operators runs on one device; give tensoropt\.parallelize the plan itself"
    with pytest.raises(PlanError, match=says):
        plan.strategy(graph.prices.graph)


@pytest.fixture(scope="module")
def explored():
    """A frontier of gpt2 on two devices with one placed point among the others and one in it."""
    question = small("gpt2")
    graph = question.placing()
    half = Placement.in_order([2 * i // graph.problem.size for i in range(graph.problem.size)], 2)
    found = _simulated_answer(question, "by hand", graph, PlacedAnswer(half, ("cut in the middle",)))
    point = found.point
    other = point.changed(planner="somebody else", memory_bytes=1.0, time_s=1e9)
    return replace(question.base, points=(other, *frontier("gpt2")), others=(point, other))


def test_it_survives_saving(explored, tmp_path):
    explored.save(tmp_path)
    again = load_exploration(tmp_path)
    assert again.points == explored.points
    assert again.others == explored.others
    assert len(again.all_points) == len(explored.points) + 1


def test_its_figures_are_the_simulators(explored):
    point, question = explored.others[0], small("gpt2")
    strategy = placed_strategy(explored.plan(point), question.prepared.graph)
    simulated = simulate_placement(question.placing().problem, strategy.placement)
    assert point.time_s == simulated.time_s
    # Beside what the simulator follows every device has the model's constants.
    assert point.tensor_bytes == max(simulated.peak_bytes)
    assert set(point.terms) == {CONSTANTS}
    assert point.memory_bytes == point.tensor_bytes + point.terms[CONSTANTS]
    assert point.compute_s + point.exposed_s + point.idle_s == pytest.approx(point.time_s)
    assert point.exposed_s + point.hidden_s == pytest.approx(point.communication_s)
    assert sum(count for *_, count in point.collectives) == len(simulated.transfers)
    assert sum(point.sources.values()) == pytest.approx(1.0)
    sizes = simulated.problem.tensors
    out = [sum(sizes[t].bytes for t, source, *_ in simulated.transfers if source == d) for d in (0, 1)]
    assert point.sent_bytes == max(out) > 0
    # What is stored is always there, and the others from one event to the end of another.
    rows = (row for device in (0, 1) for row in owned_on(simulated, device))
    told = {(kind in MEMORY_KINDS[:3], since != "", until != "") for *_, kind, _, _, _, since, until in rows}
    assert told == {(True, False, False), (False, True, True)}


def test_its_figures_are_those_of_all_micro_batches():
    question = small("gpt2", ((2,),), (1, 2))
    points, tables = {}, {}
    for count in (1, 2):
        graph = question.placing(count)
        size = graph.problem.size
        half = Placement.in_order([2 * i // size for i in range(size)], 2)
        points[count] = _simulated_answer(question, "by hand", graph, PlacedAnswer(half)).point
        plan = question.base.plan(points[count])
        assert plan.micro_batches == count
        strategy = placed_strategy(Plan.model_validate_json(plan.to_json()), question.prepared.graph)
        assert (strategy.micro_batches, strategy.placement.device) == (count, half.device)
        sent = sum(n for *_, n in points[count].collectives)
        assert sent == count * len(strategy.transfers)
        simulated = simulate_placement(graph.problem, half)
        names = [op.name for op in graph.graph.operators]
        spent = spent_by_group(events_of(simulated), set(names))
        every = {name: spent.get(name, NOTHING) for name in names}
        tables[count] = operator_rows(graph.graph, simulated, every, 2 * [graph.prices.of_kinds()[0].compute])
        assert tables[count][0].forward_s == pytest.approx(count * float(graph.problem.forward_s[0, 0]))
        assert {row.copies_s for row in tables[count] if row.members} == {0.0}
    assert points[1].space != points[2].space
    assert points[1].identity != points[2].identity
    kept = [sum(row.kept_bytes for row in tables[count]) for count in (1, 2)]
    # Values that do not follow the batch, such as those of positions, are there once for each.
    assert kept[0] <= kept[1] < 1.2 * kept[0]
    names = {event.name for event in events_of(simulated) if event.phase == "forward"}
    assert {name.rsplit(" ", 1)[1] for name in names} == {"0", "1"}


def test_it_is_exported_device_by_device(explored, tmp_path):
    write_frontier_csv(explored, tmp_path / "frontier.csv")
    write_strategies_csv(explored, tmp_path / "strategies.csv")
    with open(tmp_path / "frontier.csv", newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["mesh"], first["planner"], first["devices"]) == ("placed on 2", "somebody else", "2")
    with open(tmp_path / "strategies.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    axes = max(len(space.mesh.names) for space in explored.spaces)
    assert header == ["point", "operator", *(f"axis_{i}" for i in range(axes)), "options"]
    assert [row for row in rows if row[0] == "1"] == [
        ["1", name, *[""] * axes, f"device {operator.device}, position {operator.order}"]
        for name, operator in explored.plan(0).operators.items()
    ]
    assert {row[0] for row in rows} == {str(i + 1) for i in range(len(explored.points))}
