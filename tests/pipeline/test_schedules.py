"""The orders of pipelines: those of PyTorch, and what follows from them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from tensoropt.errors import PlanError
from tensoropt.pipeline.schedules import SCHEDULES, Action, check_schedule, place_actions, stage_place

CASES = [(2, 2), (2, 4), (2, 8), (3, 6), (4, 4), (4, 8), (4, 12), (4, 3), (3, 10)]
KINDS = {
    theirs._ComputationType.FORWARD: "F",
    theirs._ComputationType.FULL_BACKWARD: "B",
    theirs._ComputationType.BACKWARD_INPUT: "I",
    theirs._ComputationType.BACKWARD_WEIGHT: "W",
}


def torch_order(cls: type, place: int, places: int, per_place: int, micro_batches: int) -> list[Action]:
    """What PyTorch's schedule computes at a place, without a job: the one method that says so, on what it
    reads."""
    rounds = max(1, micro_batches // places)
    known = SimpleNamespace(
        pp_group_size=places,
        n_local_stages=per_place,
        num_stages=places * per_place,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    found = cls._calculate_single_rank_operations(known, place)
    return [
        Action(KINDS[a.computation_type], a.stage_index, a.microbatch_index) for a in found if a is not None
    ]


@pytest.mark.parametrize(("places", "micro_batches"), CASES)
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("interleaved_1f1b", theirs.ScheduleInterleaved1F1B),
        ("zero_bubble", theirs.ScheduleInterleavedZeroBubble),
        ("zbv", theirs.ScheduleZBVZeroBubble),
    ],
)
def test_several_stages_to_a_place_come_in_torchs_order(
    name: str, cls: type, places: int, micro_batches: int
) -> None:
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
def test_one_stage_to_a_place_comes_in_torchs_order(
    name: str, cls: Any, places: int, micro_batches: int
) -> None:
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


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("places", "micro_batches"), [(2, 4), (4, 8), (3, 6)])
def test_every_micro_batch_passes_every_stage_once(name: str, places: int, micro_batches: int) -> None:
    per_place = 2 if SCHEDULES[name].several else 1
    actions = place_actions(name, places, per_place, micro_batches)
    counts = Counter(action for own in actions for action in own)
    kinds = "FIW" if SCHEDULES[name].apart else "FB"
    wanted = {Action(k, s, m) for k in kinds for s in range(places * per_place) for m in range(micro_batches)}
    assert set(counts) == wanted
    assert set(counts.values()) == {1}
    for place, own in enumerate(actions):
        assert {stage_place(name, places, action.stage) for action in own} == {place}


def in_flight(own: tuple[Action, ...], stage: int) -> int:
    """The most micro-batches of a stage between forward and backward."""
    now = most = 0
    for action in own:
        if action.stage == stage and action.kind in "FBI":
            now += 1 if action.kind == "F" else -1
            most = max(most, now)
    return most


@pytest.mark.parametrize(("places", "micro_batches"), [(2, 2), (4, 4), (4, 16), (8, 16)])
def test_1f1b_keeps_as_many_micro_batches_as_places_are_behind(places: int, micro_batches: int) -> None:
    for place, own in enumerate(place_actions("1f1b", places, 1, micro_batches)):
        assert in_flight(own, place) == min(micro_batches, places - place)
    for place, own in enumerate(place_actions("gpipe", places, 1, micro_batches)):
        assert in_flight(own, place) == micro_batches


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("1f1b", 4, 1, 2), "more micro-batches"),
        (("1f1b", 4, 2, 8), "one stage to a place"),
        (("zbv", 4, 3, 8), "two stages to a place"),
        (("gpipe", 1, 1, 8), "two places or more"),
        (("interleaved_1f1b", 2, 2, 5), "multiple of 2"),
        (("dualpipe", 2, 2, 4), "there are gpipe"),
    ],
)
def test_what_is_not_run_is_refused(given: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_schedule(*given)
