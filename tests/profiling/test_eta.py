"""How long work still takes, corrected by how long it took so far."""

from __future__ import annotations

import pytest

from tensoropt.profiling.eta import LEAST_LEFT, START_S, Remaining, without_eta


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_said_before_something_is_announced(clock):
    assert Remaining(clock).before("mesh 8") == "mesh 8"


def test_what_is_announced_adds_up_and_runs_down(clock):
    left = Remaining(clock)
    left.expect("tables", 6.0)
    left.expect("searches", 4.0)
    assert left.before("mesh 8") == "about 10 s left, mesh 8"
    clock.now += 3
    assert left.left_s == pytest.approx(7.0)
    clock.now += 100
    assert left.left_s == pytest.approx(LEAST_LEFT * 10)


def test_what_is_done_corrects_the_pace(clock):
    """Four seconds took twelve: of the rest as much more as START_S at the expected pace leaves."""
    left = Remaining(clock)
    left.expect("tables", 4.0)
    left.expect("searches", 10.0)
    clock.now += 12
    left.expect("tables", 0.0)
    assert left.left_s == pytest.approx(10 * (START_S + 12) / (START_S + 4))


def test_what_turns_out_to_be_more_is_no_sign_of_a_slow_pace(clock):
    left = Remaining(clock)
    left.expect("searches", 2.0)
    clock.now += 50
    left.expect("searches", 8.0)
    assert left.left_s == pytest.approx(8.0)


@pytest.mark.parametrize("seconds", [0.2, 14.0, 700.0, 90000.0])
def test_the_remaining_time_is_taken_out_of_a_report(clock, seconds):
    left = Remaining(clock)
    left.expect("search", seconds)
    assert left.before("mesh 8, 1 micro-batches") != "mesh 8, 1 micro-batches"
    assert without_eta(left.before("mesh 8, 1 micro-batches")) == "mesh 8, 1 micro-batches"
    assert without_eta(left.before("")) == ""
    assert without_eta("300 of 8243 points remain") == "300 of 8243 points remain"
