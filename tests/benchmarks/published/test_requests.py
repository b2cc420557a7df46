"""What ranks ask an allocator for: by hand, and as much at every moment as the simulator counts."""

from __future__ import annotations

import itertools
import random

import pytest

from tensoropt.costs.prices import free_prices
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.pipeline.evaluate import PipelineEvaluation
from tensoropt.pipeline.memory import memory_of_actions
from tensoropt.pipeline.strategy import SCHEDULES, place_actions
from tensoropt.profiling.workload import workload
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.simulator import simulate
from tensoropt.simulate.step import Instruction, NamedBytes, Step
from tensoropt.simulate.step_schedule import Moment
from tensoropt.verify.random_strategies import micro_strategies, random_pipeline, random_strategy
from tests.benchmarks.published.place_requests import place_requests
from tests.benchmarks.published.requests import RankRequests, step_requests
from tests.costs.models import facts_of, four, problem
from tests.execute import jobs
from tests.pipeline.models import split_along_the_batch
from tests.pipeline.test_evaluate import WEIGHT, evaluated, halves

MIB = 2**20
FORWARD, BACKWARD = (Moment(phase, "compute", "first") for phase in ("forward", "backward"))
OPTIMIZER = Moment("optimizer", "step", "")


def workspace(size: int) -> NamedBytes:
    return NamedBytes("first", "first", "workspace", "", "workspace", size)


def batch_of(strategy, optimizer: str) -> Batch:
    works = {n: workload(strategy.graph, c, strategy.mesh) for n, c in strategy.configurations.items()}
    candidates = StrategyCandidates(strategy, {n: facts_of(work) for n, work in works.items()})
    prices = free_prices(strategy.graph, strategy.mesh, optimizer)
    return Batch(candidates, *candidates.row(), prices)


def random_strategies(loaded, mesh, count):
    micro, rng = micro_strategies(loaded.graph, mesh[0]), random.Random(0)
    return [random_strategy(loaded.graph, mesh, micro, rng, recompute=0.5) for _ in range(count)]


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("name", ["mlp", "transformer", "bert_small"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_at_the_peak_as_much_is_asked_for_as_the_simulator_counts(name, optimizer):
    loaded = load_model(jobs.spec(name))
    for mesh in ((1, 2), (2, 2, 2)):
        for strategy in random_strategies(loaded, mesh, 3):
            batch = batch_of(strategy, optimizer)
            counted = int(simulate(batch).memory.sum())
            requests = step_requests(batch, 0)
            assert requests.peak_bytes() == counted


def test_a_step_by_hand():
    """4 MiB of parameters and as much of gradients; forward makes 3 MiB that are kept, and needs 5 meanwhile
    of which they are a part; Adam's state takes 8 MiB."""
    saved = NamedBytes("first", "first", "saved", "", "kept", 3 * MIB)
    forward = Instruction(FORWARD, leaves=[saved], workspace=[workspace(5 * MIB)])
    backward = Instruction(BACKWARD, releases=[saved], workspace=[workspace(6 * MIB)])
    step = RankRequests.of(
        [4 * MIB] * 2, [4 * MIB] * 2, Step((forward, backward, Instruction(OPTIMIZER)), 2, 1)
    )
    # 8 + 5 in forward; 8 + 3 + 6 in backward; with the state 16 + 3 + 6 in the second step's.
    assert step.peak_bytes() == 25 * MIB
    assert step.peak_bytes([2 * MIB]) == 27 * MIB


def test_what_is_kept_from_now_on_stays_in_its_block():
    made = NamedBytes("first", "x", "activation", "", "transient", 6 * MIB)
    kept = made._replace(kind="kept")
    forward = Instruction(FORWARD, begins=[made])
    used = Instruction(FORWARD._replace(group="second"), begins=[kept], ends=[made])
    backward = Instruction(BACKWARD, ends=[kept])
    found = RankRequests.of([], [], Step((forward, used, backward), 3, 4))
    assert found.peak_bytes() == 6 * MIB


def test_of_two_blocks_with_one_name_the_older_one_goes():
    """As with a tied parameter, which the next block gathers while the one before still has its own."""
    gathered = NamedBytes("first", "weight", "gathered parameters", "", "transient", 4 * MIB)
    other = gathered._replace(operator="second")
    moments = [Instruction(FORWARD, begins=[gathered]), Instruction(FORWARD, begins=[other])]
    moments += [Instruction(BACKWARD, ends=[other]), Instruction(BACKWARD, ends=[gathered])]
    found = RankRequests.of([], [], Step(tuple(moments), 4, 2))
    assert found.peak_bytes() == 8 * MIB


def signed_bytes(requests):
    """The bytes of every request, below 0 for what is returned: the oldest of its name."""
    alive, signed = [], []
    for name, size in requests:
        if size:
            alive.append((name, size))
            signed.append(size)
        else:
            signed.append(-alive.pop([other for other, _ in alive].index(name))[1])
    assert not alive, "a step returns all that it asks for"
    return signed


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
        curve = memory_of_actions(strategy, found.stages, place, actions).sum(axis=1).tolist()
        alive = [stored + now for now in itertools.accumulate(signed_bytes(requests.step))]
        at = 0
        for of_action in curve[:-1]:
            assert of_action in alive[at:]
            at += alive[at:].index(of_action)
        assert max(alive) == max(curve[:-1])
        end = [stored + now for now in itertools.accumulate(signed_bytes(requests.end))]
        assert max([stored, *end]) == curve[-1]
        assert requests.peak_bytes() == found.memory[place].sum()


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
    assert requests.peak_bytes() == 8 * WEIGHT + 4 * ROWS + ROWS + WEIGHT


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
