"""The clock of a step: its figures are those of its events, which the event scheduler places anew."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.profiling.overheads import Overheads
from tensoropt.simulate.candidates import BLOCKING, Overlap
from tensoropt.simulate.timed import launch_delays
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import ToyCommunication, ToyCompute, four, gates, llama_two, problem, unrolled
from tests.simulate.strategies import written
from tests.simulate.test_simulator import assert_scheduled, evaluated_at

LEVELS = {(0,): ("node",), (1,): ("gpu",), (0, 1): ("node", "gpu")}
OVERLAPS = {
    "blocking": BLOCKING, "beside": Overlap(True, ""), "slower": Overlap(True, "", LEVELS, 0.5),
    "levels": Overlap(True, "", LEVELS),
}  # fmt: skip
OVERHEADS = Overheads(1e-9, 1e-9, 1e-6, 3e-6, arrive_s=2e-6, accumulate_s=5e-7)
ISSUING = replace(OVERHEADS, of_host=Overheads(call_s=1e-6, pass_s=1e-7, arrive_s=1e-6, step_s=1e-5))


def assert_figures_are_those_of_its_events(evaluated: Evaluation) -> None:
    of, timed, row, seconds = evaluated.metrics, evaluated.timed(), 0, Counter()
    exact = {"rel": 1e-9, "abs": 1e-9 * of.time_s[row]}
    for event in timed.events:
        seconds[event.axes is None] += event.duration_s
    assert timed.time_s == pytest.approx(of.time_s[row], **exact)
    assert seconds[True] == pytest.approx(of.compute_s[row], **exact)
    assert seconds[False] == pytest.approx(of.communication_s[row], **exact)
    assert timed.host_s == pytest.approx(of.host_s[row], **exact)
    assert timed.time_s - timed.device_s == pytest.approx(of.idle_s[row], **exact)
    *turns, end_s = np.diff([time_s for _, time_s in timed.turns])
    parts, done = of.parts, list(zip(turns[::2], turns[1::2], timed.clocked.scattering_s[0], strict=True))
    slower = max(timed.host_s / timed.device_s, 1.0)
    chosen = np.array([done[0], done[min(1, len(done) - 1)], done[-1]]) * slower
    for number, of_parts in enumerate((parts.forward_s, parts.backward_s, parts.scattering_s)):
        assert chosen[:, number].tolist() == pytest.approx(of_parts[row].tolist(), **exact)
    assert end_s * slower == pytest.approx(parts.end_s[row], **exact)
    peak = max((kept + transient for _, kept, transient in timed.curve), default=0.0)
    assert peak == of.memory[row, 3:].sum() == max(parts.within_bytes[row], parts.end_bytes[row])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("build", [gates, four, unrolled, llama_two], ids=lambda build: build.__name__)
def test_a_steps_figures_are_those_of_its_events(build, mesh, overlap):
    graph, rng = problem(build).graph, random.Random(f"{build.__name__}{mesh}{overlap}")
    for host_s in ((0.0, 0.0), rng.choice([(5e-4, 1e-3), (5e-3, 2e-3)])):
        strategy = random_strategy(graph, mesh, micro_strategies(graph, mesh[0]), rng, recompute=0.5)
        evaluated = evaluated_at(
            strategy, ToyCompute(host_s=host_s), ToyCommunication(), OVERLAPS[overlap],
            ISSUING if any(host_s) else OVERHEADS, optimizer=rng.choice(["sgd", "adam"]),
            packs=rng.random() < 0.5,
        )  # fmt: skip
        assert_figures_are_those_of_its_events(evaluated)
        if not (any(host_s) or OVERLAPS[overlap].slower):
            assert_scheduled(evaluated)


def test_what_is_cast_as_backward_begins_is_no_part_of_forward():
    graph = problem(four, dtype="bfloat16").graph
    ahead = written(graph, (1, 2), ["none", "d0"], ["ahead", "S(0)"])
    costs = ToyCompute(), ToyCommunication(), OVERLAPS["beside"], OVERHEADS
    assert_figures_are_those_of_its_events(evaluated_at(ahead, *costs))


def begun(device: Sequence[float], host: Sequence[float]) -> list[float]:
    """When the device begins each moment, given the seconds of both queues."""
    alone = np.cumsum(device) - device
    return list(alone + launch_delays(alone, np.array(host), sum(device)))


def test_the_device_waits_for_what_is_not_issued():
    """Issuing takes 8 s, the device 6. Were the queue empty as the step begins, backward would come at 6 s
    and end at 10. As step follows step, the host is 2 s ahead, and the step takes the host's 8."""
    assert begun([1, 1, 2, 2], [3, 3, 1, 1]) == [0, 1, 4, 6]


def test_a_device_that_is_slower_never_waits():
    """Forward is issued more slowly than it is run, but the last step's backward was issued long before it
    was over."""
    assert begun([1, 5, 5], [2, 1, 1]) == [0, 1, 6]


def test_a_host_that_is_always_slower_is_waited_for_each_time():
    assert begun([1, 2], [3, 3]) == [0, 3]
