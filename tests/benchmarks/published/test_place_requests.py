"""What ranks of pipelines ask an allocator for: by hand, and as much at every action as the simulator
counts."""

from __future__ import annotations

import itertools
import random

import pytest

from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.memory import memory_of_actions
from tensoropt.pipeline.strategy import SCHEDULES, place_actions
from tensoropt.verify.random_strategies import random_pipeline
from tests.benchmarks.published.place_requests import place_requests
from tests.benchmarks.published.test_caching_allocator import check_against_a_real_step, opened_wide
from tests.costs.models import four, problem
from tests.naive import reserved_by, signed_bytes
from tests.pipeline.models import split_along_the_batch
from tests.pipeline.test_evaluate import WEIGHT, evaluated, halves

ROWS = 8 * 24 * 4
"""Bytes of what a layer makes of a micro-batch of 8 rows."""


def check_requests(found: PipelineEvaluation) -> None:
    strategy = found.strategy
    per_place = len(strategy.stages) // strategy.places
    every = place_actions(strategy.schedule, strategy.places, per_place, strategy.micro_batches)
    for place, actions in enumerate(every):
        requests = place_requests(strategy, found.stages, place, actions)
        stored = sum(requests.lasting) + sum(requests.state)
        assert stored == found.memory[place, :3].sum()
        # The peaks of the actions are alive, one after another.
        curve = [kinds.sum() for _, kinds in memory_of_actions(strategy, found.stages, place, actions)]
        alive = [stored + now for now in itertools.accumulate(signed_bytes(requests.step))]
        at = 0
        for of_action in curve[:-1]:
            assert of_action in alive[at:]
            at += alive[at:].index(of_action)
        assert max(alive) == max(curve[:-1])
        end = [stored + now for now in itertools.accumulate(signed_bytes(requests.end))]
        assert max([stored, *end]) == curve[-1]
        for expandable in (False, True):
            peaks = requests.replay(expandable=expandable)
            assert peaks.requested == found.memory[place].sum()
            assert peaks.requested <= peaks.allocated <= peaks.reserved
            assert peaks.reserved == reserved_by(requests, expandable=expandable)


def test_a_place_by_hand() -> None:
    """Two layers of 24 times 24, of which forward keeps relu's results; then Adam's temporaries of both."""
    found = evaluated(halves("1f1b", 2))
    (actions, _) = place_actions("1f1b", 2, 1, 2)
    requests = place_requests(found.strategy, found.stages, 0, actions)
    assert requests.lasting == requests.state == [WEIGHT] * 4
    # Each layer's result before relu; of the second one's, the copy that is sent.
    forward = [ROWS, ROWS, -ROWS, ROWS, -ROWS, ROWS, ROWS, -ROWS]
    # What came back goes into the gradient of relu's result; then each layer's weight has a gradient that is
    # added to the stored one.
    back = [ROWS, -ROWS, ROWS, WEIGHT, -WEIGHT, -ROWS, -ROWS, WEIGHT, -WEIGHT, -ROWS]
    assert signed_bytes(requests.step) == 2 * forward + 2 * back
    assert signed_bytes(requests.end) == [WEIGHT, WEIGHT, -WEIGHT, -WEIGHT]
    # The most in the first backward: both micro-batches' results, a gradient, and that of a weight.
    assert requests.replay().requested == 8 * WEIGHT + 4 * ROWS + ROWS + WEIGHT


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("micro_batches", [4, 16])
def test_a_stage_per_place_asks_for_what_is_counted(schedule: str, micro_batches: int) -> None:
    check_requests(evaluated(halves(schedule, micro_batches)))


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_stages_of_one_place_ask_for_what_is_counted(schedule: str, optimizer: str) -> None:
    strategy = split_along_the_batch(problem(four).graph, (1, 2, 3), (4, 2), schedule)
    check_requests(evaluated(strategy, optimizer=optimizer))


@pytest.mark.sweep(quick=3)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("tests.costs.models:four", "gpipe"), ("tests.costs.models:four", "zbv"),
        ("tests.pipeline.models:deep", "1f1b"), ("tests.pipeline.models:deep", "interleaved_1f1b"),
        ("tests.pipeline.models:deep", "zero_bubble"), ("tests.pipeline.models:tied", "1f1b"),
        ("tests.pipeline.models:frozen", "gpipe"), ("tests.pipeline.models:frozen", "1f1b"),
        ("tests.pipeline.models:adapted", "zero_bubble"), ("tests.pipeline.models:adapted", "zbv"),
    ],
)  # fmt: skip
def test_random_pipelines_ask_for_what_is_counted(name: str, schedule: str) -> None:
    graph = load_model(ModelSpec(name)).graph
    # Backwards that are taken apart pass no collectives.
    mesh = (4, 2) if SCHEDULES[schedule].apart else (4, 2, 2)
    for seed in range(2):
        check_requests(evaluated(random_pipeline(graph, mesh, schedule, random.Random(seed), 0.3)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_an_allocator_reserves_as_much_for_a_real_step(schedule: str) -> None:
    loaded = opened_wide()
    strategy = random_pipeline(loaded.graph, (4, 2), schedule, random.Random(0))
    found, per_place = evaluated(strategy), len(strategy.stages) // 2
    for place, actions in enumerate(place_actions(schedule, 2, per_place, 4)):
        requests = place_requests(strategy, found.stages, place, actions)
        check_against_a_real_step(requests, place, loaded, strategy)
