"""What is recorded of a step whose host is slower than its device."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.step_schedule import Moment


def recorded(*moments: tuple[str, float, float], micro: int = 1) -> list[tuple[float, float]]:
    """(start, end) of each moment's work; each given as (phase, seconds on the device, seconds of the
    host)."""
    recorder, now_s = StepRecorder(), 0.0
    for phase, device_s, host_s in moments:
        recorder.begin(Moment(phase, "compute", "g"), now_s, host_s)
        recorder.work(now_s, now_s + device_s)
        now_s += device_s
    if micro > 1:
        recorder.repeat(micro, now_s)
    recorder.finish(now_s * micro)
    recorder.wait_for_host(now_s * micro)
    return [(event.start_s, event.end_s) for event in recorder.events]


def test_the_device_waits_for_what_is_not_issued():
    """Issuing takes 8 s, the device 6. Were the queue empty as the step begins, backward would come at 6 s
    and end at 10. As step follows step, the host is 2 s ahead, and the step takes the host's 8."""
    found = recorded(("forward", 1, 3), ("forward", 1, 3), ("backward", 2, 1), ("backward", 2, 1))
    assert found == [(0, 1), (1, 2), (4, 6), (6, 8)]


def test_a_device_that_is_slower_never_waits():
    """Forward is issued more slowly than it is run, but the last step's backward was issued long before it
    was over."""
    moments: Sequence[tuple[str, float, float]] = [("forward", 1, 2), ("backward", 5, 1), ("backward", 5, 1)]
    assert recorded(*moments) == [(0, 1), (1, 6), (6, 11)]


def test_a_host_that_is_always_slower_is_waited_for_each_time():
    assert recorded(("forward", 1, 3), ("backward", 2, 3)) == [(0, 1), (3, 5)]


def test_micro_batches_are_issued_one_after_the_other():
    found = recorded(("forward", 1, 3), ("backward", 2, 3), micro=2)
    assert found == [(0, 1), (3, 5), (6, 7), (9, 11)]
