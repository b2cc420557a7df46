"""What every placing method must keep, on random problems; and what they share."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.placement import Placement, simulate_placement
from tensoropt.planners import ENTRIES
from tensoropt.planners.placed.placing import Memory, PlacedAnswer, settle, units_of
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem

PLACED = [
    name
    for name, entry in ENTRIES.items()
    if entry.kind == "placed"
    and hasattr(importlib.import_module(f"tensoropt.planners.placed.{name}"), "place")
]
LIST_SCHEDULERS = [name for name in ("placer", "m_topo", "m_etf", "m_sct", "dpos") if name in PLACED]


def method(name: str):
    return importlib.import_module(f"tensoropt.planners.placed.{name}").place


def constrained(seed: int, training: bool, capacity: float):
    """A random problem on mixed devices with groups and pins that do not contradict each other."""
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed,
        int(rng.integers(3, 25)),
        int(rng.integers(1, 5)),
        training=training,
        mixed=bool(rng.random() < 0.5),
    )
    count = problem.devices.count
    together = tuple(
        tuple(sorted(int(o) for o in rng.choice(problem.size, size=2, replace=False))) for _ in range(2)
    )
    pinned = ((0, (int(rng.integers(count)),)),) if rng.random() < 0.5 else ()
    total = sum(problem.step_bytes(o) for o in range(problem.size))
    devices = replace(problem.devices, capacity_bytes=np.full(count, capacity * total))
    return replace(problem, together=together, pinned=pinned, devices=devices)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.3, 0.6, 1.5, float("inf")]))
def test_constraints_and_capacity_are_kept_under_the_judge_or_refused(name, seed, training, capacity):
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
    total = sum(problem.step_bytes(o) for o in range(problem.size))
    limit = total * (1.5 if name == "placer" else 0.7)
    capped = replace(problem, devices=replace(problem.devices, capacity_bytes=np.full(3, limit)))
    assert method(name)(problem, limit, 0).placement == method(name)(capped, None, 0).placement
    with pytest.raises(InfeasibleError, match="finds no plan within 1 B"):
        method(name)(problem, 1.0, 0)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
def test_operators_stay_off_devices_that_cannot_run_them(name):
    problem = problem_of([[np.inf, 1.0], [1.0, np.inf], [1.0, 1.0]], [(0, 1), (1, 2)])
    answer = method(name)(problem, None, 0)
    assert answer.placement.device[:2] == (1, 0)
    if name == "placer":
        assert answer.notes == ("1 operators cannot run on device 0 and went to the next that can",)


@pytest.mark.parametrize("name", LIST_SCHEDULERS)
def test_one_device_and_no_edges_are_fine(name):
    for problem in (problem_of([1.0, 2.0], [(0, 1)], devices=1), problem_of([1.0, 2.0], [])):
        placement = method(name)(problem, None, 0).placement
        assert sorted(o for order in placement.forward for o in order) == [0, 1]
        assert simulate_placement(problem, placement).time_s in (2.0, 3.0)


def test_units_join_what_belongs_together():
    problem = problem_of(
        [1.0] * 5,
        [(0, 1)],
        stored=[1, 2, 4, 8, 16],
        together=((0, 2), (2, 4)),
        pinned=((4, (1,)), (1, (0,))),
    )
    units = units_of(problem)
    assert units.members == ((0, 2, 4), (1,), (3,))
    assert units.of == (0, 1, 0, 2, 0)
    assert units.bytes.tolist() == [21, 2, 8]
    assert [c.tolist() for c in units.choices] == [[1], [0], [0, 1]]


def test_contradicting_pins_name_both_sides():
    problem = problem_of([1.0, 1.0], [], together=((0, 1),), pinned=((0, (0,)), (1, (1,))))
    with pytest.raises(TensorOptError, match="op0 on device 0; op1 on device 1"):
        units_of(problem)


def test_what_does_not_add_up_is_booked_below_the_limit():
    # 1 keeps what it gets from 0 for backward: 8 B on its device that are counted where they were made
    problem = problem_of([1.0, 1.0, 1.0], [(0, 1)], message_s=8e-6, stored=[0.0, 4.0, 4.0], training=True)
    kept = replace(problem.tensors[0], kept_by=(1,), gradient=False)
    problem = replace(problem, tensors=(kept,))
    units = units_of(problem)
    caps: list[float] = []

    def attempt(memory: Memory):
        caps.append(float(memory.caps[1]))
        memory.book(units, 0, 0)
        memory.book(units, 1, 1)
        third = int(memory.room(units, 2)[1])
        memory.book(units, 2, third)
        return PlacedAnswer(Placement.in_order([0, 1, third], 2), ("told",))

    answer = settle("method", problem, units, 13.0, attempt)
    assert caps == [13.0, 13.0 - (16.0 - 8.0)]
    assert answer.placement.device == (0, 1, 0)
    assert answer.notes == (
        "told",
        "what is in flight does not add up: booked at most 5 B of 13 B on device 1, attempt 2",
    )


def test_of_what_passes_the_largest_counts():
    problem = problem_of([1.0] * 3, [(0, 1), (1, 2)], message_s={(0, 1): 2e-6, (1, 2): 6e-6}, stored=4.0)
    units = units_of(problem)
    assert units.flight_bytes.tolist() == [2, 8, 6]
    memory = Memory.empty(np.array([16.0, 15.9]))
    memory.book(units, 0, 0)
    memory.book(units, 0, 1)
    assert memory.room(units, 1).tolist() == [True, False]
    memory.book(units, 1, 0)
    assert (memory.used.tolist(), memory.flight.tolist()) == ([8, 4], [8, 2])
    assert Memory.empty(np.array([4.0]), flies=False).room(units, 1).tolist() == [True]


def test_a_method_that_cannot_get_below_the_limit_is_refused():
    problem = problem_of([1.0], [], stored=10.0)

    def attempt(memory: Memory):
        return PlacedAnswer(Placement.in_order([0], 2))

    with pytest.raises(InfeasibleError, match="device 0 still reaches 10 B"):
        settle("method", problem, units_of(problem), 5.0, attempt)
