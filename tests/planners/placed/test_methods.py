"""What every placing method must keep, on random problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError
from tensoropt.placement import simulate_placement
from tensoropt.planners.registry import ENTRIES
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import all_bytes, random_problem, with_capacity

LIST_SCHEDULERS = ["placer", "m_topo", "m_etf", "m_sct", "dpos"]


def method(name: str):
    return ENTRIES[name].module.place


def constrained(seed: int, training: bool, capacity: float):
    """A random problem on mixed devices with groups and pins that do not contradict each other."""
    rng = np.random.default_rng(seed)
    size, devices = int(rng.integers(3, 25)), int(rng.integers(1, 5))
    problem = random_problem(seed, size, devices, training=training, mixed=bool(rng.random() < 0.5))
    count = problem.devices.count
    together = tuple(
        tuple(sorted(int(o) for o in rng.choice(problem.size, size=2, replace=False))) for _ in range(2)
    )
    pinned = ((0, (int(rng.integers(count)),)),) if rng.random() < 0.5 else ()
    capped = with_capacity(problem, capacity * all_bytes(problem))
    return replace(capped, together=together, pinned=pinned)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.3, 0.6, 1.5, float("inf")]))
def test_constraints_and_capacity_are_kept_under_the_simulator_or_refused(name, seed, training, capacity):
    problem = constrained(seed, training, capacity)
    try:
        answer = method(name)(problem, None, seed)
    except InfeasibleError:
        with pytest.raises(InfeasibleError, match=f"{name} finds no plan within"):
            method(name)(problem, None, seed)
        assert capacity < float("inf")
        return
    simulated = simulate_placement(problem, answer.placement)  # checks pins and groups
    assert simulated.fits()
    assert method(name)(problem, None, seed) == answer


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
def test_a_limit_is_a_capacity(name):
    problem = random_problem(3, 30, 3)
    limit = all_bytes(problem) * (1.5 if name == "placer" else 0.7)
    capped = with_capacity(problem, limit)
    assert method(name)(problem, limit, 0).placement == method(name)(capped, None, 0).placement
    with pytest.raises(InfeasibleError, match="finds no plan within 1 B"):
        method(name)(problem, 1.0, 0)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
def test_operators_stay_off_devices_that_cannot_run_them(name):
    problem = problem_of([[np.inf, 1.0], [1.0, np.inf], [1.0, 1.0]], [(0, 1), (1, 2)])
    answer = method(name)(problem, None, 0)
    assert answer.placement.device[:2] == (1, 0)
    if name == "placer":
        assert answer.notes == ("1 operators cannot run on device 0 and lie on the next device that can",)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
def test_one_device_and_no_edges_are_fine(name):
    for problem in (problem_of([1.0, 2.0], [(0, 1)], devices=1), problem_of([1.0, 2.0], [])):
        placement = method(name)(problem, None, 0).placement
        assert sorted(o for order in placement.forward for o in order) == [0, 1]
        assert simulate_placement(problem, placement).time_s in (2.0, 3.0)
