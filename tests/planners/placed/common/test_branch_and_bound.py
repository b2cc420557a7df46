"""Placements of small problems, tried out to the last: as fast as the best of all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError
from tensoropt.placement import (
    MessageEnds,
    Placement,
    PlacementProblem,
    SimulatedPlacement,
    simulate_placement,
)
from tensoropt.plan.point import reduce_points
from tensoropt.planners.placed.common.annealing import MoveTables, State
from tensoropt.planners.placed.common.branch_and_bound import (
    MOST_OPERATORS,
    FastestFound,
    bound_s,
    fastest,
    frontier,
    tried_out,
)
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.local_search import LocalSearch
from tests.planners.placed.exhaustive import every_placement
from tests.planners.placed.placements import places, random_problem


def small(seed: int, training: bool) -> PlacementProblem:
    """A problem of which every placement is tried: groups, pins, equal and unequal devices, shared lanes."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, 4))
    operators = 5 if devices < 3 else 4
    problem = random_problem(seed, operators, devices, training=training, mixed=bool(seed % 2), transfer=2.0)
    if rng.random() < 0.3:
        pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
        problem = replace(problem, devices=replace(problem.devices, lanes=dict.fromkeys(pairs, ("bus",))))
    if rng.random() < 0.3:
        problem = replace(problem, pinned=((1, (devices - 1,)),))
    if rng.random() < 0.3:
        problem = replace(problem, together=((0, 3),))
    if rng.random() < 0.3:
        ends = MessageEnds(*rng.choice([0.0, 1e-9, 1e-3], size=(6, devices)))
        slower = float(rng.choice([0.19, np.inf]))
        problem = replace(problem, devices=replace(problem.devices, ends=ends, slower=slower))
    if rng.random() < 0.3:
        problem = replace(problem, host_s=rng.choice([1e-3, 1e-2], size=problem.forward_s.shape))
    return problem


def booked_bytes(problem: PlacementProblem, simulated: SimulatedPlacement) -> float:
    tables = MoveTables.of(problem, units_of(problem))
    return float(State.of(simulated).booked(tables, problem.devices.count).max())


def legal(problem: PlacementProblem) -> Iterator[SimulatedPlacement]:
    units = units_of(problem)

    def allowed(device: tuple[int, ...]) -> bool:
        return all(
            device[o] == device[units.members[u][0]] and units.allowed[u, device[o]]
            for o, u in enumerate(units.of)
        )

    return every_placement(problem, allowed)


NODES = 100_000_000


def unlimited(problem: PlacementProblem) -> np.ndarray:
    return np.full(problem.devices.count, np.inf)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=10)
def test_the_fastest_and_the_frontier_are_those_of_all_placements(seed: int, training: bool) -> None:
    problem = small(seed, training)
    every = [(booked_bytes(problem, s), s.time_s) for s in legal(problem)]
    best = fastest(problem, np.inf, unlimited(problem), NODES)
    assert best.proven
    assert best.state is not None
    assert simulate_placement(problem, best.state.placement(problem)).time_s == best.seconds
    assert best.seconds == pytest.approx(min(time_s for _, time_s in every), rel=1e-9)
    assert bound_s(problem) <= best.seconds * (1 + 1e-12)
    assert fastest(problem, best.seconds, unlimited(problem), NODES).state is None
    found, proven = frontier(problem, [], NODES)
    assert proven == len(found)
    simulated = [simulate_placement(problem, state.placement(problem)) for state in found]
    ours = reduce_points([(booked_bytes(problem, s), s.time_s) for s in simulated], lambda costs: costs)
    expected = reduce_points(every, lambda costs: costs)
    assert [m for m, _ in ours] == pytest.approx([m for m, _ in expected], rel=1e-9)
    assert [t for _, t in ours] == pytest.approx([t for _, t in expected], rel=1e-9)


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_no_placement_needs_less_than_is_booked(seed: int) -> None:
    """So that caps on what is booked cut nothing off that fits."""
    problem = small(seed, training=True)
    tables = MoveTables.of(problem, units_of(problem))
    for simulated in legal(problem):
        booked = State.of(simulated).booked(tables, problem.devices.count)
        assert (booked <= np.array(simulated.peak_bytes) * (1 + 1e-12)).all()


def test_a_search_that_ends_early_says_so() -> None:
    problem = random_problem(1, 12, 2, width=12)
    known_s = 1.0
    assert fastest(problem, known_s, unlimited(problem), 10) == FastestFound(None, known_s, 10, False)
    found, proven = frontier(problem, [], 10)
    assert proven < max(1, len(found))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("operators", "devices", "width"), [(14, 2, 3), (9, 3, 9)])
def test_the_local_search_proves_its_answer_for_small_graphs(
    seed: int, operators: int, devices: int, width: int
) -> None:
    problem = random_problem(
        seed, operators, devices, training=seed % 4 != 3, mixed=seed % 2 == 1, width=width
    )
    answers = places(problem, None, 0, LocalSearch(seconds=2))
    assert answers[-1].notes[-1].startswith("proven over all devices and orders")
    alone = fastest(problem, np.inf, unlimited(problem), NODES)
    assert alone.proven
    assert simulate_placement(problem, answers[-1].placement).time_s == pytest.approx(alone.seconds, rel=1e-9)


def test_of_larger_problems_a_bound_is_said_and_of_several_micro_batches_nothing() -> None:
    problem = random_problem(0, MOST_OPERATORS + 1, 2)
    alone = simulate_placement(problem, Placement.in_order([0] * problem.size, 2))
    gap = 1 - bound_s(problem) / alone.time_s
    found, note = tried_out(problem, [alone], 1.0)
    assert not found
    assert note.startswith(f"proven: no step is more than {gap:.2%} shorter")
    assert 0 < gap <= 0.5
    assert tried_out(replace(random_problem(0, 5, 2), micro_batches=2), [], 1.0) == ([], "")


def test_within_capacities_what_is_found_fits_or_is_not_called_proven() -> None:
    for seed in range(6):
        problem = random_problem(seed, 8, 2)
        total = sum(problem.step_bytes(o) for o in range(problem.size))
        capacity = np.full(2, 0.6 * total)
        problem = replace(problem, devices=replace(problem.devices, capacity_bytes=capacity))
        found, note = tried_out(problem, [], 1.0)
        assert not note.endswith("nothing is faster") or found[0].fits()
        try:
            answers = places(problem, None, seed, LocalSearch(seconds=0.01))
        except InfeasibleError:
            assert not any(simulated.fits() for simulated in found)
            continue
        assert all(simulate_placement(problem, answer.placement).fits() for answer in answers)
