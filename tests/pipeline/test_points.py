"""Pipelines among the points of an exploration: saved, loaded, shown, explained, exported, run.

Pipelines in plan files: they come back as they were, and what describes none is refused.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tensoropt import PlanError, Settings
from tensoropt.cluster import Mesh, load_cluster
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.exploration.export import write_frontier_csv, write_strategies_csv
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.points import pipelined_point, pipelined_space, pipelined_strategy, plan_part
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan.kinds import PIPELINED
from tensoropt.plan.plan import MeshInfo, ModelInfo, Plan, Predicted, load_plan
from tensoropt.profiling.overheads import Overheads
from tensoropt.report.detail import detail
from tensoropt.report.step_parts import COMPUTING, WAITING, Detail
from tensoropt.session.run_report import versions
from tensoropt.sharding.groups import GroupGraph
from tests.costs.models import four, problem, three
from tests.pipeline.models import split_along_the_batch, tables, tied
from tests.pipeline.test_evaluate import MESSAGE, RESULT, ROWS, evaluated
from tests.plan.explorations import edited


def plan_of(strategy: PipelinedStrategy, graph: GroupGraph) -> Plan:
    axes = tuple(f"cpu{i}" for i in range(len(strategy.mesh) - 2))
    part = plan_part(strategy, axes, tuple(1000.0 + place for place in range(strategy.places)))
    predicted = Predicted(memory_bytes=1, time_s=1, compute_s=1, communication_s=0, additive_memory_bytes=1)
    return Plan(
        planner="by hand", model=ModelInfo(source="net", fingerprint=graph.atoms.graph.fingerprint),
        cluster=load_cluster(f"cpu:{strategy.devices}").to_dict(), optimizer="adam", hubs={},
        mesh=MeshInfo(shape=strategy.mesh[1:], names=("stage", *axes)), predicted=predicted,
        micro_batches=strategy.micro_batches, operators=part.operators, parameters=part.parameters,
        recomputed=part.recomputed, stages=part.stages,
    )  # fmt: skip


@pytest.fixture(scope="module")
def graph():
    return problem(four).graph


@pytest.fixture(scope="module")
def plan(graph):
    return plan_of(split_along_the_batch(graph, (2,), (4, 2, 2)), graph)


# -- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "cuts", "sizes", "schedule", "again"), [
    (four, (2,), (4, 2, 2), "1f1b", ()),
    (four, (1, 2, 3), (4, 2), "zbv", ()),
    (tables, (6,), (2, 2, 2, 2), "gpipe", ("softmax",)),
    (tied, (1, 2), (4, 3, 2), "1f1b", ()),
])  # fmt: skip
def test_a_plan_gives_back_its_pipeline(build, cuts, sizes, schedule, again, tmp_path):
    graph = problem(build).graph
    strategy = split_along_the_batch(graph, cuts, sizes, schedule, frozenset(again))
    plan = plan_of(strategy, graph)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert pipelined_strategy(loaded, graph) == strategy
    assert loaded.devices == strategy.devices


def test_a_pipeline_is_in_the_stages_of_its_plan(plan):
    data = json.loads(plan.to_json())
    assert plan.kind is PIPELINED
    assert "4 devices of cpu:4, pp2x2" in repr(plan)
    assert data["mesh"] == {"shape": [2, 2], "names": ["stage", "cpu0"], "placed": False}
    pipeline = data["stages"]
    assert (pipeline["schedule"], pipeline["again"], pipeline["peak_bytes"]) == ("1f1b", [], [1000.0, 1001.0])
    assert [stage["begins"] for stage in pipeline["stages"]] == ["", "linear_2"]
    assert pipeline["stages"][0]["groups"]["depart.relu_1"] == ["d0", "d0"]


def test_operators_are_those_of_the_model(plan, graph):
    assert list(plan.operators) == [g.name for g in graph.groups]
    assert plan.operators["linear"].model_dump(include={"axes", "micro", "members"}) == {
        "axes": {"cpu0": "d0"}, "micro": "d0", "members": ("linear", "relu"),
    }  # fmt: skip
    assert {p.key for p in plan.parameters.values()} == {f"layers.{i}.weight" for i in range(4)}
    assert {p.stored for p in plan.parameters.values()} == {("R/P", "R/P")}


# -- refusals -------------------------------------------------------------------------------------


def test_a_pipeline_has_no_strategy_on_one_mesh(plan, graph):
    with pytest.raises(PlanError, match="this pipeline of by hand has no strategy on one mesh"):
        plan.strategy(graph)
    with pytest.raises(PlanError, match="has no pipeline"):
        pipelined_strategy(plan.model_copy(update={"stages": None}), graph)


def test_another_model_is_refused(plan, graph):
    # Of its layers only the second has a ReLU, which crosses the cut.
    says = r"says nothing about depart\.relu \(groups\); it is for another model"
    with pytest.raises(PlanError, match=says):
        pipelined_strategy(plan, problem(three).graph)
    model = plan.model.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(PlanError, match=r"other shapes, dtypes or code \(fingerprint 000000000000"):
        pipelined_strategy(plan.model_copy(update={"model": model}), graph)


def on_a_mesh(*shape: int) -> Callable[[Any], None]:
    """On a cluster of as many devices, so that nothing else is wrong."""

    def change(data: Any) -> None:
        data["mesh"].update(shape=shape)
        data["cluster"] = load_cluster(f"cpu:{shape[0] * shape[1]}").to_dict()

    return change


@pytest.mark.parametrize(("change", "says"), [
    (lambda d: d["stages"].update(stages=[]), "does not say with which operators"),
    (lambda d: d["stages"]["stages"].pop(), "says nothing about linear_2"),
    (lambda d: d["stages"]["stages"][1].update(begins=""), "no operator or module called  that"),
    (lambda d: d["stages"]["stages"][1]["groups"].pop("linear_2"), "says nothing about linear_2"),
    (lambda d: d["stages"]["stages"][1]["groups"].update(linear_9=["d0", "d0"]), "names linear_9"),
    (lambda d: d["stages"]["stages"][0]["stored"].update(p_model_layers_0_weight=["R"]), "expected 2"),
    (lambda d: d.update(micro_batches=1), "1f1b on 2 groups of devices needs|more micro-batches"),
    (on_a_mesh(3, 2), "2 stages do not divide evenly over 3"),
    (on_a_mesh(2, 3), "linear does not divide as d0/d0 over the mesh 4x3"),
])  # fmt: skip
def test_what_describes_no_pipeline_is_refused(plan, graph, tmp_path, change, says):
    loaded = load_plan(edited(plan, tmp_path, change))
    with pytest.raises(PlanError, match=says):
        pipelined_strategy(loaded, graph)


@pytest.mark.parametrize(("change", "says"), [
    *((change, rf"plan\.json is not a plan: {named}") for change, named in (
        (lambda d: d.update(schema="tensoropt.plan/9"), "its schema is 'tensoropt[.]plan/9'"),
        (lambda d: d.update(stages=3), "stages"),
        (lambda d: d["stages"]["stages"][1].pop("groups"), "stages[.]stages[.]1[.]groups"),
        (lambda d: d["stages"]["stages"][0].update(mesh=[4]), "stages[.]stages[.]0[.]mesh"),
        (lambda d: d["stages"].update(peak_bytes="much"), "stages[.]peak_bytes"),
        (lambda d: d["stages"].update(places=2), "stages[.]places"),
    )),
    (lambda d: d["stages"].pop("schedule"), "a placed plan, .* begins with the axis device"),
    (lambda d: d["mesh"].update(names=["cpu0", "stage"]), "the axes cpu0, stage, .* with the axis stage"),
    (lambda d: d["mesh"].update(names=["stage"]), r"the mesh \[2, 2\] needs 2 distinct axis names"),
    (lambda d: d["mesh"].update(shape=[]), r"the mesh \[\] needs 0 distinct axis names"),
    (lambda d: d["mesh"].update(shape=[0, 2]), r"the mesh \[0, 2\] has an axis of size below 1"),
    (lambda d: d["mesh"].update(shape=[2, 0]), r"the mesh \[2, 0\] has an axis of size below 1"),
    (lambda d: d["mesh"].update(shape=[3, 2]), "mesh pp3x2 has 6 devices, but its cluster .* has 4"),
    (lambda d: d["mesh"].update(shape=[2, 3]), "mesh pp2x3 has 6 devices, but its cluster .* has 4"),
])  # fmt: skip
def test_what_is_no_plan_or_contradicts_itself_is_refused_without_a_model(plan, tmp_path, change, says):
    with pytest.raises(PlanError, match=says):
        load_plan(edited(plan, tmp_path, change))


MESH = Mesh(shape=(2, 2), names=("stage", "cpu"))


@pytest.fixture(scope="module")
def found():
    """Two places of two, and four micro-batches."""
    return evaluated(split_along_the_batch(problem(four).graph, (2,), (4, 2, 2)))


@pytest.fixture(scope="module")
def explored(found):
    """The pipeline, and the same with GPipe."""
    graph = problem(four).graph.atoms.graph
    other = evaluated(replace(found.strategy, schedule="gpipe"))
    keys = {t.name: str(t.key) for t in graph.parameters}
    return Exploration(
        points=tuple(pipelined_point(one, MESH, space=0) for one in (found, other)),
        spaces=(pipelined_space(MESH, 4, keys, ["a heuristic"]),),
        model=ModelInfo(source="tests:four", fingerprint=graph.fingerprint),
        cluster=load_cluster("cpu:4").to_dict(),
        settings=Settings(dtype="float32").to_dict(),
        versions=versions(),
        report={"notes": []},
    )


def test_its_figures_are_the_simulators(found, explored):
    point = explored.points[0]
    assert (point.memory_bytes, point.time_s) == (found.memory_bytes, found.time_s)
    assert sum(point.memory) == point.memory_bytes
    assert point.compute_s + point.exposed_s + point.idle_s == pytest.approx(point.time_s)
    assert point.exposed_s + point.hidden_s == pytest.approx(point.communication_s)
    assert sum(point.sources.values()) == pytest.approx(1.0)
    # Nothing was proven of it, and nothing added up by a search.
    assert (point.exact, point.gap, point.proven) == (False, None, "-")
    assert (point.additive_memory_bytes, point.additive_time_s) == (point.memory_bytes, point.time_s)
    added = pipelined_point(found, MESH, space=0, additive=(1.0, 2.0))
    assert (added.additive_memory_bytes, added.additive_time_s) == (1.0, 2.0)


def test_what_it_sends_is_what_the_fullest_rank_sends(explored):
    # Its micro-batch has 4 rows, of which each of two ranks has 2.
    _, gpipe = explored.points
    sends = {(kind, size): count for kind, _, size, count in gpipe.collectives}
    assert sends[("send", ROWS // 2)] == 4
    assert sends[("broadcast", 4)] == 1


def test_the_most_that_a_rank_sends_is_of_all_ranks(found, explored):
    # Of two ranks or places each sends all of a sum, and half of what is gathered or scattered.
    half = ("all_gather", "reduce_scatter", "all_to_all")
    sent = [
        sum(one.bytes * count / (2 if one.kind in half else 1) for one, count in found.sent_by(rank).items())
        for rank in range(4)
    ]
    assert explored.points[0].sent_bytes == max(sent) > min(sent)


def test_its_plan_is_the_pipeline(found, explored):
    plan = explored.plan(0)
    assert pipelined_strategy(plan, problem(four).graph) == found.strategy
    assert (plan.mesh.label, plan.micro_batches, plan.devices) == ("pp2x2", 4, 4)
    assert plan.predicted.memory_bytes == found.memory_bytes
    assert plan.stages is not None
    assert plan.stages.peak_bytes == tuple(found.memory.sum(axis=1))


def test_points_that_differ_in_their_schedule_are_told_apart(explored):
    first, second = explored.points
    assert first.identity != second.identity
    assert first.identity == first.changed(time_s=3.0).identity


def test_it_survives_saving(explored, tmp_path):
    explored.save(tmp_path)
    again = load_exploration(tmp_path)
    assert again.points == explored.points
    assert again.plan(1) == explored.plan(1)


Details = Callable[[PipelineEvaluation], Detail]


@pytest.fixture
def detail_of(explored, monkeypatch):
    """What is said of a pipeline that was simulated at hand's prices, which no exploration saves."""

    def of(found: PipelineEvaluation) -> Detail:
        plan = SimpleNamespace(strategy=found.strategy, evaluated=lambda _: found)
        again = SimpleNamespace(plan=plan, costs=lambda: None)
        monkeypatch.setattr("tensoropt.report.detail.rebuilt", lambda *_: again)
        monkeypatch.setattr("tensoropt.report.detail.recorded_of", lambda _: None)
        return detail(replace(explored, points=(pipelined_point(found, MESH, space=0),)), 0)

    return of


def test_it_is_explained_operator_by_operator(found, detail_of):
    told = detail_of(found)
    operators = {row.group: row for row in told.operators if row.group.startswith("linear")}
    assert [row.configuration["stage"] for row in operators.values()] == ["0", "0", "1", "1"]
    # A second forward and two backward each, in four micro-batches.
    assert {(row.forward_s, row.backward_s) for row in operators.values()} == {(4.0, 8.0)}
    assert told.peak.total == pytest.approx(found.memory_bytes)
    assert told.trace()["traceEvents"]


def test_its_places_take_what_the_headline_says(found, detail_of):
    told = detail_of(found)
    point = told.step
    assert [place.title for place in told.places] == ["devices 0–1, stage 0", "devices 2–3, stage 1"]
    assert [place.idle_s for place in told.places] == pytest.approx(
        [point.time_s - load.compute_s - load.exposed_s for load in found.loads]
    )
    assert told.places[1].idle_s == pytest.approx(point.idle_s)
    assert max(place.memory_bytes for place in told.places) == point.memory_bytes
    assert [place.compute_s for place in told.places] == pytest.approx([4 * 9, 4 * 12])
    busiest = told.places[1]
    assert (busiest.compute_s, busiest.communication_s) == (point.compute_s, point.communication_s)
    assert "on the busiest device" in told.headline()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_its_parts_are_what_the_busiest_place_computes(found, detail_of, schedule):
    found = evaluated(replace(found.strategy, schedule=schedule))
    told = detail_of(found)
    point = told.step
    assert sum(part.seconds for part in told.parts) == pytest.approx(point.time_s)
    parts = {part.title: part.seconds for part in told.parts}
    computing = [part for part in told.parts if part.key == COMPUTING]
    assert sum(part.seconds for part in computing) == pytest.approx(point.compute_s)
    top = max(computing, key=lambda part: part.seconds)
    assert top.title.startswith("linear")
    assert f"most of all {top.title}, {100 * top.seconds / point.time_s:.0f} %" in told.headline()
    # Two linear layers at that place, each a second forward and two backward, in four micro-batches.
    assert parts["linear layers.* (2 ×)"] == pytest.approx(2 * 4 * (1 + 2))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_its_timeline_ends_with_the_step(detail_of, schedule):
    """Optimizer, and the results' way to all ranks, are in it."""
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, 2), schedule)
    found = evaluated(strategy, overheads=Overheads(step_s=1.0))
    told = detail_of(found)
    ends = [event.start_s + event.duration_s for event in told.timeline]
    assert max(ends) == pytest.approx(told.step.time_s)
    by_lane = Counter[str]()
    for event in told.timeline:
        by_lane[event.lane] += event.duration_s
    assert [by_lane[f"stage {i}"] for i in (0, 1)] == pytest.approx(found.times.working_s)
    # The work within the actions is all that a rank computes.
    assert [by_lane[lane] for lane in ("devices 0–1", "devices 2–3")] == pytest.approx(
        [of.compute_s for of in found.loads]
    )
    optimizers = {event.group for event in told.timeline if event.name.startswith("optimizer of")}
    assert optimizers == {"stage 0", "stage 1"}


def test_the_work_of_an_action_lies_within_it(found, detail_of):
    told = detail_of(found)
    for place in (0, 1):
        actions = [e for e in told.timeline if e.lane == f"stage {place}"]
        inner = [e for e in told.timeline if e.lane == ("devices 0–1", "devices 2–3")[place]]
        for event in inner:
            assert any(
                each.start_s <= event.start_s * (1 + 1e-9)
                and event.start_s + event.duration_s <= (each.start_s + each.duration_s) * (1 + 1e-9)
                for each in actions
            )
        # The rows of the stage's operators have the same seconds.
        for row in told.operators:
            if row.configuration["stage"] == str(place):
                own = sum(e.duration_s for e in inner if e.group == row.group and e.phase != "again")
                assert row.compute_s == pytest.approx(own)


def test_a_place_that_waits_for_its_host_is_said_to(found, detail_of):
    told = detail_of(found)
    slow = replace(told, step=told.step.changed(host_s=1000.0, idle_s=900.0))
    assert "idle, or waiting for the host" in slow.headline()


def test_its_timeline_has_a_lane_for_every_stage_and_its_messages(found, detail_of):
    told = detail_of(found)
    lanes = {event.lane for event in told.timeline}
    assert {"stage 0", "stage 1"} <= lanes
    assert {f"{kind} {ranks}" for kind in ("devices", "link") for ranks in ("0–1", "2–3")} <= lanes
    first = min(told.timeline, key=lambda event: event.start_s)
    assert first.name == "forward of micro-batch 0, stage 0"
    sends = [event for event in told.timeline if event.phase.startswith("send")]
    assert len(sends) == 8
    assert {event.phase for event in sends} == {"send forward", "send backward"}


def test_it_is_exported(explored, tmp_path):
    write_frontier_csv(explored, tmp_path / "frontier.csv")
    write_strategies_csv(explored, tmp_path / "strategies.csv")
    with open(tmp_path / "frontier.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mesh"], row["micro_batches"], row["devices"]) for row in rows] == [("pp2x2", "4", "4")] * 2
    with open(tmp_path / "strategies.csv", newline="", encoding="utf-8") as file:
        own = [list(row.values())[1:] for row in csv.DictReader(file) if row["point"] == "1"]
    first, second = "layers.0.weight=R/P; layers.1.weight=R/P", "layers.2.weight=R/P; layers.3.weight=R/P"
    assert own == [
        ["stage 0", "0", "", first], ["linear", "0", "d0", ""], ["linear_1", "0", "d0", ""],
        ["stage 1", "1", "", second], ["linear_2", "1", "d0", ""], ["linear_3", "1", "d0", ""],
        ["mse_loss", "1", "d0", ""],
    ]  # fmt: skip


def test_what_it_waits_for_by_hand(explored):
    # Place 1 is busiest: before it, one forward and one message; behind it, the last backward of place 0, in
    # which the gradients of two layers are reduced between its two ranks.
    point = explored.points[0]
    message = 10e-6 + 2 * (ROWS // 2) / 10e9  # both ranks of the place through the one card
    assert message == pytest.approx(MESSAGE)
    bucket = 2e-6 + 2 * 24 * 24 * 4 / 100e9
    assert point.idle_s == pytest.approx(3 + message + 6 + bucket, rel=1e-9)
    # Its own gradients, and in every micro-batch the loss.
    loss = 2e-6 + 4 / 100e9
    # The loss goes to both ranks of the other place over the one card.
    result = RESULT + 4 / 10e9
    assert point.exposed_s == pytest.approx(4 * (message + loss) + bucket + result, rel=1e-9)


def test_gradients_are_waited_for_over_the_axes_of_their_place(detail_of):
    strategy = split_along_the_batch(problem(four).graph, (3,), (4, 2, 2))
    told = detail_of(evaluated(strategy, load_cluster("dgx-a100[4]"), beside=True))
    assert "link 0–1 gradients" in {event.lane for event in told.timeline}
    waits = {part.title.split(" over ")[1]: part.seconds for part in told.parts if part.key == WAITING}
    # Place 0 is the busiest; over the axis of the stages goes no more than its messages.
    sent_s = sum(event.duration_s for event in told.timeline if event.lane in ("link 0–1", "link stage"))
    assert waits.get("axis stage", 0.0) <= sent_s * (1 + 1e-9)
    assert waits[f"axis {MESH.names[1]}"] > 0
    # An optimizer's events begin with it, whatever it waits for before, and however long its host takes.
    slow = Overheads(step_s=1.0, of_host=Overheads(step_s=30.0))
    told = detail_of(evaluated(strategy, load_cluster("dgx-a100[4]"), overheads=slow, beside=True))
    (begin_s,) = (event.start_s for event in told.timeline if event.name == "optimizer of stage 0")
    own = [event.start_s for event in told.timeline if event.lane == "devices 0–1"]
    assert own[-1] == pytest.approx(begin_s, rel=1e-9)
