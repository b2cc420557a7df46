"""The plan page as data.

Whose memory: the rows that a person sees, and the words above them.
"""

import pytest
from samples_app import GIB, exploration, placed, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.plan import device_bars, memory_bar, owner_rows, owners_words, step_bar
from tensoropt_app.views.point import point_card
from tensoropt_app.views.units import Unit, Units

from tensoropt.report.owners import PointOwners
from tensoropt.simulate.recording import MemoryAt, OwnerRow

UNITS = Units(Unit("MiB", 2.0**20), Unit("ms", 1e-3))
WEIGHT = OwnerRow("linear", "weight", "parameter", "parameters", 2.0**20, 0.0, None, "", "")
TIMES = 0.001, 0.004, "forward linear", "backward linear"
HIDDEN = OwnerRow("linear", "linear", "activation", "kept", 3 * 2.0**20, *TIMES)
MESSAGE = OwnerRow("", "messages", "to come", "transient", 1024.0, 0.0, 0.002, "a", "b")
ROWS = ([WEIGHT], [WEIGHT, HIDDEN], [WEIGHT, MESSAGE])


@pytest.fixture
def owners():
    curve = (
        MemoryAt(0.0, 2.0**20, 0, 0, 0, 0),
        MemoryAt(0.001, 2.0**20, 0, 0, 3 * 2.0**20, 0),
        MemoryAt(0.005, 2.0**20, 0, 0, 0, 1024.0),
    )
    return PointOwners(curve, ROWS.__getitem__)


def test_owners_come_by_bytes_of_the_peak(owners):
    assert owners_words(owners, UNITS) == "Peak at 1.00 ms: 4.00 MiB of 2 owners; the largest:"
    assert owner_rows(owners) == [
        ["linear", "3 MiB", "75 %", "kept activations: activation"],
        ["linear", "1 MiB", "25 %", "parameters: parameter"],
    ]


def test_what_belongs_to_no_operator_says_so():
    curve = (MemoryAt(0.0, 0, 0, 0, 0, 1024.0),)
    (row,) = owner_rows(PointOwners(curve, [[MESSAGE]].__getitem__))
    assert row == ["no single operator", "1 KiB", "100 %", "buffers in flight: to come"]


DATA = FrontierData.of(exploration())


def test_memory_is_stacked_up_to_the_device_with_headroom():
    bar = memory_bar(DATA, View(headroom=0.1), 3)  # 40 of 80 GiB
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)
    sizes = {s.kind: s.size for s in bar.segments}
    assert sizes["parameters"] == "7.65 GiB"
    assert (sizes["free"], sizes["headroom"]) == ("32.0 GiB", "8.00 GiB")
    assert bar.summary == "40.0 GiB of 80.0 GiB on each device (50 %)."


def test_a_plan_larger_than_the_device_says_by_how_much():
    data = FrontierData.of(exploration([point(100 * GIB, 1.0)]))
    assert memory_bar(data, View(), 0).summary == "100 GiB on each device, 20.0 GiB more than it has."


def test_the_step_is_compute_waiting_and_idle():
    assert [s.size for s in step_bar(DATA, 0).segments] == ["530 ms", "270 ms", "0 s"]
    parts = {"compute_s": 0.5, "exposed_s": 0.2, "hidden_s": 0.05, "idle_s": 0.1}
    bar = step_bar(FrontierData.of(exploration([point(GIB, 0.8, **parts)])), 0)
    assert "50 ms of communication overlaps compute" in bar.summary
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)


def test_a_placed_plan_has_devices_of_different_loads():
    found = placed()
    data, row = FrontierData.of(found), len(found.points)
    assert memory_bar(data, View(), row).summary == "20.0 GiB of 80.0 GiB on the fullest device (25 %)."
    wanted = [("device 0", "20.0 GiB", 1.0), ("device 1", "10.0 GiB", 0.5)]
    assert [(s.title, s.size, s.share) for s in device_bars(data, row)] == wanted
    assert device_bars(data, 0) == ()
    assert point_card(data, View(), row).facts[0].value == "m-ETF"
