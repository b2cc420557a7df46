"""Budgets from ``--memory`` and ``--headroom`` together."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tensoropt.cli.arguments import budget
from tensoropt.errors import TensorOptError

DEVICE = 80 * 2**30


@pytest.mark.parametrize(
    ("memory", "headroom", "bytes_"),
    [
        (None, None, None),
        ("24GiB", None, 24 * 2**30),
        (None, "25%", 60 * 2**30),
        (None, "2GiB", 78 * 2**30),
        ("70GiB", "25%", 60 * 2**30),  # of the device, not of the budget
        ("24GiB", "25%", 24 * 2**30),
        (None, "0%", DEVICE),
    ],
)
def test_a_budget_leaves_the_headroom_of_the_device(memory, headroom, bytes_):
    assert budget(Namespace(memory=memory, headroom=headroom), lambda: DEVICE) == bytes_


def test_the_device_is_looked_at_only_for_headroom():
    def unknown() -> float:
        raise AssertionError

    assert budget(Namespace(memory="1GiB", headroom=None), unknown) == 2**30


@pytest.mark.parametrize("headroom", ["much", "%", "5%%", "-5%", "100%", "81GiB"])
def test_headroom_that_means_nothing_is_refused(headroom):
    with pytest.raises(TensorOptError, match=r"--headroom|size"):
        budget(Namespace(memory=None, headroom=headroom), lambda: DEVICE)
