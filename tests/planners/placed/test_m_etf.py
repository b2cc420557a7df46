"""m-ETF against the obvious implementation, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.planners.placed.common.earliest import EarliestFirst
from tensoropt.planners.placed.common.units import MemoryBook, units_of
from tensoropt.planners.placed.m_etf import place
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import all_bytes, random_problem, without_queues


def naive_etf(problem: PlacementProblem, caps: np.ndarray) -> tuple[list[int], list[float]] | None:
    """ETF with queues and caps, everything worked out again for every choice."""
    count, devices = problem.devices.count, problem.devices
    device: dict[int, int] = {}
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    lane: dict[str, float] = {}
    sent: dict[tuple[int, int], float] = {}
    free, used = [0.0] * count, [0.0] * count

    def receive(operator, target, lane, sent) -> float:
        latest = 0.0
        for made, t in sorted((end[problem.tensors[t].producer], t) for t in problem.read[operator]):
            home = device[problem.tensors[t].producer]
            if home == target:
                arrival = made
            elif (t, target) in sent:
                arrival = sent[t, target]
            else:
                lanes = devices.lanes_of(home, target)
                arrival = max([made, *(lane.get(name, 0.0) for name in lanes)])
                arrival += devices.transfer_s(problem.tensors[t].bytes, home, target)
                lane.update(dict.fromkeys(lanes, arrival))
                sent[t, target] = arrival
            latest = max(latest, arrival)
        return latest

    while len(device) < problem.size:
        best = None
        for o in range(problem.size):
            if o in device or any(problem.tensors[t].producer not in device for t in problem.read[o]):
                continue
            for d in range(count):
                if used[d] + problem.step_bytes(o) > caps[d]:
                    continue
                at = max(receive(o, d, dict(lane), dict(sent)), free[d])
                if best is None or (at, o, d) < best:
                    best = (at, o, d)
        if best is None:
            return None
        at, o, d = best
        receive(o, d, lane, sent)
        device[o], start[o], end[o] = d, at, at + float(problem.forward_s[o, d])
        free[d] = end[o]
        used[d] += problem.step_bytes(o)
    return [device[o] for o in range(problem.size)], [start[o] for o in range(problem.size)]


def scheduled(problem: PlacementProblem, caps: np.ndarray) -> EarliestFirst:
    schedule = EarliestFirst(problem, MemoryBook(units_of(problem), caps, counts_transients=False))
    schedule.placement()
    return schedule


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.1, 1.0, 5.0]), st.booleans())
def test_it_is_the_obvious_one(seed, mixed, transfer, ports):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed, int(rng.integers(2, 14)), int(rng.integers(1, 5)), mixed=mixed, transfer=transfer, width=6
    )
    count = problem.devices.count
    if ports:
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        lanes = {(i, j): (f"{i} out", f"{j} in") for i, j in pairs}
        problem = replace(problem, devices=replace(problem.devices, lanes=lanes))
    for caps in (np.full(count, np.inf), np.full(count, 1.2 * all_bytes(problem) / count)):
        expected = naive_etf(problem, caps)
        if expected is not None:
            found = scheduled(problem, caps)
            assert (found.device, found.starts) == expected


def test_a_full_device_is_passed_over():
    problem = problem_of([1, 1, 1], [(0, 1), (1, 2)], message_s=1.0, stored=2.0)
    assert scheduled(problem, np.array([4.0, 4.0])).device == [0, 0, 1]
    words = "m_etf finds no plan within 3 B: no device has room for the 2 B of op2"
    with pytest.raises(InfeasibleError, match=words):
        place(problem, 3.0, 0)


def test_what_belongs_together_follows_its_first():
    problem = problem_of([1, 1, 1], [], together=((0, 2),))
    assert scheduled(problem, np.full(2, np.inf)).device == [0, 1, 0]


@given(st.integers(0, 10**6))
def test_the_simulation_needs_no_longer_where_nothing_queues(seed):
    """Orders are enforced and durations the same, so that only queues could delay the simulated step."""
    problem = without_queues(random_problem(seed, 20, 3, training=False))
    found = scheduled(problem, np.full(3, np.inf))
    simulated = simulate_placement(problem, place(problem, None, 0).placement)
    ends = (start + problem.forward_s[o, found.device[o]] for o, start in enumerate(found.starts))
    assert simulated.time_s <= max(ends) * (1 + 1e-12)
