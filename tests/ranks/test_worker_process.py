"""Timeout counts waiting only; what is forked may hang, raise or die."""

from __future__ import annotations

import os
import time
from multiprocessing import Pipe

import pytest

from tensoropt.errors import MeasurementError
from tensoropt.ranks.worker_process import SPELL_S, Timeout, call_in_fork


class Jumping:
    """A clock that jumps by so much whenever it is read."""

    def __init__(self, *jumps_s: float):
        self.jumps, self.now = list(jumps_s), 0.0

    def __call__(self) -> float:
        self.now += self.jumps.pop(0) if self.jumps else 0.0
        return self.now


@pytest.mark.parametrize(("jump_s", "left_s"), [(3600.0, 60.0 - 2 * SPELL_S), (-3600.0, 60.0)])
def test_a_jump_of_the_clock_is_no_waiting(jump_s, left_s):
    ours, theirs = Pipe()
    timeout = Timeout(60.0, Jumping(0.0, jump_s))
    theirs.send("ready")
    assert timeout.wait([ours]) == [ours]
    assert timeout.left_s == left_s


def test_patience_ends_and_is_renewed_by_signs():
    ours, _theirs = Pipe()
    timeout = Timeout(0.1)
    assert timeout.wait([ours]) == []
    timeout.renew()
    assert timeout.left_s == 0.1
    timeout.at_most(0.05)
    timeout.renew()
    assert timeout.left_s == 0.05


def raising() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("function", "reason", "allowed_s"),
    [
        (raising, "ValueError: no such thing", 60.0),
        (lambda: os._exit(3), "died", 60.0),
        (lambda: time.sleep(60), "did not end", 0.2),
    ],
)
def test_a_fork_may_be_lost(function, reason, allowed_s):
    with pytest.raises(MeasurementError, match=reason):
        call_in_fork(function, allowed_s)


def test_a_fork_knows_what_this_process_knows():
    here = object()
    assert call_in_fork(lambda: id(here), 20.0) == id(here)
