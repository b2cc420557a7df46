"""The plain interpreter of a step in time: it has the batched simulator's figures, and waits for a slow
host."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tensoropt.evaluation.evaluate import Evaluation
from tensoropt.profiling.overheads import Overheads
from tensoropt.simulate.candidates import BLOCKING, Overlap
from tensoropt.simulate.clock import TimedStep
from tensoropt.simulate.step import Instruction, Step
from tensoropt.simulate.step_schedule import Moment
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.costs.models import ToyCommunication, ToyCompute, four, gates, llama_two, problem, unrolled
from tests.simulate.test_simulator import evaluated_at

LEVELS = {(0,): ("node",), (1,): ("gpu",), (0, 1): ("node", "gpu")}
OVERLAPS = {
    "blocking": BLOCKING, "beside": Overlap(True, ""), "slower": Overlap(True, "", {}, 0.189),
    "levels": Overlap(True, "", LEVELS, 0.5),
}  # fmt: skip
OVERHEADS = Overheads(1e-9, 1e-9, 1e-6, 3e-6, arrive_s=2e-6, accumulate_s=5e-7)
ISSUING = replace(OVERHEADS, of_host=Overheads(call_s=1e-6, pass_s=1e-7, arrive_s=1e-6, step_s=1e-5))


def assert_figures_are_the_simulators(evaluated: Evaluation) -> None:
    of, timed, row = evaluated.metrics, evaluated.timed(), 0
    exact = {"rel": 1e-9, "abs": 1e-9 * of.time_s[row]}
    assert timed.time_s == pytest.approx(of.time_s[row], **exact)
    assert timed.compute_s == pytest.approx(of.compute_s[row], **exact)
    assert timed.communication_s == pytest.approx(of.communication_s[row], **exact)
    assert timed.exposed_s == pytest.approx(of.exposed_s[row], **exact)
    assert timed.host_s == pytest.approx(of.host_s[row], **exact)
    assert timed.time_s - timed.device_s == pytest.approx(of.idle_s[row], **exact)
    *turns, end_s = np.diff([time_s for _, time_s in timed.turns])
    parts, done = of.parts, list(zip(turns[::2], turns[1::2], timed.scattering, strict=True))
    slower = max(timed.host_s / timed.device_s, 1.0)
    chosen = np.array([done[0], done[min(1, len(done) - 1)], done[-1]]) * slower
    for number, seconds in enumerate((parts.forward_s, parts.backward_s, parts.scattering_s)):
        assert chosen[:, number].tolist() == pytest.approx(seconds[row].tolist(), **exact)
    assert end_s * slower == pytest.approx(parts.end_s[row], **exact)
    assert timed.reducing_s * slower == pytest.approx(parts.reducing_s[row], **exact)
    # Memory is counted in whole bytes.
    step, memory = timed.step, timed.step.memory
    peak = max(memory, key=sum)
    assert (peak.kept, peak.transient + peak.workspace) == tuple(of.memory[row, 3:])
    assert max((kept + transient for _, kept, transient in timed.curve), default=0.0) == sum(peak)
    turned = sum(now.moment.phase == "forward" for now in step.instructions)
    assert max(map(sum, memory[:turned])) == parts.forward_bytes[row]
    assert max(map(sum, memory[turned : step.last])) == parts.backward_bytes[row]
    assert max(map(sum, memory[step.last :])) == parts.end_bytes[row]
    assert memory[turned].kept + memory[turned].transient == parts.between_bytes[row]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (4, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("build", [gates, four, unrolled, llama_two], ids=lambda build: build.__name__)
def test_its_figures_are_those_of_the_batched_simulator(build, mesh, overlap):
    graph, rng = problem(build).graph, random.Random(f"{build.__name__}{mesh}{overlap}")
    micro = micro_strategies(graph, mesh[0])
    for host_s in ((0.0, 0.0), rng.choice([(5e-4, 1e-3), (5e-3, 2e-3)])):
        strategy = random_strategy(graph, mesh, micro, rng, recompute=0.5)
        evaluated = evaluated_at(
            strategy, ToyCompute(host_s=host_s), ToyCommunication(), OVERLAPS[overlap],
            ISSUING if any(host_s) else OVERHEADS, optimizer=rng.choice(["sgd", "adam"]),
            packs=rng.random() < 0.5,
        )  # fmt: skip
        assert_figures_are_the_simulators(evaluated)


def ran(*moments: tuple[str, float, float], micro: int = 1) -> list[tuple[float, float]]:
    """(start, end) of each moment's work; each given as (phase, seconds on the device, seconds of the
    host)."""
    instructions = tuple(
        Instruction(Moment(phase, "compute", "g"), work_s=device_s, host_s=host_s)
        for phase, device_s, host_s in moments
    )
    step = Step(instructions, len(instructions), micro)
    return [(event.start_s, event.end_s) for event in TimedStep(step, BLOCKING).events]


def test_the_device_waits_for_what_is_not_issued():
    """Issuing takes 8 s, the device 6. Were the queue empty as the step begins, backward would come at 6 s
    and end at 10. As step follows step, the host is 2 s ahead, and the step takes the host's 8."""
    events = ran(("forward", 1, 3), ("forward", 1, 3), ("backward", 2, 1), ("backward", 2, 1))
    assert events == [(0, 1), (1, 2), (4, 6), (6, 8)]


def test_a_device_that_is_slower_never_waits():
    """Forward is issued more slowly than it is run, but the last step's backward was issued long before it
    was over."""
    moments: Sequence[tuple[str, float, float]] = [("forward", 1, 2), ("backward", 5, 1), ("backward", 5, 1)]
    assert ran(*moments) == [(0, 1), (1, 6), (6, 11)]


def test_a_host_that_is_always_slower_is_waited_for_each_time():
    assert ran(("forward", 1, 3), ("backward", 2, 3)) == [(0, 1), (3, 5)]


def test_micro_batches_are_issued_one_after_the_other():
    events = ran(("forward", 1, 3), ("backward", 2, 3), micro=2)
    assert events == [(0, 1), (3, 5), (6, 7), (9, 11)]
