"""Pipelined strategies: what their stages have to agree in, where they lie, and as plain data.

The orders of pipelines: those of PyTorch, and what follows from them.

Which stages may have their backward taken apart, by the ways that gradients take.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules as theirs

from tensoropt.capture import capture
from tensoropt.errors import PlanError, TensorOptError
from tensoropt.evaluation.problem import prepare
from tensoropt.pipeline.stages import Cutter
from tensoropt.pipeline.strategy import (
    SCHEDULES,
    Action,
    PipelinedStrategy,
    _unfit_parameter,
    check_schedule,
    place_actions,
)
from tensoropt.sharding.regions import find_regions
from tensoropt.verify.random_strategies import random_pipeline
from tests.costs.models import four, gpt2, llama, problem
from tests.execute.models import mixtral
from tests.pipeline.models import Recipe, frozen, skip, sliced, split_along_the_batch, tables, tied
from tests.situations import readers
from tests.situations.readers import WIDTH, Twice

CASES = [(2, 2), (2, 4), (2, 8), (3, 6), (4, 4), (4, 8), (4, 12), (4, 3), (3, 10)]
KINDS = {
    theirs._ComputationType.FORWARD: "F", theirs._ComputationType.FULL_BACKWARD: "B",
    theirs._ComputationType.BACKWARD_INPUT: "I", theirs._ComputationType.BACKWARD_WEIGHT: "W",
}  # fmt: skip


def torch_order(cls: type, place: int, places: int, per_place: int, micro_batches: int) -> list[Action]:
    """What PyTorch's schedule computes at a place, without a job: the one method that says so, on what it
    reads."""
    rounds = max(1, micro_batches // places)
    known = SimpleNamespace(
        pp_group_size=places, n_local_stages=per_place, num_stages=places * per_place,
        _n_microbatches=micro_batches, microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    found = cls._calculate_single_rank_operations(known, place)
    return [
        Action(KINDS[a.computation_type], a.stage_index, a.microbatch_index) for a in found if a is not None
    ]


@pytest.mark.parametrize(("places", "micro_batches"), CASES)
@pytest.mark.parametrize(("name", "cls"), [
    ("interleaved_1f1b", theirs.ScheduleInterleaved1F1B),
    ("zero_bubble", theirs.ScheduleInterleavedZeroBubble),
    ("zbv", theirs.ScheduleZBVZeroBubble),
])  # fmt: skip
def test_several_stages_to_a_place_come_in_torchs_order(name, cls, places, micro_batches):
    for per_place in (2,) if name == "zbv" else (1, 2, 3):
        try:
            own = place_actions(name, places, per_place, micro_batches)
        except PlanError:
            assert micro_batches % max(1, micro_batches // places)
            continue
        for place in range(places):
            assert list(own[place]) == torch_order(cls, place, places, per_place, micro_batches)


class Watched:
    """A stage that computes nothing and notes what it is asked for."""

    def __init__(self, stage: int):
        self.stage_index = stage
        self.asked: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.asked.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.asked.append(Action("B", self.stage_index, micro_batch))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []  # nothing is received or sent


@pytest.mark.parametrize(("places", "micro_batches"), CASES)
@pytest.mark.parametrize(("name", "cls"), [("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)])
def test_one_stage_to_a_place_comes_in_torchs_order(name, cls, places, micro_batches):
    if name == "1f1b" and micro_batches < places:
        pytest.skip("PyTorch refuses it, and so do we")
    for place, own in enumerate(place_actions(name, places, 1, micro_batches)):
        stage, nothing = Watched(place), lambda *_, **__: None
        schedule = SimpleNamespace(
            _stage=stage,
            _num_stages=places,
            _n_microbatches=micro_batches,
            _check_inputs=lambda *_: ([()] * micro_batches, [{}] * micro_batches),
            **dict.fromkeys(
                ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"), nothing
            ),
            scale_grads=False,
        )
        cls._step_microbatches(schedule)
        assert stage.asked == list(own)


@pytest.mark.parametrize(("given", "words"), [
    (("1f1b", 4, 1, 2), "more micro-batches"),
    (("1f1b", 4, 2, 8), "one stage on each group"),
    (("zbv", 4, 3, 8), "two stages on each group"),
    (("gpipe", 1, 1, 8), "at least two groups"),
    (("interleaved_1f1b", 2, 2, 5), "multiple of 2"),
    (("dualpipe", 2, 2, 4), "there are gpipe"),
])  # fmt: skip
def test_what_is_not_run_is_refused(given, words):
    with pytest.raises(PlanError, match=words):
        check_schedule(*given)


W = readers.WIDTH


class Several(nn.Module):
    """What PyTorch computes as one operator, with parameters that its parts read once or several times."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(W, W), nn.Linear(W, W)
        self.own = nn.Parameter(torch.randn(1, W))
        self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}.get(how, nn.Identity)(W, W)
        self.norm = nn.GroupNorm(2, W)
        self.tower = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.how in ("gru", "lstm"):
            h = self.recurrent(h[None].expand(3, -1, -1))[0][-1]
        elif self.how == "cosine":
            h = h * F.cosine_similarity(h, self.own)[:, None]
        elif self.how == "norm":
            h = self.norm(h) * self.own
        elif self.how == "a tower read once":
            h = h * torch.tanh(self.tower(x))
        elif self.how == "a tower read twice":
            side = torch.tanh(self.tower(x))
            h = torch.tanh(h * side) + side
        elif self.how == "penalty":
            return self.last(h).square().mean() + self.last.weight.square().mean()
        return self.last(h).square().mean()


@cache
def cutter_of(how: str) -> Cutter:
    torch.manual_seed(0)
    return Cutter(prepare(capture(Several(how), (torch.randn(8, W),), {})).graph)


@pytest.mark.parametrize(("how", "parameter"), [
    *((how, "") for how in ("norm", "cosine", "lstm", "a tower read once")),
    ("gru", "recurrent_weight_hh"), ("a tower read twice", "tower_weight"), ("penalty", "last_weight"),
])  # fmt: skip
def test_one_way_from_a_parameter_to_what_arrived_is_found(how, parameter):
    """Of the stage behind the first layer; several ways are not."""
    cutter = cutter_of(how)
    unfit = _unfit_parameter(cutter.stage(1, len(cutter.graph.groups)).graph)
    assert (unfit is not None) == bool(parameter)
    assert unfit is None or parameter in unfit[0]


@pytest.mark.parametrize("how", ["early", "split", "merged", "normed"])
def test_what_is_made_of_parameters_alone_may_not_depart(how):
    model, args = readers.made_of_parameters(how)
    cutter = Cutter(prepare(capture(model, args, {})).graph)
    ends, lost = [0, *cutter.cuts, len(cutter.graph.groups)], 0
    for start in ends[1:-1]:
        for stop in (one for one in ends if one > start):
            stage = cutter.stage(start, stop)
            fixed = {t.name for t in stage.graph.atoms.graph.parameters}
            made = set(fixed)
            for op in stage.graph.atoms.graph.operators:
                if op.inputs() and made.issuperset(op.inputs()):
                    made.update(op.outputs)
            if any(name in made for name in stage.departing):
                lost += 1
                unfit = _unfit_parameter(stage.graph)
                assert unfit is not None
    assert lost


FIRST = "p_model_first_weight"


def read_twice() -> Recipe:
    """Each of two blocks reads its weight twice."""
    return Twice(2), (torch.randn(8, WIDTH),), {}


def edited(strategy: PipelinedStrategy, change: Callable[[dict[str, Any]], Any]) -> PipelinedStrategy:
    """The strategy whose data were changed."""
    data = json.loads(json.dumps(strategy.to_data()))
    change(data)
    return PipelinedStrategy.from_data(data, strategy.graph)


# -- where stages lie -----------------------------------------------------------------------------


def test_ranks_follow_one_another_place_by_place():
    found = split_along_the_batch(problem(four).graph, (2,), (4, 2, 2))
    assert found.mesh == (4, 2, 2)
    assert (found.micro_batches, found.places, found.devices_per_place, found.devices) == (4, 2, 2, 4)
    assert [found.place_of(stage) for stage in range(2)] == [0, 1]
    assert [part.departing for part in found.parts] == [("relu_1",), ()]


@pytest.mark.parametrize(("schedule", "places", "at"), [
    ("1f1b", [0, 1, 2, 3], [(0,), (1,), (2,), (3,)]),
    ("interleaved_1f1b", [0, 1, 0, 1], [(0, 2), (1, 3)]),
    ("zero_bubble", [0, 1, 0, 1], [(0, 2), (1, 3)]),
    ("zbv", [0, 1, 1, 0], [(0, 3), (1, 2)]),
])  # fmt: skip
def test_several_stages_lie_at_a_place(schedule, places, at):
    found = split_along_the_batch(problem(four).graph, (1, 2, 3), (4, len(at)), schedule)
    assert [found.place_of(stage) for stage in range(4)] == places
    assert [found.stages_at(place) for place in range(len(at))] == at


def test_a_parameter_of_several_stages_is_known_with_its_holders():
    found = split_along_the_batch(problem(tied).graph, (1, 2), (3, 3), "gpipe")
    assert found.tied == (FIRST,)
    assert found.holders(FIRST) == (0, 2)
    assert found.holders("p_model_second_weight") == (1,)
    # Not where one stage has all its uses.
    assert split_along_the_batch(problem(four).graph, (2,), (2, 2)).tied == ()


# -- what stages have to agree in -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "cuts", "places", "stage", "name"),
    [(four, (2,), 2, 1, "relu_1"), (skip, (1, 2, 3), 4, 3, "relu")],
)
def test_every_tensor_of_every_cut_crosses_in_one_placement(build, cuts, places, stage, name):
    strategy = split_along_the_batch(problem(build).graph, cuts, (1, places, 2), "gpipe")

    def enter_whole(data: dict[str, Any]) -> None:
        data["stages"][stage]["groups"][f"arrive.{name}"] = ["none", "none"]

    says = rf"{name} leaves stage {stage - 1} as .* but enters stage {stage} as .*; both stages must"
    with pytest.raises(PlanError, match=says):
        edited(strategy, enter_whole)


def test_stages_have_one_mesh():
    graph = problem(four).graph
    two, four_micro = (split_along_the_batch(graph, (2,), (m, 2, 2)) for m in (2, 4))
    with pytest.raises(PlanError, match=r"the stages of a pipeline need equal meshes, .*\(2, 2\), \(4, 2\)"):
        replace(two, stages=(two.stages[0], four_micro.stages[1]))


def test_copies_of_a_parameter_are_stored_alike():
    strategy = split_along_the_batch(problem(tied).graph, (2,), (2, 2, 2))

    def shard_one(data: dict[str, Any]) -> None:
        data["stages"][1]["stored"][FIRST] = ["R/P", "S(0)"]

    with pytest.raises(PlanError, match=f"{FIRST} is used in several stages, which must store it in one"):
        edited(strategy, shard_one)


def test_copies_of_a_parameter_lie_on_different_devices():
    # Stages 0 and 3 have the first layer's weights. In a V both lie at place 0, round and round they do not.
    graph = problem(tied).graph
    with pytest.raises(PlanError, match=rf"{FIRST} is used in stages \[0, 3\], .* schedule zbv puts on the"):
        split_along_the_batch(graph, (1, 2, 3), (4, 2), "zbv")
    assert split_along_the_batch(graph, (1, 2, 3), (4, 2), "interleaved_1f1b").holders(FIRST) == (0, 3)


@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.apart])
def test_what_takes_backward_apart_passes_no_collectives(schedule):
    graph, cuts = problem(four).graph, (1, 2, 3)
    # Split along the batch with whole parameters, whose gradients are reduced behind the step: none within.
    strategy = split_along_the_batch(graph, cuts, (4, 2, 2), schedule)

    def split_columns(data: dict[str, Any]) -> None:
        data["stages"][2]["groups"]["linear_2"] = ["d0", "out_features"]
        data["stages"][2]["stored"]["p_model_layers_2_weight"] = ["R/P", "S(0)"]

    with pytest.raises(PlanError, match=f"the schedule {schedule} splits backward, .* stage 2 issues "):
        edited(strategy, split_columns)
    # The same stages are run by others.
    plain = replace(strategy, schedule="interleaved_1f1b")
    assert edited(plain, split_columns).schedule == "interleaved_1f1b"


def test_what_takes_backward_apart_exchanges_no_rows_of_experts():
    """The all-to-alls are the kernel's own: tensors lie the same on all edges."""
    pytest.importorskip("transformers.integrations.moe")
    graph = problem(mixtral).graph
    cut = next(number for number, group in enumerate(graph.groups) if group.name == "experts")
    strategy = split_along_the_batch(graph, (cut,), (2, 2, 2), "zero_bubble")

    def dispatch(data: dict[str, Any]) -> None:
        stage = data["stages"][1]
        stage["groups"]["experts"][1] = "dispatch.0"
        for name in stage["stored"]:
            if "_experts_" in name:
                stage["stored"][name][1] = "S(0)"

    with pytest.raises(PlanError, match=r"so stages must .* but stage 1 issues collectives in forward or"):
        edited(strategy, dispatch)
    plain = replace(strategy, schedule="1f1b")
    stage = edited(plain, dispatch).stages[1]
    assert not any(any(stage.steps(edge)) for edge in stage.edges() if edge.kind != "output")


def test_what_takes_backward_apart_recomputes_nothing():
    graph = problem(gpt2).graph
    strategy = split_along_the_batch(graph, (12,), (2, 2), "zero_bubble")
    first = strategy.stages[0]
    recomputing = replace(first, recomputed=find_regions(first.graph))
    assert recomputing.recomputed
    with pytest.raises(PlanError, match="stage 0 recomputes a block; use 1f1b or interleaved_1f1b"):
        replace(strategy, stages=(recomputing, strategy.stages[1]))
    assert replace(strategy, schedule="1f1b", stages=(recomputing, strategy.stages[1]))


def test_what_takes_backward_apart_finds_each_gradient():
    """PyTorch's split backward gives wrong gradients of a projection whose slices are read."""
    graph = problem(read_twice).graph
    cut = next(number for number, group in enumerate(graph.groups) if group.name == "linear_3")
    with pytest.raises(
        PlanError,
        match=r"for p_model_blocks_1_weight in stage 1: it, or a tensor .*, is read 2 times .*; use 1f",
    ):
        split_along_the_batch(graph, (cut,), (4, 2), "zero_bubble")
    assert split_along_the_batch(graph, (cut,), (4, 2), "1f1b")
    # The first stage's backward is whole.
    assert split_along_the_batch(problem(sliced).graph, (4,), (4, 2), "zero_bubble")


def test_stages_without_a_backward_run_in_every_schedule():
    """The first stage behind them that has one returns no gradients, so that it is not taken apart."""
    graph = problem(frozen).graph
    cutter = Cutter(graph)
    cuts = tuple(cutter.beginning(f"blocks.{n}") for n in (1, 2, 5))
    for schedule in ("interleaved_1f1b", "zero_bubble", "zbv"):
        strategy = split_along_the_batch(graph, cuts, (4, 2), schedule)
        assert strategy.forward_only == 2
        assert [strategy.shares_arriving(n) for n in range(4)] == [False] * 4
    cuts = tuple(cutter.beginning(f"blocks.{n}") for n in (3, 4, 5))
    last = split_along_the_batch(graph, cuts, (4, 2), "zbv")
    assert last.forward_only == 1
    assert [last.shares_arriving(n) for n in range(4)] == [False, False, True, False]
    # Of a parameter that is read twice the gradient is found in the first stage that has a backward.
    graph = problem(read_twice_frozen).graph
    cut = next(number for number, group in enumerate(graph.groups) if group.name == "linear_3")
    assert split_along_the_batch(graph, (cut,), (4, 2), "zero_bubble").forward_only == 1


def read_twice_frozen() -> Recipe:
    """Its first block is frozen."""
    model, *rest = read_twice()
    for module in (model.stem, model.blocks[0]):
        module.requires_grad_(False)
    return model, *rest


# -- as plain data --------------------------------------------------------------------------------


def test_data_name_the_operators_with_which_stages_begin():
    strategy = split_along_the_batch(problem(tables).graph, (6,), (2, 2), "gpipe", frozenset({"softmax"}))
    data = strategy.to_data()
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
def test_data_give_the_strategy_back(build, mesh, schedule, rng):
    graph = problem(build).graph
    try:
        strategy = random_pipeline(graph, mesh, schedule, rng, 0.5)
    except TensorOptError:
        return  # the schedule has none of so many places
    data = json.loads(json.dumps(strategy.to_data()))
    again = PipelinedStrategy.from_data(data, graph)
    assert again == strategy
    assert (again.mesh, again.tied, again.devices) == (strategy.mesh, strategy.tied, strategy.devices)


@pytest.mark.parametrize(("change", "says"), [
    (lambda d: d.pop("begins"), "does not say with which operators its stages begin"),
    (lambda d: d.update(begins=[]), "does not say with which operators its stages begin"),
    (lambda d: d.update(stages=3), "does not say with which operators its stages begin"),
    (lambda d: d["stages"].pop(), "does not say with which operators its stages begin"),
    (lambda d: d.update(begins=["linear_9"]), "no operator or module called linear_9"),
    (lambda d: d.update(begins=[7]), "no operator or module called 7"),
    (lambda d: d.update(begins=["mse_loss"]), "a stage cannot begin with mse_loss"),
    (lambda d: d.update(begins=["linear_3"]), "linear_2"),
    (lambda d: d.update(again=["relu"]), "relu depends on parameters"),
    (lambda d: d.update(places=3), "2 stages do not divide evenly over 3 groups"),
    (lambda d: d.update(places=0), "two groups of devices, not 0"),
    (lambda d: d.pop("schedule"), "no pipeline schedule called None"),
    (lambda d: d["stages"][0]["groups"].pop("linear"), "linear"),
    (lambda d: d["stages"][1]["groups"].update(linear_2=["sideways"]), "linear_2.*sideways"),
    (lambda d: d["stages"][1].pop("mesh"), "mesh"),
])  # fmt: skip
def test_data_that_describe_no_pipeline_of_the_model(change, says):
    strategy = split_along_the_batch(problem(four).graph, (2,), (2, 2))
    with pytest.raises(PlanError, match=says):
        edited(strategy, change)
