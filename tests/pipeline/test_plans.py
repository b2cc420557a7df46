"""Pipelines in plan files: they come back as they were, and what describes none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.errors import PlanError
from tensoropt.pipeline.plans import pipelined_strategy, plan_part
from tensoropt.pipeline.strategy import PipelinedStrategy
from tensoropt.plan import Plan, load_plan
from tensoropt.plan.facts_table import described
from tensoropt.plan.plan import MeshInfo, ModelInfo, Predicted
from tensoropt.sharding.groups import GroupGraph
from tests.costs.models import four, problem, three
from tests.pipeline.models import split_along_the_batch, tables, tied
from tests.plan.explorations import small_exploration


def plan_of(strategy: PipelinedStrategy, graph: GroupGraph) -> Plan:
    axes = tuple(f"cpu{i}" for i in range(len(strategy.mesh) - 2))
    part = plan_part(strategy, axes, tuple(1000.0 + place for place in range(strategy.places)))
    return Plan(
        planner="by hand",
        model=ModelInfo(source="net", fingerprint=graph.atoms.graph.fingerprint),
        cluster=load_cluster(f"cpu:{strategy.devices}").to_dict(),
        mesh=MeshInfo(shape=strategy.mesh[1:], names=("stage", *axes)),
        micro_batches=strategy.micro_batches,
        optimizer="adam",
        predicted=Predicted(
            memory_bytes=1, time_s=1, compute_s=1, communication_s=0, additive_memory_bytes=1
        ),
        **part.plan_fields(strategy.micro_batches),
    )


@pytest.fixture(scope="module")
def graph() -> GroupGraph:
    return problem(four).graph


@pytest.fixture(scope="module")
def plan(graph: GroupGraph) -> Plan:
    return plan_of(split_along_the_batch(graph, (2,), (4, 2, 2)), graph)


# -- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "cuts", "sizes", "schedule", "again"),
    [
        (four, (2,), (4, 2, 2), "1f1b", ()),
        (four, (1, 2, 3), (4, 2), "zbv", ()),
        (tables, (6,), (2, 2, 2, 2), "gpipe", ("softmax",)),
        (tied, (1, 2), (4, 3, 2), "1f1b", ()),
    ],
)
def test_a_plan_gives_back_its_pipeline(
    build: Any,
    cuts: tuple[int, ...],
    sizes: tuple[int, ...],
    schedule: str,
    again: tuple[str, ...],
    tmp_path: Path,
) -> None:
    graph = problem(build).graph
    strategy = split_along_the_batch(graph, cuts, sizes, schedule, frozenset(again))
    plan = plan_of(strategy, graph)
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert pipelined_strategy(loaded, graph) == strategy
    assert loaded.devices == strategy.devices


def test_a_pipeline_makes_it_a_plan_of_the_second_kind(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert data["schema"] == "tensoropt.plan/2"
    assert data["mesh"] == {"shape": [2, 2], "names": ["stage", "cpu0"], "placed": False}
    pipeline = data["pipeline"]
    assert (pipeline["schedule"], pipeline["again"], pipeline["peak_bytes"]) == ("1f1b", [], [1000.0, 1001.0])
    assert [stage["begins"] for stage in pipeline["stages"]] == ["", "linear_2"]
    assert pipeline["stages"][0]["groups"]["depart.relu_1"] == ["d0", "d0"]


def test_other_plans_are_as_earlier_versions_read_them() -> None:
    data = small_exploration().plan(0).to_data()
    assert data["schema"] == "tensoropt.plan/1"
    assert "pipeline" not in data
    assert Plan.model_validate(data).pipeline is None


def test_operators_are_those_of_the_model(plan: Plan, graph: GroupGraph) -> None:
    assert list(plan.operators) == [g.name for g in graph.groups]
    assert plan.operators["linear"].model_dump(include={"axes", "micro", "members"}) == {
        "axes": {"cpu0": "d0"}, "micro": "d0", "members": ("linear", "relu"),
    }  # fmt: skip
    assert {p.key for p in plan.parameters.values()} == {f"layers.{i}.weight" for i in range(4)}
    assert {p.stored for p in plan.parameters.values()} == {("R/P", "R/P")}


def test_a_plan_tells_of_its_stages(plan: Plan) -> None:
    told = {fact.name: fact.words for fact in described(plan)[1]}
    assert told["stages"] == "2, 1f1b; further ones begin with linear_2"
    assert told["devices"].endswith(", pp2x2")


# -- refusals -------------------------------------------------------------------------------------


def test_a_pipeline_has_no_strategy_on_one_mesh(plan: Plan, graph: GroupGraph) -> None:
    with pytest.raises(PlanError, match="this plan of by hand cuts the model into stages"):
        plan.strategy(graph)
    with pytest.raises(PlanError, match="has no pipeline"):
        pipelined_strategy(plan.model_copy(update={"pipeline": None}), graph)


def test_another_model_is_refused_with_the_first_difference(plan: Plan) -> None:
    # Of its layers only the second has a ReLU, which crosses the cut.
    with pytest.raises(
        PlanError, match=r"says nothing about depart\.relu \(groups\); it is for another model"
    ):
        pipelined_strategy(plan, problem(three).graph)


def test_the_same_operators_of_other_sizes_are_refused(plan: Plan, graph: GroupGraph) -> None:
    model = plan.model.model_copy(update={"fingerprint": "0" * 64})
    with pytest.raises(PlanError, match=r"other shapes, dtypes or code \(fingerprint 000000000000"):
        pipelined_strategy(plan.model_copy(update={"model": model}), graph)


def edited(plan: Plan, tmp_path: Path, change: Any) -> Path:
    data = json.loads(plan.to_json())
    change(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(schema="tensoropt.plan/4"), "its schema is 'tensoropt.plan/4'"),
        (lambda d: d.update(pipeline=3), "pipeline"),
        (lambda d: d["pipeline"].pop("schedule"), "pipeline.schedule"),
        (lambda d: d["pipeline"].pop("stages"), "pipeline.stages"),
        (lambda d: d["pipeline"]["stages"][1].pop("groups"), "pipeline.stages.1.groups"),
        (lambda d: d["pipeline"]["stages"][0].update(mesh=[4]), "pipeline.stages.0.mesh"),
        (lambda d: d["pipeline"].update(peak_bytes="much"), "pipeline.peak_bytes"),
        (lambda d: d["pipeline"].update(places=2), "pipeline.places"),
    ],
)
def test_the_wrong_field_is_named(plan: Plan, tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(PlanError, match=rf"plan\.json is not a plan: {named.replace('.', '[.]')}"):
        load_plan(edited(plan, tmp_path, change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["pipeline"].update(schedule="dualpipe"), "no pipeline schedule called dualpipe"),
        (lambda d: d["pipeline"].update(again=["relu"]), "relu depends on parameters"),
        (lambda d: d["pipeline"].update(stages=[]), "does not say with which operators"),
        (lambda d: d["pipeline"]["stages"].pop(), "says nothing about linear_2"),
        (lambda d: d["pipeline"]["stages"][1].update(begins=""), "no operator or module called  that"),
        (lambda d: d["pipeline"]["stages"][1].update(begins="mse_loss"), "cannot begin with mse_loss"),
        (lambda d: d["pipeline"]["stages"][1]["groups"].pop("linear_2"), "says nothing about linear_2"),
        (lambda d: d["pipeline"]["stages"][1]["groups"].update(linear_9=["d0", "d0"]), "names linear_9"),
        (lambda d: d["pipeline"]["stages"][0]["stored"].update(p_model_layers_0_weight=["R"]), "expected 2"),
        (lambda d: d.update(micro_batches=1), "1f1b keeps 2 places busy|more micro-batches"),
    ],
)  # fmt: skip
def test_what_describes_no_pipeline_is_refused(
    plan: Plan, graph: GroupGraph, tmp_path: Path, change: Any, says: str
) -> None:
    loaded = load_plan(edited(plan, tmp_path, change))
    with pytest.raises(PlanError, match=says):
        pipelined_strategy(loaded, graph)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d["mesh"].update(names=["cpu0", "stage"]), "axis .* is called stage, and here cpu0"),
        (lambda d: d["mesh"].update(names=["stage"]), r"the mesh \[2, 2\] needs 2 different names of axes"),
        (lambda d: d["mesh"].update(shape=[]), r"the mesh \[\] needs 0 different names of axes"),
        (lambda d: d["mesh"].update(shape=[0, 2]), r"the mesh \[0, 2\] has an axis below 1"),
        (lambda d: d["mesh"].update(shape=[2, 0]), r"the mesh \[2, 0\] has an axis below 1"),
        (lambda d: d["mesh"].update(shape=[3, 2]), "mesh pp3x2 has 6 devices, and its cluster .* 4"),
        (lambda d: d["mesh"].update(shape=[2, 3]), "mesh pp2x3 has 6 devices, and its cluster .* 4"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_without_a_model(
    plan: Plan, tmp_path: Path, change: Any, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        load_plan(edited(plan, tmp_path, change))


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([1, 4], "two places or more, not 1"),
        ([4, 1], "2 stages do not divide over 4"),
        ([3, 2], "2 stages do not divide over 3"),
        ([2, 3], "linear does not divide as d0/d0 over the mesh 4x3"),
    ],
)
def test_a_mesh_that_its_stages_do_not_fit_is_refused(
    plan: Plan, graph: GroupGraph, tmp_path: Path, shape: list[int], says: str
) -> None:
    """On a cluster of as many devices, so that nothing else is wrong."""

    def change(data: Any) -> None:
        data["mesh"].update(shape=shape)
        data["cluster"] = load_cluster(f"cpu:{shape[0] * shape[1]}").to_dict()

    loaded = load_plan(edited(plan, tmp_path, change))
    with pytest.raises(PlanError, match=says):
        pipelined_strategy(loaded, graph)
