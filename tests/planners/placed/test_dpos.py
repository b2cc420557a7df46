"""DPOS, by hand and against its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.errors import InfeasibleError
from tensoropt.placement import PlacementProblem, simulate_placement
from tensoropt.planners.placed.common.task_ranks import placed_ranks, ranks_of
from tensoropt.planners.placed.common.units import MemoryBook, units_of
from tensoropt.planners.placed.dpos import DposSchedule, _IdleSlots, place, schedule_by_ranks
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem, without_queues


def sequenced(problem: PlacementProblem, *caps: float) -> DposSchedule:
    most = np.array(caps) if caps else np.full(problem.devices.count, np.inf)
    return schedule_by_ranks(problem, MemoryBook(units_of(problem), most, counts_transients=False))


def diamond(**changes) -> PlacementProblem:
    """0 feeds 1 and 2, which feed 3."""
    return problem_of([1, 4, 2, 1], [(0, 1), (0, 2), (1, 3), (2, 3)], message_s=1.0, **changes)


UPDATE = np.full((4, 2), 3.0) * np.eye(4)[2][:, None]
SLOWER = {"forward_s": np.array([[1, 2], [4, 8], [2, 4], [1, 2]], dtype=float)}
RANKS = {
    "by hand": (False, {}, [8, 6, 4, 1], None),
    # Backward takes twice as long, and forward ends where backward starts.
    "through backward": (True, {}, [22, 20, 18, 15], [2, 11, 7, 14]),
    "the update follows backward": (True, {"update_s": UPDATE}, None, [2, 11, 7, 14]),  # 4 + max(3, 1 + 2)
    "a long update": (True, {"update_s": 3 * UPDATE}, None, [2, 11, 13, 16]),
    "of the slowest device there may be": (False, SLOWER, [14, 11, 7, 2], None),
    "of a pin": (False, {**SLOWER, "pinned": tuple((o, (0,)) for o in range(4))}, [6, 5, 3, 1], None),
    "of what is together": (False, {**SLOWER, "together": ((0, 1, 2, 3),)}, [12, 10, 6, 2], None),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks(case):
    training, changes, forward, backward = RANKS[case]
    problem = replace(diamond(training=training), **changes)
    ranks = ranks_of(problem, units_of(problem))
    assert forward is None or ranks.forward.tolist() == forward
    assert backward is None or ranks.backward.tolist() == backward
    assert ranks.path == ((0, 1, 3, 2) if case == "a long update" else (0, 1, 3))


def test_the_path_goes_to_the_largest_rank_whatever_is_sent_to_it():
    # From 0 the slow message to 2 makes the longest way, and 1 has the larger rank.
    problem = problem_of([1, 4, 2], [(0, 1), (0, 2)], message_s={(0, 1): 0.0, (0, 2): 100.0})
    ranks = ranks_of(problem, units_of(problem))
    assert ranks.forward.tolist() == [103, 4, 2]
    assert ranks.path == (0, 1)
    # From the backward of 2 the slow one leads to that of 1, and that of 0 takes longer.
    problem = problem_of([2, 1, 1], [(0, 2), (1, 2)], message_s={(0, 2): 0.0, (1, 2): 100.0}, training=True)
    ranks = ranks_of(problem, units_of(problem))
    assert ranks.backward.tolist() == [4, 2, 104]
    assert ranks.path == (1, 2, 0)


def test_ranks_of_a_placement_are_what_it_takes():
    ranks = placed_ranks(diamond(), [0, 0, 1, 0])
    assert ranks.forward.tolist() == [6, 5, 4, 1]
    assert ranks.path == (0, 1, 3)
    assert placed_ranks(diamond(), [0, 1, 1, 1]).forward.tolist() == [7, 5, 3, 1]


def test_a_diamond_by_hand():
    # 0, 1, 3 on the critical-path device; 2 there would end at 7, elsewhere at 4
    found = sequenced(diamond())
    assert found.placement.device == (0, 0, 1, 0)
    assert found.finish_s == 6.0
    assert found.placement.forward == ((0, 1, 3), (2,))
    trained = sequenced(diamond(training=True))
    # backward: 3 at 6, 1 at 8 beside it, 2 from 9 to 13, its gradient to 14; 0 at 16
    assert trained.finish_s == 18.0
    assert trained.placement.backward == ((3, 1, 0), (2,))


def test_a_short_operator_is_inserted_into_an_idle_slot():
    # 1 waits from 0 to 4 for the message from 0, on another device; 2 comes later and fits before it
    problem = problem_of([2, 5, 1], [(0, 1)], message_s=2.0, pinned=((0, (0,)), (1, (1,)), (2, (1,))))
    found = sequenced(problem)
    assert found.placement.forward == ((0,), (2, 1))
    assert found.finish_s == 9.0
    long = replace(problem, forward_s=np.array([[2.0] * 2, [5.0] * 2, [4.5] * 2]))
    assert sequenced(long).placement.forward == ((0,), (1, 2))


def test_the_critical_path_rolls_over_from_fast_to_less_fast_devices():
    chain = [(i, i + 1) for i in range(5)]
    problem = problem_of([[3, 1, 2]] * 6, chain, devices=3, message_s=0.1, stored=1.0)
    assert sequenced(problem).placement.device == (1,) * 6
    assert sequenced(problem, 2.0, 2.0, 2.0).placement.device == (1, 1, 2, 2, 0, 0)
    with pytest.raises(InfeasibleError, match="dpos finds no plan within 1 B"):
        place(problem, 1.0, 0)


def test_a_device_that_takes_more_of_the_path_is_preferred_to_an_equal_one():
    problem = problem_of([1, 1, 1], [(0, 1), (1, 2)], message_s=1.0, stored=1.0)
    assert sequenced(problem, 1.0, 3.0).placement.device == (1, 1, 1)


def test_off_the_path_a_device_without_room_is_passed_over():
    problem = diamond(stored=[3.0, 1.0, 2.0, 1.0])
    assert sequenced(problem, 7.0, 2.0).placement.device == (0, 0, 1, 0)
    assert sequenced(problem, 7.0, 1.5).placement.device == (0, 0, 0, 0)


def longest_chains(problem: PlacementProblem) -> tuple[float, float]:
    """Seconds of computing along the longest chain, and of messages along the chain with most of them."""
    computing, sending = np.zeros(problem.size), np.zeros(problem.size)
    for operator in reversed(range(problem.size)):
        after = [(r, t) for t in problem.made[operator] for r in problem.tensors[t].readers]
        computing[operator] = problem.forward_s[operator, 0] + max(
            (computing[r] for r, _ in after), default=0
        )
        sending[operator] = max(
            (sending[r] + problem.devices.transfer_s(problem.tensors[t].bytes, 0, 1) for r, t in after),
            default=0,
        )
    return float(computing.max()), float(sending.max())


@given(
    st.integers(0, 10**6),
    st.integers(2, 30),
    st.integers(2, 6),
    st.sampled_from([0.0, 0.1, 1.0, 4.0]),
    st.sampled_from([2, 5, 30]),
    st.booleans(),
)
def test_the_bound_of_theorem_1(seed, operators, devices, transfer, width, spread):
    """FastT, theorem 1: w_DPOS <= 2 w_opt + C_max, w_opt without communication; on equal devices with room.

    Stronger than that: w_opt is replaced by what no schedule beats, the longest chain and an equal share of
    all work.
    """
    problem = random_problem(seed, operators, devices, training=False, transfer=transfer, width=width)
    rng = np.random.default_rng(seed)
    if spread:
        seconds = np.exp(rng.normal(0, 2, size=operators))
        problem = replace(problem, forward_s=np.repeat(seconds[:, None], devices, axis=1))
        thinned = tuple(
            replace(t, readers=tuple(r for r in t.readers if rng.random() < 0.6)) for t in problem.tensors
        )
        problem = replace(problem, tensors=thinned)
    chain, messages = longest_chains(problem)
    least = max(chain, float(problem.forward_s[:, 0].sum()) / devices)
    found = sequenced(problem)
    assert found.finish_s <= (2 * least + messages) * (1 + 1e-9)
    assert simulate_placement(without_queues(problem), found.placement).time_s <= found.finish_s * (1 + 1e-9)


@given(st.integers(0, 10**6), st.booleans())
def test_its_estimate_of_a_training_step_is_kept_where_nothing_queues(seed, mixed):
    problem = without_queues(random_problem(seed, 20, 3, mixed=mixed))
    found = sequenced(problem)
    assert simulate_placement(problem, found.placement).time_s <= found.finish_s * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=12))
def test_idle_slots_are_the_first_that_do(tasks):
    slots, busy = _IdleSlots(0.0), []
    for ready, duration in tasks:
        found = slots.earliest(float(ready), float(duration))
        starts = [ready, *(end for _, end in busy if end >= ready)]
        fits = [s for s in starts if all(s + duration <= a or s >= b for a, b in busy)]
        assert found == min(fits)
        slots.book(found, float(duration))
        busy.append((found, found + duration))
    assert slots.tail_s == max((end for _, end in busy), default=0.0)
