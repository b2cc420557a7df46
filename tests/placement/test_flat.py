"""The flat form of a placement's step, against the simulator, its naive twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.placement import MessageEnds, Placement, simulate_placement
from tensoropt.placement.flat import FlatProblem, flat_step, step_s
from tensoropt.placement.problem import PlacedResult
from tests.planners.placed.placements import random_problem


def shuffled(problem, rng) -> Placement:
    """Random devices, and an order of all operators that no dependence contradicts, in both directions."""
    device = rng.integers(problem.devices.count, size=problem.size).tolist()
    rank = np.arange(problem.size) + rng.integers(3, size=problem.size) * (rng.random() < 0.5)
    for tensor in problem.tensors:
        for reader in tensor.readers:
            rank[reader] = max(rank[reader], rank[tensor.producer] + 1)
    order = sorted(range(problem.size), key=lambda o: (rank[o], o))
    return Placement.in_order(device, problem.devices.count, order)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([1, 1, 2, 3]))
def test_the_flat_step_is_the_simulators(seed, training, mixed, micro_batches):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed, int(rng.integers(2, 20)), int(rng.integers(1, 4)), training=training, mixed=mixed
    )
    results = (PlacedResult(problem.size - 1, 2**20, 1e-3),) if rng.random() < 0.5 else ()
    shared = dict.fromkeys(((0, 1), (1, 0)), ("bus",)) if rng.random() < 0.5 else {}
    problem = replace(
        problem,
        micro_batches=micro_batches,
        results=results,
        devices=replace(
            problem.devices,
            lanes=shared,
            ends=MessageEnds(*rng.choice([0.0, 1e-9, 1e-4], size=(6, problem.devices.count))),
            slower=float(rng.choice([0.0, 0.19, np.inf])),
        ),
        update_s=rng.choice([0.0, 1e-4], size=problem.forward_s.shape),
        host_s=None if rng.random() < 0.5 else rng.choice([0.0, 1e-3], size=problem.forward_s.shape),
    )
    placement = shuffled(problem, rng)
    assert step_s(FlatProblem.of(problem), placement) == simulate_placement(problem, placement).time_s


def test_orders_that_wait_for_each_other_never_end():
    problem = random_problem(1, 6, 1)
    order = np.arange(6)
    last, _, _ = flat_step(tuple(FlatProblem.of(problem)), np.zeros(6, np.int64), order[::-1].copy(), order)
    assert last == np.inf
