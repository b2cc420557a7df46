"""The search around the heuristics' placements."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError
from tensoropt.placement import simulate_placement
from tensoropt.placement.flat import FlatProblem, step_s
from tensoropt.planners.placed.common.annealing import MoveTables, Shelf, State, anneal
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.common.units import units_of
from tensoropt.planners.placed.local_search import LocalSearch
from tests.planners.placed.exhaustive import best_play
from tests.planners.placed.placements import places, random_problem
from tests.planners.placed.test_methods import constrained

LITTLE = LocalSearch(seconds=0.01)


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.4, 0.7, 1.5, float("inf")]))
@settings(max_examples=10)
def test_answers_fit_and_none_beats_another(seed, training, capacity):
    problem = constrained(seed, training, capacity)
    try:
        answers = places(problem, None, seed, LITTLE)
    except InfeasibleError:
        with pytest.raises(InfeasibleError, match=r"^local_search finds no plan within"):
            places(problem, None, seed, LITTLE)
        assert capacity < 1.5
        return
    simulated = [
        simulate_placement(problem, answer.placement) for answer in answers
    ]  # checks pins and groups
    assert all(s.fits() for s in simulated)
    assert [s.memory_bytes for s in simulated] == sorted(s.memory_bytes for s in simulated)
    assert [s.time_s for s in simulated] == sorted((s.time_s for s in simulated), reverse=True)
    assert places(problem, None, seed, LITTLE) == answers


@pytest.mark.parametrize("seed", range(2))
def test_no_heuristic_is_better_within_its_memory(seed):
    problem = random_problem(seed, 40, 3, mixed=True)
    simulated = [simulate_placement(problem, a.placement) for a in places(problem, None, 0, LITTLE)]
    for placement in heuristics(problem, 0):
        other = simulate_placement(problem, placement)
        within = [s.time_s for s in simulated if s.memory_bytes <= other.memory_bytes]
        assert min(within) <= other.time_s


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_placement_of_small_graphs(seed):
    problem = random_problem(seed, 5, 2, training=seed % 2 == 0)
    best = best_play(problem)
    assert best is not None
    fastest = places(problem, None, 0, LITTLE)[-1].placement
    assert simulate_placement(problem, fastest).time_s == pytest.approx(best.time_s, rel=1e-12)


def test_a_limit_that_sums_keep_and_the_simulator_does_not():
    """The caps are lowered until what is found fits when simulated."""
    problem = random_problem(5, 30, 2)
    free = [simulate_placement(problem, a.placement) for a in places(problem, None, 0, LITTLE)]
    limit = free[0].memory_bytes * 0.995
    answers = places(problem, limit, 0, LITTLE)
    assert all(simulate_placement(problem, a.placement).memory_bytes <= limit for a in answers)
    with pytest.raises(InfeasibleError, match="the nearest placement needs"):
        places(problem, limit / 3, 0, LITTLE)


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=20)
def test_a_chain_ends_where_its_arrays_say(seed, training):
    problem = replace(random_problem(seed, 15, 3, training=training), micro_batches=1 + seed % 2)
    tables, flat = MoveTables.of(problem, units_of(problem)), FlatProblem.of(problem)
    start = State.of(simulate_placement(problem, next(heuristics(problem, 0))))
    cap = np.full(3, 0.6 * tables.all_bytes)
    shelf = Shelf.empty(np.linspace(0.3, 1, 8) * tables.all_bytes + 1, problem.size)
    seconds = anneal(flat, tables, start, cap, 300, seed, shelf)
    assert seconds == step_s(flat, start.placement(problem))
    for number in shelf.unbeaten():
        state = shelf.state(number)
        assert shelf.seconds[number] == simulate_placement(problem, state.placement(problem)).time_s
        assert state.booked(tables, 3).max() <= min(shelf.edges[number], cap[0])


def test_what_is_booked_is_what_lasts(monkeypatch):
    """On one device, as the planners' sums; on several, a tensor counts where its backward needs it."""
    problem = random_problem(7, 12, 2)
    tables = MoveTables.of(problem, units_of(problem))
    together = State(np.zeros(12, np.int64), np.arange(12), np.arange(12)[::-1].copy())
    assert together.booked(tables, 2).tolist() == [tables.all_bytes, 0.0]
    assert tables.all_bytes == sum(problem.step_bytes(o) for o in range(12))
    device = np.arange(12) % 2
    apart = together._replace(device=device)
    expected = np.bincount(device, weights=problem.stored_bytes + problem.kept_bytes, minlength=2)
    for tensor in problem.tensors:
        for d in {int(device[o]) for o in tensor.kept_by}:
            expected[d] += tensor.bytes
    assert apart.booked(tables, 2) == pytest.approx(expected)
