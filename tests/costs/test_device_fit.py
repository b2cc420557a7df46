"""What a plan needs, how much of a device it may use, and the verdict: edges, terms, words."""

import pytest

from tensoropt.costs.device_fit import (
    _ALLOCATOR_SHARE,
    _DRIVER_SHARE,
    HEADROOM,
    MOST,
    DeviceFit,
    device_fit,
    room_bytes,
    usable_bytes,
)
from tensoropt.costs.process_memory import CONSTANTS, CONTEXT

GIB = 2.0**30


@pytest.mark.parametrize(
    ("room", "verdict"),
    [(MOST, "fits"), (MOST - 1e-6, "tight"), (1.0, "tight"), (1.0 - 1e-6, "does not fit")],
)
def test_a_plan_is_tight_where_the_error_of_predictions_decides(room, verdict):
    of = DeviceFit(9 * GIB, {"context": GIB}, room * 10 * GIB)
    assert of.verdict == verdict
    assert of.words == f"10 GiB (tensors 9.00, process 1.00): {verdict}"


def test_tensors_of_cpu_ranks_are_certain():
    for room, verdict in ((10.0, "fits"), (9.999, "does not fit")):
        of = device_fit(10.0, {CONTEXT: 5.0}, 100.0, room, estimated=False)
        assert (of.verdict, of.words) == (verdict, f"10 B: {verdict}")


def test_need_is_tensors_process_driver_and_allocator_whatever_the_budget():
    terms = {CONTEXT: 5.0, "segments": 22.0, "communicators": 0.0, CONSTANTS: 3.0}
    for room in (50.0, 200.0):
        of = device_fit(90.0, terms, 200.0, room, estimated=True)
        assert of.process == {
            CONTEXT: 5.0, "driver": _DRIVER_SHARE * 200.0, "allocator": _ALLOCATOR_SHARE * 93.0
        }  # fmt: skip
        assert of.needed_bytes == round(93.0 + 5.0 + _DRIVER_SHARE * 200.0 + _ALLOCATOR_SHARE * 93.0)
        assert of.to_data()["process_bytes"] == {CONTEXT: 5, "driver": 2, "allocator": 2}


@pytest.mark.parametrize(
    ("budget", "headroom", "limit"),
    [
        (None, None, 80 * (1 - HEADROOM)),
        (None, 0.25, 60),
        (24, None, 24),
        (78, None, 78),  # a budget may use the usual headroom
        (100, None, 80),  # and is answered for the card
        (100, 0.25, 60),
        (24, 0.25, 24),
    ],
)
def test_a_limit_is_a_budget_or_what_headroom_leaves_of_the_device(budget, headroom, limit):
    assert usable_bytes(80, budget, headroom) == pytest.approx(limit)


def test_the_verdict_is_about_the_budget_but_no_more_than_the_device():
    assert [room_bytes(80, budget) for budget in (None, 24, 100)] == [80, 24, 80]
