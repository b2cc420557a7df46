"""The search after an exact planner's program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.placement import Placement, simulate_placement
from tensoropt.planners.placed import netsplit
from tensoropt.planners.placed.common.starting import heuristics
from tensoropt.planners.placed.exact.neighbourhood import search
from tensoropt.planners.placed.exact.rounds import KnownPlacement, KnownPlacements
from tensoropt.planners.placed.exact.rules import Rules, obeys
from tensoropt.planners.placed.netsplit import NetSplit
from tests.planners.placed.exhaustive import best_play
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem


def begun(problem) -> list[KnownPlacement]:
    return [KnownPlacement(name, simulate_placement(problem, p)) for name, p in heuristics(problem, 0)]


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_it_finds_the_optimum_of_small_problems(seed):
    problem = random_problem(seed, 5, 2)
    known = KnownPlacements(problem)
    starts = begun(problem)
    search(known, starts, 0, 1.0)
    best = best_play(problem).time_s
    at_start = min(start.simulated.time_s for start in starts)
    # Nothing is found where a heuristic has it already: that would not be the search's own.
    assert known.best_s == pytest.approx(best) or at_start == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_what_it_finds_is_faster_than_where_it_began(seed):
    problem = random_problem(seed, 40, 3)
    starts = {start.source: start.simulated.time_s for start in begun(problem)}
    known = KnownPlacements(problem)
    done = search(known, begun(problem), seed, 0.2)
    assert done.chains > len(starts)
    assert known.fastest
    for found in known.fastest:
        assert found.simulated.time_s < starts[found.source.removeprefix("search from ")]


def test_an_optimal_start_is_not_its_answer():
    chain = problem_of([1.0] * 6, [(i, i + 1) for i in range(5)], message_s=1.0, training=True)
    known = KnownPlacements(chain)
    alone = simulate_placement(chain, Placement.in_order([0] * 6, 2))
    search(known, [KnownPlacement("device 0 alone", alone)], 0, 0.1)
    assert known.best is None


def test_it_keeps_capacity_and_alpha():
    problem = random_problem(2, 30, 3)
    total = sum(problem.step_bytes(o) for o in range(problem.size))
    devices = replace(problem.devices, capacity_bytes=np.full(3, 0.6 * total))
    tight, rules = replace(problem, devices=devices), Rules(alpha=4.0)
    known = KnownPlacements(tight, rules)
    search(known, begun(tight), 0, 0.2)
    assert known.fastest
    for found in known.fastest:
        assert found.simulated.fits()
        assert obeys(tight, found.simulated.placement.device, rules)


@pytest.mark.slow  # a search by the clock gives another answer on a busy machine
def test_a_large_graph_gets_the_searchs_answer():
    """More operators than the program takes: its blocks alone are slower."""
    problem = random_problem(3, 60, 3)
    settings = NetSplit(seconds=0.5, search_seconds=0.5, most_blocks=10)
    answer = netsplit.place(problem, None, 0, settings)
    assert answer == netsplit.place(problem, None, 0, settings)
    assert answer.notes[0].startswith("found by search from ")
    assert any(note.startswith("neighbourhood search: ") for note in answer.notes)
    assert any(note.startswith("gap ") and "proven" in note for note in answer.notes)
    mine = simulate_placement(problem, answer.placement).time_s
    assert mine < min(simulate_placement(problem, p).time_s for _, p in heuristics(problem, 0))
