"""m-TOPO, by hand."""

from __future__ import annotations

import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.planners.placed.m_topo import place
from tests.planners.placed.hand import problem_of

CHAIN = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def devices_of(**changes) -> tuple[int, ...]:
    return place(problem_of([1.0] * 6, CHAIN, **changes), None, 0).placement.device


def test_each_device_takes_its_share_and_the_largest_operator():
    # 12 over 3 devices and 2 for the largest: 6 each
    assert devices_of(devices=3, stored=2.0) == (0, 0, 0, 1, 1, 1)
    # 21 / 3 + 6 = 13: 1+2+3+4 = 10, then 5+6 = 11
    assert devices_of(devices=3, stored=[1, 2, 3, 4, 5, 6]) == (0, 0, 0, 0, 1, 1)


def test_a_smaller_capacity_is_the_cap():
    assert devices_of(devices=3, stored=2.0, capacity=4.0) == (0, 0, 1, 1, 2, 2)
    assert devices_of(devices=3, stored=2.0, capacity=[2.0, 8.0, 8.0]) == (0, 1, 1, 1, 2, 2)


def test_what_belongs_together_is_booked_with_its_first():
    # 12 / 3 + 6 = 10: the three, then 1 and 2
    assert devices_of(devices=3, stored=2.0, together=((0, 4, 5),)) == (0, 0, 0, 1, 0, 0)


def test_pinned_operators_do_not_move_the_cut():
    assert devices_of(devices=3, stored=2.0, pinned=((1, (2,)),)) == (0, 2, 0, 0, 1, 1)


def test_it_refuses_when_the_last_device_is_full():
    with pytest.raises(
        InfeasibleError, match=r"m_topo finds no plan within 3 B: no device has room for .* op3"
    ):
        devices_of(devices=3, stored=2.0, capacity=3.0)
