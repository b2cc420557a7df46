"""A time-out ends; what is forked may hang, raise or die."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import Pipe

import pytest

from tensoropt.errors import MeasurementError
from tensoropt.ranks.worker_process import Timeout, call_in_fork


def test_patience_ends_and_is_renewed_by_signs():
    ours, theirs = Pipe()
    timeout = Timeout(2.0)
    timeout._until = time.monotonic()
    assert timeout.wait([ours]) == []
    threading.Timer(0.02, theirs.send, ["a sign"]).start()
    timeout.renew()
    assert timeout.wait([ours]) == [ours]
    assert ours.recv() == "a sign"
    long = Timeout(600.0)
    long.at_most(0.05)
    long.renew()
    assert long.wait([ours]) == []


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
