"""Pipelined strategies: what their stages have to agree in, where they lie, and as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import PlanError, TensorOptError
from tensoropt.pipeline.schedules import SCHEDULES
from tensoropt.pipeline.strategy import PipelinedStrategy, pipelined_from_dict, pipelined_to_dict
from tensoropt.sharding.regions import find_regions
from tensoropt.verify.random_pipelines import random_pipeline
from tests.costs.models import four, gpt2, llama, problem
from tests.pipeline.models import Recipe, skip, sliced, split_along_the_batch, tables, tied
from tests.situations.readers import WIDTH, Twice

FIRST = "p_model_first_weight"


def read_twice() -> Recipe:
    """Each of two blocks reads its weight twice."""
    return Twice(2), (torch.randn(8, WIDTH),), {}


def edited(strategy: PipelinedStrategy, change: Callable[[dict[str, Any]], Any]) -> PipelinedStrategy:
    """The strategy whose data were changed."""
    data = json.loads(json.dumps(pipelined_to_dict(strategy)))
    change(data)
    return pipelined_from_dict(data, strategy.graph)


# -- where stages lie -----------------------------------------------------------------------------


def test_ranks_follow_one_another_place_by_place() -> None:
    found = split_along_the_batch(problem(four).graph, (2,), (4, 2, 2))
    assert found.mesh == (4, 2, 2)
    assert (found.micro_batches, found.places, found.devices_per_place, found.devices) == (4, 2, 2, 4)
    assert [found.place_of(stage) for stage in range(2)] == [0, 1]
    assert [part.departing for part in found.parts] == [("relu_1",), ()]


@pytest.mark.parametrize(
    ("schedule", "places", "at"),
    [
        ("1f1b", [0, 1, 2, 3], [(0,), (1,), (2,), (3,)]),
        ("interleaved_1f1b", [0, 1, 0, 1], [(0, 2), (1, 3)]),
        ("zero_bubble", [0, 1, 0, 1], [(0, 2), (1, 3)]),
        ("zbv", [0, 1, 1, 0], [(0, 3), (1, 2)]),
    ],
)
def test_several_stages_lie_at_a_place(schedule: str, places: list[int], at: list[tuple[int, ...]]) -> None:
    found = split_along_the_batch(problem(four).graph, (1, 2, 3), (4, len(at)), schedule)
    assert [found.place_of(stage) for stage in range(4)] == places
    assert [found.stages_at(place) for place in range(len(at))] == at


def test_a_parameter_of_several_stages_is_known_with_its_holders() -> None:
    found = split_along_the_batch(problem(tied).graph, (1, 2), (3, 3), "gpipe")
    assert found.tied == (FIRST,)
    assert found.holders(FIRST) == (0, 2)
    assert found.holders("p_model_second_weight") == (1,)
    # Not where one stage has all its uses.
    assert split_along_the_batch(problem(four).graph, (2,), (2, 2)).tied == ()


# -- what stages have to agree in -----------------------------------------------------------------


def test_a_tensor_crosses_in_one_placement() -> None:
    strategy = split_along_the_batch(problem(four).graph, (2,), (1, 2, 2), "gpipe")

    def enter_whole(data: dict[str, Any]) -> None:
        data["stages"][1]["groups"]["arrive.relu_1"] = ["none", "none"]

    with pytest.raises(
        PlanError, match=r"relu_1 leaves stage 0 as .* but enters stage 1 as .*; a tensor crosses in one"
    ):
        edited(strategy, enter_whole)


def test_every_tensor_of_every_cut_is_compared() -> None:
    strategy = split_along_the_batch(problem(skip).graph, (1, 2, 3), (1, 4, 2), "gpipe")

    def enter_whole(data: dict[str, Any]) -> None:
        data["stages"][3]["groups"]["arrive.relu"] = ["none", "none"]

    with pytest.raises(PlanError, match="relu leaves stage 2 as"):
        edited(strategy, enter_whole)


def test_stages_have_one_mesh() -> None:
    graph = problem(four).graph
    two, four_micro = (split_along_the_batch(graph, (2,), (m, 2, 2)) for m in (2, 4))
    with pytest.raises(PlanError, match=r"the stages of a pipeline have one mesh, .*\(2, 2\), \(4, 2\)"):
        replace(two, stages=(two.stages[0], four_micro.stages[1]))


def test_stages_divide_over_the_places() -> None:
    with pytest.raises(PlanError, match="3 stages do not divide over 2 parts of the devices"):
        split_along_the_batch(problem(four).graph, (1, 2), (4, 2), "interleaved_1f1b")


@pytest.mark.parametrize("places", [1, 0, -1])
def test_a_pipeline_has_two_places_or_more(places: int) -> None:
    with pytest.raises(PlanError, match=f"a pipeline has two places or more, not {places}"):
        split_along_the_batch(problem(four).graph, (2,), (4, places), "interleaved_1f1b")


def test_a_schedule_that_does_not_run_is_refused() -> None:
    graph = problem(four).graph
    with pytest.raises(PlanError, match="1f1b keeps 4 places busy"):
        split_along_the_batch(graph, (1, 2, 3), (2, 4))
    with pytest.raises(PlanError, match="no pipeline schedule called dualpipe; there are gpipe, 1f1b"):
        split_along_the_batch(graph, (2,), (2, 2), "dualpipe")


def test_copies_of_a_parameter_are_stored_alike() -> None:
    strategy = split_along_the_batch(problem(tied).graph, (2,), (2, 2, 2))

    def shard_one(data: dict[str, Any]) -> None:
        data["stages"][1]["stored"][FIRST] = ["R/P", "S(0)"]

    with pytest.raises(PlanError, match=f"{FIRST} is used in several stages, which have to store it alike"):
        edited(strategy, shard_one)


def test_copies_of_a_parameter_lie_on_different_devices() -> None:
    # Stages 0 and 3 have the first layer's weights. In a V both lie at place 0, round and round they do not.
    graph = problem(tied).graph
    with pytest.raises(PlanError, match=rf"{FIRST} is used in stages \[0, 3\], .* schedule zbv puts on the"):
        split_along_the_batch(graph, (1, 2, 3), (4, 2), "zbv")
    assert split_along_the_batch(graph, (1, 2, 3), (4, 2), "interleaved_1f1b").holders(FIRST) == (0, 3)


@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.apart])
def test_what_takes_backward_apart_passes_no_collectives(schedule: str) -> None:
    graph, cuts = problem(four).graph, (1, 2, 3)
    # Split along the batch with whole parameters, whose gradients are reduced behind the step: none within.
    strategy = split_along_the_batch(graph, cuts, (4, 2, 2), schedule)

    def split_columns(data: dict[str, Any]) -> None:
        data["stages"][2]["groups"]["linear_2"] = ["d0", "out_features"]
        data["stages"][2]["stored"]["p_model_layers_2_weight"] = ["R/P", "S(0)"]

    with pytest.raises(PlanError, match=f"the schedule {schedule} takes backward apart, .* stage 2 passes "):
        edited(strategy, split_columns)
    # The same stages are run by others.
    plain = replace(strategy, schedule="interleaved_1f1b")
    assert edited(plain, split_columns).schedule == "interleaved_1f1b"


def test_what_takes_backward_apart_recomputes_nothing() -> None:
    graph = problem(gpt2).graph
    strategy = split_along_the_batch(graph, (12,), (2, 2), "zero_bubble")
    first = strategy.stages[0]
    recomputing = replace(first, recomputed=find_regions(first.graph))
    assert recomputing.recomputed
    with pytest.raises(PlanError, match="stage 0 recomputes a block; use 1f1b or interleaved_1f1b"):
        replace(strategy, stages=(recomputing, strategy.stages[1]))
    assert replace(strategy, schedule="1f1b", stages=(recomputing, strategy.stages[1]))


def test_what_takes_backward_apart_finds_each_gradient() -> None:
    """PyTorch's split backward gives wrong gradients of a projection whose slices are read."""
    graph = problem(read_twice).graph
    cut = next(number for number, group in enumerate(graph.groups) if group.name == "linear_3")
    with pytest.raises(
        PlanError, match=r"of p_model_blocks_1_weight in stage 1, it is read 2 times .*; use 1f"
    ):
        split_along_the_batch(graph, (cut,), (4, 2), "zero_bubble")
    assert split_along_the_batch(graph, (cut,), (4, 2), "1f1b")
    # The first stage's backward is whole.
    assert split_along_the_batch(problem(sliced).graph, (4,), (4, 2), "zero_bubble")


# -- as plain data --------------------------------------------------------------------------------


def test_data_name_the_operators_with_which_stages_begin() -> None:
    strategy = split_along_the_batch(problem(tables).graph, (6,), (2, 2), "gpipe", frozenset({"softmax"}))
    data = pipelined_to_dict(strategy)
    assert {name: data[name] for name in ("schedule", "places", "begins", "again")} == {
        "schedule": "gpipe", "places": 2, "begins": ["linear_1"], "again": ["softmax"],
    }  # fmt: skip
    assert [stage["mesh"] for stage in data["stages"]] == [[2], [2]]
    assert data["stages"][1]["groups"]["arrive.mul_1"] == ["d0"]


@given(
    st.sampled_from([four, skip, tied, gpt2, llama]),
    st.sampled_from([(2, 2), (4, 2), (2, 2, 2), (4, 4), (1, 2, 4)]),
    st.sampled_from(sorted(SCHEDULES)),
    st.randoms(use_true_random=False),
)
def test_data_give_the_strategy_back(build: Any, mesh: tuple[int, ...], schedule: str, rng: Any) -> None:
    graph = problem(build).graph
    try:
        strategy = random_pipeline(graph, mesh, schedule, rng, 0.5)
    except TensorOptError:
        return  # the schedule has none of so many places
    data = json.loads(json.dumps(pipelined_to_dict(strategy)))
    again = pipelined_from_dict(data, graph)
    assert again == strategy
    assert (again.mesh, again.tied, again.devices) == (strategy.mesh, strategy.tied, strategy.devices)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.pop("begins"), "does not say with which operators its stages begin"),
        (lambda d: d.update(begins=[]), "does not say with which operators its stages begin"),
        (lambda d: d.update(stages=3), "does not say with which operators its stages begin"),
        (lambda d: d["stages"].pop(), "does not say with which operators its stages begin"),
        (lambda d: d.update(begins=["linear_9"]), "no operator or module called linear_9"),
        (lambda d: d.update(begins=[7]), "no operator or module called 7"),
        (lambda d: d.update(begins=["mse_loss"]), "a stage cannot begin with mse_loss"),
        (lambda d: d.update(begins=["linear_3"]), "linear_2"),
        (lambda d: d.update(again=["relu"]), "relu depends on parameters"),
        (lambda d: d.update(places=3), "2 stages do not divide over 3 parts"),
        (lambda d: d.update(places=0), "two places or more, not 0"),
        (lambda d: d.pop("schedule"), "no pipeline schedule called None"),
        (lambda d: d["stages"][0]["groups"].pop("linear"), "linear"),
        (lambda d: d["stages"][1]["groups"].update(linear_2=["sideways"]), "linear_2.*sideways"),
        (lambda d: d["stages"][1].pop("mesh"), "mesh"),
    ],
)  # fmt: skip
def test_data_that_describe_no_pipeline_of_the_model(change: Any, says: str) -> None:
    strategy = split_along_the_batch(problem(four).graph, (2,), (2, 2))
    with pytest.raises(PlanError, match=says):
        edited(strategy, change)
