"""m-TOPO, by hand."""

from __future__ import annotations

import pytest

from tensoropt.errors import InfeasibleError
from tensoropt.planners.placed.m_topo import place
from tests.planners.placed.hand import problem_of

CHAIN = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def devices_of(**changes) -> tuple[int, ...]:
    settings = {"devices": 3, "stored": 2.0, **changes}
    return place(problem_of([1.0] * 6, CHAIN, **settings), None, 0).placement.device


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        # A share and the largest operator: 12 over 3 devices and 2, 6 each; 21 / 3 + 6 = 13, 10 and 11.
        ({}, (0, 0, 0, 1, 1, 1)),
        ({"stored": [1, 2, 3, 4, 5, 6]}, (0, 0, 0, 0, 1, 1)),
        # A smaller capacity is the cap.
        ({"capacity": 4.0}, (0, 0, 1, 1, 2, 2)),
        ({"capacity": [2.0, 8.0, 8.0]}, (0, 1, 1, 1, 2, 2)),
        # What belongs together is booked with its first; 12 / 3 + 6 = 10: the three, then 1 and 2.
        ({"together": ((0, 4, 5),)}, (0, 0, 0, 1, 0, 0)),
        # Pinned operators do not move the cut.
        ({"pinned": ((1, (2,)),)}, (0, 2, 0, 0, 1, 1)),
    ],
)
def test_where_the_cuts_are(changes, devices):
    assert devices_of(**changes) == devices


def test_it_refuses_when_the_last_device_is_full():
    words = r"m_topo finds no plan within 3 B: no device has room for .* op3"
    with pytest.raises(InfeasibleError, match=words):
        devices_of(capacity=3.0)
