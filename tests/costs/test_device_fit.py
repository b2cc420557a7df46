"""The verdict on a device: its two edges, its terms, its words."""

from __future__ import annotations

import pytest

from tensoropt.costs.device_fit import ALLOCATOR_SHARE, DRIVER_SHARE, LEAST, MOST, DeviceFit, device_fit
from tensoropt.costs.process_memory import CONSTANTS, CONTEXT

GIB = 2.0**30
NOTHING_REPLAYED: dict[str, float] = {}


@pytest.mark.parametrize(
    ("room", "verdict"),
    [(MOST, "fits"), (MOST - 1e-6, "tight"), (LEAST, "tight"), (LEAST - 1e-6, "does not fit")],
)
def test_a_plan_is_tight_where_the_error_of_predictions_decides(room, verdict):
    of = DeviceFit(9 * GIB, {"context": GIB}, room * 10 * GIB)
    assert of.verdict == verdict
    assert of.verb == {"fits": "Fits", "tight": "Just fits", "does not fit": "Tensors alone fit"}[verdict]
    counted = DeviceFit(9 * GIB, {"context": GIB}, room * 10 * GIB, counted=True).verb
    assert counted == (of.verb if verdict != "does not fit" else "All but driver and allocator fit")
    assert of.words == f"10 GiB (tensors 9.00, process 1.00): {verdict}"


def test_tensors_of_cpu_ranks_are_certain():
    for room, verdict in ((10.0, "fits"), (9.999, "does not fit")):
        of = device_fit(10.0, {CONTEXT: 5.0}, NOTHING_REPLAYED, room, estimated=False)
        assert (of.verdict, of.words) == (verdict, f"10 B: {verdict}")


def test_what_the_allocator_takes_beside_requests_replaces_the_guess_of_its_ends():
    terms = {CONTEXT: 5.0, "segments": 22.0, "communicators": 0.0, CONSTANTS: 3.0}
    peaks = {"requested": 100.0, "allocated": 101.0, "reserved": 140.0, "reserved_expandable": 110.0}
    replayed = device_fit(90.0, terms, peaks, 200.0, estimated=True)
    driver = DRIVER_SHARE * 200.0
    assert replayed.process == {CONTEXT: 5.0, "driver": driver, "allocator": 10.0}
    assert replayed.needed_bytes == 93.0 + 5.0 + driver + 10.0
    guessed = device_fit(90.0, terms, NOTHING_REPLAYED, 200.0, estimated=True)
    assert guessed.process == {CONTEXT: 5.0, "driver": driver, "allocator": ALLOCATOR_SHARE * 93.0}
    assert guessed.to_data()["process_bytes"] == {CONTEXT: 5, "driver": 2, "allocator": 2}
