"""Pipelines among the points of an exploration: saved, loaded, shown, explained, exported, run."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.cluster import Mesh, load_cluster
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.plans import pipelined_strategy
from tensoropt.pipeline.points import pipelined_point, pipelined_space
from tensoropt.plan.exploration import Exploration, load_exploration
from tensoropt.plan.export import write_frontier_csv, write_strategies_csv
from tensoropt.plan.frontier_table import split_words
from tensoropt.plan.plan import ModelInfo
from tensoropt.plan.settings import Settings
from tensoropt.profiling.overheads import Overheads
from tensoropt.report.detail import detail
from tensoropt.report.explain import detail_lines
from tensoropt.report.step_parts import COMPUTING
from tensoropt.session.run_report import versions
from tests.costs.models import four, problem
from tests.pipeline.models import split_along_the_batch
from tests.pipeline.test_evaluate import MESSAGE, RESULT, ROWS, evaluated

MESH = Mesh(shape=(2, 2), names=("stage", "cpu"))


@pytest.fixture(scope="module")
def found() -> PipelineEvaluation:
    """Two places of two, and four micro-batches."""
    return evaluated(split_along_the_batch(problem(four).graph, (2,), (4, 2, 2)))


@pytest.fixture(scope="module")
def explored(found: PipelineEvaluation) -> Exploration:
    """The pipeline, and the same with GPipe."""
    graph = problem(four).graph.atoms.graph
    other = evaluated(replace(found.strategy, schedule="gpipe"))
    keys = {t.name: str(t.key) for t in graph.parameters}
    return Exploration(
        points=tuple(pipelined_point(one, MESH, space=0) for one in (found, other)),
        spaces=(pipelined_space(MESH, 4, keys, ["a heuristic"]),),
        model=ModelInfo(source="tests:four", fingerprint=graph.fingerprint),
        cluster=load_cluster("cpu:4").to_dict(),
        settings=Settings().to_dict(),
        versions=versions(),
        report={"notes": []},
    )


def test_its_figures_are_the_simulators(found: PipelineEvaluation, explored: Exploration) -> None:
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


def test_what_it_sends_is_what_the_fullest_rank_sends(explored: Exploration) -> None:
    # Its micro-batch has 4 rows, of which each of two ranks has 2.
    _, gpipe = explored.points
    sends = {(kind, size): count for kind, _, size, count in gpipe.collectives}
    assert sends[("send", ROWS // 2)] == 4
    assert sends[("broadcast", 4)] == 1


def test_the_most_that_a_rank_sends_is_of_all_ranks(found: PipelineEvaluation, explored: Exploration) -> None:
    # Of two ranks or places each sends all of a sum, and half of what is gathered or scattered.
    half = ("all_gather", "reduce_scatter", "all_to_all")
    sent = [
        sum(one.bytes * count / (2 if one.kind in half else 1) for one, count in found.sent_by(rank).items())
        for rank in range(4)
    ]
    assert explored.points[0].sent_bytes == max(sent) > min(sent)


def test_its_plan_is_the_pipeline(found: PipelineEvaluation, explored: Exploration) -> None:
    plan = explored.plan(0)
    assert pipelined_strategy(plan, problem(four).graph) == found.strategy
    assert plan.schema_ == "tensoropt.plan/2"
    assert (plan.mesh.label, plan.micro_batches, plan.devices) == ("pp2x2", 4, 4)
    assert plan.predicted.memory_bytes == found.memory_bytes
    assert plan.pipeline is not None
    assert plan.pipeline.peak_bytes == tuple(found.memory.sum(axis=1))


def test_points_that_differ_in_their_schedule_are_told_apart(explored: Exploration) -> None:
    first, second = explored.points
    assert first.identity != second.identity
    assert first.identity == first.changed(time_s=3.0).identity


def test_it_survives_saving(explored: Exploration, tmp_path: Path) -> None:
    explored.save(tmp_path)
    again = load_exploration(tmp_path)
    assert again.points == explored.points
    assert again.plan(1) == explored.plan(1)


def test_it_is_explained_stage_by_stage(found: PipelineEvaluation, explored: Exploration) -> None:
    told = detail(explored, 0)
    assert [row.group for row in told.operators] == ["stage 0", "stage 1"]
    assert [row.members for row in told.operators] == [
        ("linear", "linear_1"), ("linear_2", "linear_3", "mse_loss"),
    ]  # fmt: skip
    # Seconds of four micro-batches, without the bucket that is reduced in the last.
    assert [row.forward_s for row in told.operators] == pytest.approx([4 * 3, 4 * 4])
    assert told.peak.total == pytest.approx(found.memory_bytes)
    assert told.trace()["traceEvents"]
    text = "\n".join(detail_lines(told, 5, summed=False))
    assert "stages; seconds in the schedule, waits included (2 of 2)" in text
    assert split_words(explored, 0) == "2 stages, 1f1b"


def test_its_places_take_what_the_headline_says(found: PipelineEvaluation, explored: Exploration) -> None:
    told, point = detail(explored, 0), explored.points[0]
    assert [place.title for place in told.places] == ["place 0, stage 0", "place 1, stage 1"]
    assert max(place.memory_bytes for place in told.places) == point.memory_bytes
    assert [place.compute_s for place in told.places] == pytest.approx([4 * 9, 4 * 12])
    busiest = told.places[1]
    assert (busiest.compute_s, busiest.communication_s) == (point.compute_s, point.communication_s)
    # The rows are stages, whose seconds are those of the schedule: no shares of what the busiest computes.
    assert "most of all stage" not in told.headline()
    assert "on the busiest device" in told.headline()
    # Saved before the loads of places were kept.
    assert point.pipeline is not None
    record = replace(point.pipeline, loads=None)
    assert detail(replace(explored, points=(point.changed(pipeline=record),)), 0).places == ()


@pytest.mark.parametrize("number", [0, 1])
def test_its_parts_are_what_the_busiest_place_computes(
    found: PipelineEvaluation, explored: Exploration, number: int
) -> None:
    """Told from other figures than the parts are made of: those of the stage's own simulated step."""
    told, point = detail(explored, number), explored.points[number]
    assert sum(part.seconds for part in told.parts) == pytest.approx(point.time_s)
    stages = [s for s in range(2) if found.strategy.place_of(s) == found.busiest_place]
    parts = {part.title: part.seconds for part in told.parts}
    computing = [part for part in told.parts if part.key == COMPUTING]
    assert sum(part.seconds for part in computing) == pytest.approx(point.compute_s)
    for stage in stages:
        row = told.operators[stage]
        assert sum(part.seconds for part in computing if part.count) <= row.forward_s + row.backward_s
    top = max(computing, key=lambda part: part.seconds)
    assert top.title.startswith("linear")
    assert f"most of all {top.title}, {100 * top.seconds / point.time_s:.0f} %" in told.headline()
    # Two linear layers at that place, each a second forward and two backward, in four micro-batches.
    assert parts["linear layers.* (2 ×)"] == pytest.approx(2 * 4 * (1 + 2))
    # Saved before operators of pipelines were kept.
    assert point.pipeline is not None
    record = replace(point.pipeline, computed=None)
    old = detail(replace(explored, points=(point.changed(pipeline=record),)), 0)
    assert "most of all linear" not in old.headline()
    assert sum(part.seconds for part in old.parts) == pytest.approx(point.time_s)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_its_timeline_ends_with_the_step(explored: Exploration, schedule: str) -> None:
    """Optimizer, and the results' way to all ranks, are in it."""
    strategy = split_along_the_batch(problem(four).graph, (2,), (4, 2, 2), schedule)
    found = evaluated(strategy, overheads=Overheads(step_s=1.0))
    one = replace(explored, points=(pipelined_point(found, MESH, space=0),))
    told, point = detail(one, 0), one.points[0]
    assert max(event.start_s + event.duration_s for event in told.timeline) == pytest.approx(point.time_s)
    assert sum(event.phase == "optimizer" for event in told.timeline) == 2
    busy = [sum(e.duration_s for e in told.timeline if e.lane == f"device {place}") for place in (0, 1)]
    assert busy == pytest.approx(found.times.working_s)


def test_a_place_that_waits_for_its_host_is_said_to(explored: Exploration) -> None:
    slow = explored.points[0].changed(host_s=1000.0, idle_s=900.0)
    assert "idle, or waiting for the host" in detail(replace(explored, points=(slow,)), 0).headline()


def test_its_timeline_has_a_lane_for_every_place_and_its_messages(explored: Exploration) -> None:
    told = detail(explored, 0)
    assert {event.lane for event in told.timeline} == {"device 0", "device 1", "link 0", "link 1"}
    first = min(told.timeline, key=lambda event: event.start_s)
    assert first.name == "forward of micro-batch 0, stage 0"
    sends = [event for event in told.timeline if event.phase.startswith("send")]
    assert len(sends) == 8
    assert {event.phase for event in sends} == {"send forward", "send backward"}


def test_it_is_exported(explored: Exploration, tmp_path: Path) -> None:
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


def test_what_it_waits_for_by_hand(explored: Exploration) -> None:
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
