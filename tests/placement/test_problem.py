"""Steps of several micro-batches, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.placement import DeviceSet, PlacedTensor, Placement, PlacementProblem, simulate_placement
from tensoropt.placement.problem import repeat_placement, repeat_problem
from tests.planners.placed.placements import random_problem


def chain() -> PlacementProblem:
    """a -> b; every operator takes 1 s forward and 2 s backward, a message 1 s; a has parameters."""
    per_byte = np.array([[0.0, 0.1], [0.1, 0.0]])
    return PlacementProblem(
        names=("a", "b"),
        forward_s=np.ones((2, 2)),
        backward_s=2 * np.ones((2, 2)),
        update_s=np.array([[0.5, 0.5], [0, 0]]),
        parameter_bytes=np.array([100.0, 0]),
        gradient_bytes=np.array([100.0, 0]),
        optimizer_bytes=np.array([200.0, 0]),
        kept_bytes=np.array([5.0, 7.0]),
        forward_peak_bytes=np.zeros(2),
        backward_peak_bytes=np.zeros(2),
        tensors=(PlacedTensor(name="a", bytes=10, producer=0, readers=(1,), kept_by=(1,)),),
        devices=DeviceSet(
            capacity_bytes=np.full(2, 1e3), latency_s=np.zeros((2, 2)), seconds_per_byte=per_byte, lanes={}
        ),
    )


def in_two() -> PlacementProblem:
    return replace(chain(), micro_batches=2)


APART = Placement.in_order([0, 1], 2)


def test_devices_work_at_once_by_hand() -> None:
    # a 0-1, 1-2; sent 1-2, 2-3; b 2-3, 3-4.
    # b back 4-6, 6-8; gradients sent 6-7, 8-9; a back 7-9, 9-11, update.
    simulated = simulate_placement(in_two(), APART)
    assert simulated.time_s == pytest.approx(11.5)
    assert simulated.busy_s == pytest.approx((6.5, 6.0))
    assert simulated.transfers == ((0, 0, 1, False), (0, 1, 0, True))  # of one micro-batch
    sent = [e.name for e in simulated.events if e.phase == "send"]
    assert sent == ["a of micro-batch 0", "a of micro-batch 1"]
    # One after another they would take 2 * 8 + 0.5.
    assert simulate_placement(chain(), APART).time_s == pytest.approx(8.5)


def test_memory_of_micro_batches_in_flight_by_hand() -> None:
    simulated = simulate_placement(in_two(), APART)
    # Device 0 at 1-2 s: a of both (10 + 10), what both keep (5 + 5), and at 8-9 s two gradients instead of a.
    assert simulated.peak_bytes[0] == 400 + 20 + 10
    # Device 1 at 4-6 s: two copies of a and what b keeps, both for backward, and the first gradient of a.
    assert simulated.peak_bytes[1] == 2 * (10 + 7) + 10
    assert simulate_placement(chain(), APART).peak_bytes[1] == 10 + 7 + 10
    for device in (0, 1):
        assert sum(simulated.memory(device)[-1][1]) == (400, 0)[device]


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_one_device_does_everything_so_often(seed: int, count: int) -> None:
    problem = random_problem(seed)
    home = Placement.in_order([0] * problem.size, problem.devices.count)
    computed = float((problem.forward_s + problem.backward_s)[:, 0].sum())
    problem = replace(problem, together=(), pinned=(), micro_batches=count)
    simulated = simulate_placement(problem, home)
    assert simulated.time_s == pytest.approx(count * computed + float(problem.update_s[:, 0].sum()))


@given(st.integers(0, 10**6))
def test_one_micro_batch_is_the_problem_itself(seed: int) -> None:
    problem = random_problem(seed)
    again = repeat_problem(problem)
    assert (again.names, again.tensors) == (problem.names, problem.tensors)
    assert (again.together, again.pinned) == (problem.together, problem.pinned)


def test_an_operator_stays_where_it_may_lie_in_every_micro_batch() -> None:
    problem = repeat_problem(replace(in_two(), pinned=((1, (1,)),)))
    assert problem.pinned == ((1, (1,)), (3, (1,)))
    repeat_placement(APART, 2).check(problem)


def test_what_is_kept_of_all_micro_batches_counts_for_a_step() -> None:
    assert chain().step_bytes(0) == 400 + 5 + 10
    assert in_two().step_bytes(0) == 400 + 2 * (5 + 10)
