"""m-SCT: its linear program, and devices that stay awake."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.placed import m_etf, m_sct
from tensoropt.planners.placed.common.earliest import EarliestFirst
from tensoropt.planners.placed.common.units import MemoryBook, units_of
from tensoropt.planners.placed.m_sct import _favourites, place
from tests.planners.placed.hand import problem_of
from tests.planners.placed.placements import random_problem


def favourites_of(problem) -> list[int]:
    return _favourites(problem, units_of(problem))


def awake(problem, favourite, caps=float("inf")):
    caps = np.full(problem.devices.count, caps)
    memory = MemoryBook(units_of(problem), caps, counts_transients=False)
    schedule = EarliestFirst(problem, memory, favourite)
    schedule.placement()
    return schedule


@pytest.mark.parametrize(
    ("seconds", "messages", "favourites"),
    [
        # 0 feeds 1 (5 s) and 2 (1 s): without a message to 1 the span is 6, otherwise 7.
        ([1, 5, 1], {(0, 1): 1.0, (0, 2): 1.0}, [1, -1, -1]),
        # A child is the favourite of one parent: 2 reads 0 (3 s) and 1 (1 s), and waits longer for 0.
        ([3, 1, 1], {(0, 2): 1.0, (1, 2): 1.0}, [2, -1, -1]),
        # Where nothing waits the longest messages are saved.
        ([1, 1, 1, 9], {(0, 1): 1.0, (0, 2): 2.0}, [2, -1, -1, -1]),
    ],
)
def test_the_longest_way_is_followed(seconds, messages, favourites):
    assert favourites_of(problem_of(seconds, list(messages), message_s=messages)) == favourites


@given(st.integers(0, 10**6))
def test_favourites_match_one_to_one_along_edges(seed):
    problem = random_problem(seed, 25, 3)
    found = favourites_of(problem)
    edges = {(t.producer, r) for t in problem.tensors for r in t.readers}
    chosen = [(i, j) for i, j in enumerate(found) if j >= 0]
    assert set(chosen) <= edges
    assert len({j for _, j in chosen}) == len(chosen)


@given(st.integers(0, 10**6), st.booleans())
def test_without_communication_it_is_a_list_schedule(seed, training):
    """Nothing is worth waiting for: favourites change nothing, and ETF without messages is Graham's list."""
    problem = random_problem(seed, 25, 3, training=training)
    silent = replace(problem.devices, latency_s=np.zeros((3, 3)), seconds_per_byte=np.zeros((3, 3)))
    problem = replace(problem, devices=silent)
    assert place(problem, None, 0).placement == m_etf.place(problem, None, 0).placement
    some = [next((r for t in made for r in problem.tensors[t].readers), -1) for made in problem.made]
    first, second = (awake(problem, favourite) for favourite in (some, [-1] * problem.size))
    assert (first.device, first.starts) == (second.device, second.starts)


def fork(first=5.0, second=1.0):
    """0 (1 s) and 1 (4 s) feed 2 by messages of so many seconds; 0 feeds 3, too."""
    messages = {(0, 2): first, (1, 2): second, (0, 3): 1.0}
    return problem_of([1, 4, 1, 2], list(messages), message_s=messages)


def test_an_awake_device_takes_only_urgent_operators():
    # 3 could start at 1 beside 0; but 0's device waits for 2 until 3's input could be anywhere, at 2.
    assert awake(fork(), [-1] * 4).starts == [0.0, 0.0, 5.0, 1.0]
    found = awake(fork(), [2, -1, -1, -1])
    assert found.device[:2] == [0, 1]
    assert (found.device[3], found.starts[3]) == (0, 2.0)


def test_a_device_without_room_for_the_favourite_is_free():
    problem = replace(fork(), parameter_bytes=np.array([4.0, 1.0, 4.0, 1.0]))
    found = awake(problem, [2, -1, -1, -1], caps=6.0)
    assert (found.device[3], found.starts[3]) == (0, 1.0)
    assert found.device[2] == 1


def test_a_device_whose_favourite_starts_earlier_elsewhere_is_free():
    # once 1 is scheduled 2 can start at 4 beside it and at 7 beside 0
    found = awake(fork(1.0, 3.0), [2, -1, -1, -1])
    assert found.device[2] == found.device[1]
    assert found.starts[3] == 1.0


def test_a_program_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(m_sct, "_SECONDS", 0.0)
    with pytest.raises(UnsuitableError, match="use m_etf"):
        favourites_of(random_problem(0, 400, 3))
