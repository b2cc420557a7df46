"""Explorations that look for pipelines, too: what they find, pinned and not, and what they refuse."""

from __future__ import annotations

import re
from math import inf
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tensoropt import ConstraintError, Exploration, Point, Settings, explore
from tensoropt.cluster import Cluster, Mesh, load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import InfeasibleError, PlanError, TensorOptError
from tensoropt.evaluation import evaluate
from tensoropt.pipeline.composer import Composer
from tensoropt.pipeline.costs import PipelinePrices
from tensoropt.pipeline.evaluate import _evaluate_pipeline, stage_works
from tensoropt.pipeline.points import pipelined_strategy
from tensoropt.planners.quick import _PIPELINED
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.detail import detail
from tensoropt.session import pipelines
from tensoropt.session.quick_plans import with_quick_plans
from tests.costs.models import four, problem
from tests.pipeline.models import Blocks, adapted
from tests.plan.explorations import costs
from tests.session.captured_once import CapturedOnce
from tests.situations.readers import made_of_parameters

CLUSTER = "cpu:4"
FOUR = CapturedOnce(four)


@pytest.fixture(scope="module", autouse=True)
def searched_alone():
    """What the search alone finds: published planners take as long again for these small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensoropt.api.with_quick_plans", lambda session, searched, found, **_: found)
        yield


def explored(store: ProfileStore, **settings: Any) -> Exploration:
    """Four layers on four CPU ranks at data-sheet prices, in four micro-batches unless said otherwise."""
    asked = {"cluster": CLUSTER, "measure": "never", "micro_batches": [4], "placements": "never"} | settings
    return FOUR.explore(store=store, **asked)


@pytest.fixture(scope="module")
def plain(store):
    return explored(store, pipelines="never")


@pytest.fixture(scope="module")
def both(store):
    return explored(store, pipelines="always")


def in_nodes(count: int) -> Cluster:
    """Nodes of two cards."""
    links = {"intra_node": "NVLink4", "inter_node": {"link": "IB-400G", "count": 2}}
    devices = [{"kind": "H100-80GB", "count": 2}]
    return load_cluster({"name": "nodes", "devices": devices, "nodes": count, "links": links})


def pipelined(found: Exploration) -> list[tuple[int, Point]]:
    return [(i, point) for i, point in enumerate(found.points) if point.stages.schedule]


def beaten(point: Point, found: Exploration) -> bool:
    own = point.memory_bytes, point.time_s
    return any(p != own and p[0] <= own[0] and p[1] <= own[1] for p in costs(found))


# -- what is found --------------------------------------------------------------------------------


def test_without_being_asked_none_is_looked_for(plain, store, monkeypatch):
    assert not pipelined(plain)
    assert not any("pipeline" in note for note in plain.report["notes"])
    monkeypatch.setattr("tensoropt.api.with_quick_plans", with_quick_plans)
    found = explored(store)
    # Of a small model published pipelines come in, which are no search.
    assert {point.planner for _, point in pipelined(found)} <= {*_PIPELINED}
    assert not any(note.startswith("pipelines:") for note in found.report["notes"])


def test_pipelines_stand_in_one_frontier_with_the_others(both):
    assert 0 < len(pipelined(both)) < len(both.points)
    assert not [p for p in both.points if beaten(p, both)]


def test_pipelines_take_nothing_away(plain, both):
    for point in plain.points:
        assert (point.memory_bytes, point.time_s) in costs(both) or beaten(point, both)
    # Whatever is no pipeline was there before.
    assert {(p.memory_bytes, p.time_s) for p in both.points if not p.stages.schedule} <= {*costs(plain)}


def test_they_are_said_to_be_a_heuristic(both):
    assert any("heuristic" in note for note in both.report["notes"])
    for _, point in pipelined(both):
        assert (point.exact, point.gap) == (False, None)
        assert any("heuristic" in note for note in both.spaces[point.space].notes)


def test_every_space_has_a_point_or_was_searched(both):
    used = {point.space for point in both.points}
    for number, space in enumerate(both.spaces):
        assert number in used or space.groups
    for _, point in pipelined(both):
        mesh = both.spaces[point.space].mesh
        assert mesh.names[0] == "stage"
        assert mesh.label.startswith("pp")


def test_their_figures_are_the_simulators(both, store):
    graph = problem(four).graph
    source = CostSource(load_cluster(CLUSTER), store, Settings(measure="never"))
    for index, point in pipelined(both):
        plan = both.plan(index)
        strategy = pipelined_strategy(plan, graph)
        assert strategy.devices == 4
        works = stage_works(strategy)
        source.facts.find(work for of_stage in works for work in of_stage.values())
        mesh = Mesh(shape=plan.mesh.shape, names=plan.mesh.names)
        prices = PipelinePrices.of(source, mesh)
        found = _evaluate_pipeline(strategy, lambda _, work: source.facts.of(work), prices)
        assert point.memory_bytes == pytest.approx(found.memory_bytes, rel=1e-9)
        assert point.time_s == pytest.approx(found.time_s, rel=1e-9)


def test_strategies_of_stages_may_be_simulated_in_parts(both, store, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK", 7)
    in_parts = explored(store, pipelines="always")
    assert costs(in_parts) == costs(both)


def test_what_they_compute_is_told_by_their_own_groups(both):
    """Whose stages are simulated once for all that look alike, under the first one's names."""
    for index, point in pipelined(both):
        assert point.stages.schedule
        told = [row.group for row in detail(both, index).operators]
        assert told
        assert set(point.record.operators) <= set(told)
        assert len(set(told)) == len(told)


def test_each_place_has_the_micro_batches_that_are_given(both):
    """So that a device works on pieces as large as without stages."""
    for space in both.spaces:
        places = space.mesh.shape[0] if not space.groups else 1
        assert space.micro_batches == 4 * places


def test_of_a_pinned_pipeline_micro_batches_are_as_given(store):
    found = explored(store, constraints={"pipeline": {"stages": 2}})
    assert {found.plan(index).mesh.shape[0] for index in range(len(found.points))} == {2}
    assert {space.micro_batches for space in found.spaces if not space.groups} == {4}


@pytest.mark.slow
def test_micro_batches_keep_all_places_busy_where_they_are_searched(store):
    found = explored(store, pipelines="always", micro_batches="auto")
    assert pipelined(found)
    for _, point in pipelined(found):
        space = found.spaces[point.space]
        assert space.micro_batches >= space.mesh.shape[0]
        assert 16 % space.micro_batches == 0


@pytest.mark.slow
def test_large_models_are_looked_at_with_one_row_in_flight(store, monkeypatch):
    """On the mesh that is leanest without, all axes of a place splitting what comes behind the batch."""
    looked: dict[tuple[str, int, tuple[str, ...]], float] = {}
    evaluate = Composer._evaluated

    def seen(composer: Composer, *of: Any) -> Any:
        if (pipeline := evaluate(composer, *of)) is not None:
            at = composer.mesh.label, composer.micro_batches, tuple(composer.crossings.outer)
            looked[at] = min(looked.get(at, inf), pipeline.memory_bytes)
        return pipeline

    monkeypatch.setattr(Composer, "_evaluated", seen)
    monkeypatch.setattr(pipelines, "FEW_GROUPS", 0)
    monkeypatch.setattr(pipelines, "_MOST_PLACES", 2)
    monkeypatch.setattr(pipelines, "in_forks", lambda work, items: list(map(work, items)))
    asked = {"micro_batches": [2], "dtype": "bfloat16", "pipelines": "auto"}
    found = explored(store, cluster=in_nodes(4), **asked)
    *first, (mesh, count, outer) = looked
    assert count == 16
    assert outer == ("second",)
    assert {at[1:] for at in first} == {(4, ("batch",))}
    assert mesh == min(first, key=looked.__getitem__)[0]
    assert any(f"were searched only on mesh pp{mesh}" in note for note in found.report["notes"])


@pytest.mark.slow
def test_large_models_have_as_many_stages_to_a_place_as_the_bubble_asks_for(store, tmp_path, monkeypatch):
    """Six blocks on two places, in as many micro-batches: three stages to each halve the bubble and more."""
    monkeypatch.setattr(pipelines, "FEW_GROUPS", 0)
    monkeypatch.setattr(pipelines, "_MOST_STAGES", 3)
    composed = set()

    def seen(work: Any, items: list[Any]) -> list[Any]:
        composed.update((composer.schedule, composer.stages) for _, composer, _ in items)
        return list(map(work, items))

    monkeypatch.setattr(pipelines, "in_forks", seen)

    def looked(micro_batches: int, **asked: Any) -> Exploration:
        return explore(
            Blocks(6), (torch.randn(16, 8), torch.randn(16, 8)), cluster=CLUSTER, measure="never",
            micro_batches=[micro_batches], store=store, pipelines="always", **asked,
        )  # fmt: skip

    found = looked(1)
    assert any("several stages on the same devices: blocks" in note for note in found.report["notes"])
    # Messages of so small a model cost more than the bubble, so that none of these is on the frontier.
    assert ("interleaved_1f1b", 6) in composed
    # Cuts that are pinned say how many stages a place has.
    cuts = [f"blocks.{number}" for number in range(1, 6)]
    pin = {"stages": 2, "schedule": "interleaved_1f1b", "cuts": cuts}
    shapes = [p.stages for p in looked(4, constraints={"pipeline": pin}).points if p.stages.schedule]
    assert {(one.schedule, len(one.stages)) for one in shapes} == {("interleaved_1f1b", 6)}


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_before_its_blocks_has_other_pipelines(store, monkeypatch):
    refuse = Mock(side_effect=PlanError("no stage can begin with add_3"))
    monkeypatch.setattr(pipelines, "FEW_GROUPS", 0)
    monkeypatch.setattr(pipelines, "dealt_cuts", refuse)
    asked = {"measure": "never", "micro_batches": [1], "store": store, "pipelines": "always"}
    found = explore(Blocks(4), (torch.randn(16, 8),) * 2, cluster=CLUSTER, **asked)
    assert any("no stage can begin with add_3" in note for note in found.report["notes"])
    assert pipelined(found)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "looks"), [("auto", True), ([4], False)])
def test_a_pinned_pipeline_is_looked_at_with_one_row_where_the_count_is_open(
    store, monkeypatch, counts, looks
):
    monkeypatch.setattr(pipelines, "FEW_GROUPS", 0)
    monkeypatch.setattr(pipelines, "_MULTIPLES", (2,))
    asked = {"cluster": in_nodes(2), "micro_batches": counts, "dtype": "bfloat16"}
    found = pinned(store, {"stages": 2}, **asked)
    assert any("one sample per micro-batch" in note for note in found.report["notes"]) is looks


# -- pins -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_stages_may_have_nothing_to_train(store):
    """Of two stages on as many ranks the first is larger, as it has no backward: adapters of the last blocks
    alone are trained."""
    model, inputs, _ = adapted()
    found = explore(
        model, inputs, cluster="cpu:2", measure="never", micro_batches=[4], store=store, placements="never",
        constraints={"pipeline": {"stages": 2}},
    )  # fmt: skip
    strategies = [pipelined_strategy(found.plan(i), problem(adapted).graph) for i in range(len(found.points))]
    assert {strategy.forward_only for strategy in strategies} == {1}
    for index, strategy in enumerate(strategies):
        phases = {(event.phase, event.group) for event in detail(found, index).timeline}
        assert ("backward", "stage 1") in phases
        assert ("backward", "stage 0") not in phases
        assert not any(tensor.requires_grad for tensor in strategy.parts[0].graph.atoms.graph.parameters)


def pinned(store: ProfileStore, pin: dict[str, Any], **settings: Any) -> Exploration:
    return explored(store, constraints={"pipeline": pin}, **settings)


def test_too_few_micro_batches_for_pinned_stages_are_refused_by_their_rule(store):
    with pytest.raises(ConstraintError, match="as many micro-batches as it has stages, 4") as told:
        explored(store, constraints={"pipeline": {"stages": 4}}, micro_batches=[1, 2])
    assert re.search(r"--micro-batches is 1,2; give --micro-batches 4( or \d+)*$", str(told.value))


def test_without_a_pin_it_is_noted(store):
    notes = explored(store, pipelines="always", micro_batches=[16]).report["notes"]
    assert any("no pipelines: none of the requested micro-batch counts (16)" in note for note in notes)


def test_a_pin_holds_at_every_point(store):
    found = pinned(store, {"stages": 2, "schedule": "gpipe", "cuts": ["linear_1"]})
    assert found.points
    assert len(pipelined(found)) == len(found.points)
    for index in range(len(found.points)):
        plan = found.plan(index)
        assert plan.stages.schedule == "gpipe"
        assert [stage.begins for stage in plan.stages.stages] == ["", "linear_1"]
        assert plan.mesh.shape[0] == 2


def test_cuts_may_name_modules(store):
    found = pinned(store, {"stages": 4, "cuts": ["layers.1", "layers.2", "layers.3"]})
    for index in range(len(found.points)):
        info = found.plan(index).stages
        assert [stage.begins for stage in info.stages] == ["", "linear_1", "linear_2", "linear_3"]


def test_one_stage_forbids_pipelines(store, plain):
    found = pinned(store, {"stages": 1}, pipelines="always")
    assert not pipelined(found)
    assert costs(found) == costs(plain)


# -- budgets and refusals -------------------------------------------------------------------------


def test_a_budget_holds_for_pipelines(store, both):
    limit = both.points[len(both.points) // 2].memory_bytes
    found = explored(store, pipelines="always", memory_bytes=limit)
    assert found.points
    assert pipelined(found)
    assert any(p.memory_bytes <= limit for p in found.points)


def test_a_budget_below_all_that_is_pinned_is_infeasible(store):
    with pytest.raises(InfeasibleError):
        pinned(store, {"stages": 2}, memory_bytes=1000.0)


@pytest.mark.parametrize(("pin", "says"), [
    ({"stages": 3}, r"cpu:4 has 4 devices, which allow 2, 4 stages.* one of these numbers of stages: 2, 4$"),
    ({"stages": 8},
     r"8 stages.* the model, with \d+ groups of operators, can be cut at 3 places, for at most 4 stages"),
    ({"stages": 2, "schedule": "dualpipe"}, "dualpipe"),
    ({"stages": 2, "cuts": ["linear_9"]}, "linear_9"),
    ({"stages": 2, "cuts": ["linear_1", "linear_2"]}, "cuts"),
    ({"stages": 4, "cuts": ["linear_1"]}, "cuts"),
    ({"stages": 4, "cuts": ["linear_1", "linear_3", "linear_2"]}, "in order"),
    ({"stages": 2, "cuts": ["mse_loss"]}, "mse_loss"),
    ({"stages": 2, "schedule": 3}, "'schedule' is a schedule's name"),
    ({"stages": 0}, "'stages' is a number of at least 1, not 0"),
    ({"stages": True}, "'stages' is a number of at least 1, not True"),
    ({"schedule": "1f1b"}, "'stages' is a number of at least 1, not None"),
    ({"stages": 1, "schedule": "1f1b"}, "one stage is not a pipeline"),
    ({"stages": 1, "cuts": ["linear_1"]}, "one stage is not a pipeline"),
    ({"stages": 2, "cuts": 3}, "cuts"),
    ({"stages": 2, "places": 2}, "places"),
])  # fmt: skip
def test_pins_that_cannot_be_kept_are_refused(store, pin, says):
    with pytest.raises(TensorOptError, match=says):
        pinned(store, pin)


def test_a_pinned_schedule_that_the_model_cannot_have_is_refused_with_the_reason(store):
    model, inputs = made_of_parameters("early")
    pin = {"pipeline": {"stages": 2, "schedule": "zero_bubble"}}
    asked = {"measure": "never", "micro_batches": [4], "store": store, "constraints": pin}
    with pytest.raises(TensorOptError, match=r"splits backward, .* it without such tensors"):
        explore(model, inputs, cluster="cpu:2", **asked)


def test_inference_has_no_pipelines(store):
    found = explored(store, pipelines="always", mode="inference", micro_batches=[1])
    assert not pipelined(found)
    assert any("no pipelines" in note for note in found.report["notes"])
    with pytest.raises(TensorOptError, match="training"):
        pinned(store, {"stages": 2}, mode="inference", micro_batches=[1])


def test_one_device_has_no_pipelines(store):
    found = explored(store, cluster="cpu:1", pipelines="always")
    assert found.points
    assert not pipelined(found)
    (note,) = (note for note in found.report["notes"] if "no pipelines" in note)
    assert "cpu:1 has 1 device, which allow no stages" in note
    assert note.endswith("take more devices, a model of more layers, or plans without stages")
