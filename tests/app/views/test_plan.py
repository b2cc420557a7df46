"""The plan page as data.

Whose memory: the rows that a person sees, and the words above them.
"""

from __future__ import annotations

import pytest
from samples_app import GIB, exploration, placed, point
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.plan import (
    device_bars,
    memory_bar,
    moment,
    moment_words,
    owner_cells,
    step_bar,
    total_cells,
    until,
)
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
def owners() -> PointOwners:
    curve = (
        MemoryAt(0.0, 2.0**20, 0, 0, 0, 0),
        MemoryAt(0.001, 2.0**20, 0, 0, 3 * 2.0**20, 0),
        MemoryAt(0.005, 2.0**20, 0, 0, 0, 1024.0),
    )
    return PointOwners(curve, ROWS.__getitem__)


def test_the_peak_comes_first_and_steps_stay_within_the_step(owners):
    assert moment(owners, None).number == 1
    assert moment(owners, 2).number == 2
    assert moment(owners, 2, 1).number == 2
    assert moment(owners, 0, -1).number == 0
    assert moment(owners, None, -1).number == 0
    # A page that is older than the plan asks for what is not there.
    assert moment(owners, 99).number == 1


def test_rows_come_by_bytes_and_the_total_is_the_height_of_the_curve(owners):
    at = moment(owners, None)
    cells = owner_cells(at, UNITS)
    assert [(c["operator"], c["size"], c["share"]) for c in cells] == [
        ("linear", "3 MiB", "75 %"),
        ("linear", "1 MiB", "25 %"),
    ]
    assert [(c["tensor"], c["kind"]) for c in cells] == [("", "kept activations"), ("weight", "parameters")]
    (total,) = total_cells(at, UNITS)
    assert total["bytes"] == at.at.total
    assert total["size"] == "4.00 MiB"


def test_what_ends_says_when_and_what_stays_says_so():
    assert until(WEIGHT, UNITS) == "stays"
    assert until(HIDDEN, UNITS) == "4.00 ms: backward linear"


def test_what_belongs_to_no_operator_leads_to_none(owners):
    cells = owner_cells(moment(owners, 2), UNITS)
    assert (cells[1]["group"], cells[1]["operator"], cells[1]["tensor"]) == (
        "",
        "no single operator",
        "messages",
    )


def test_words_say_when_how_much_and_of_how_many(owners):
    assert moment_words(owners, moment(owners, None), UNITS) == "Peak, at 1.00 ms: 4.00 MiB, 2 owners"
    assert moment_words(owners, moment(owners, 0), UNITS) == "At 0 ms: 1.00 MiB, 1 owner"


DATA = FrontierData.of(exploration())


def test_memory_is_stacked_up_to_the_device_with_headroom() -> None:
    bar = memory_bar(DATA, View(headroom=0.1), 3)  # 40 of 80 GiB
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)
    sizes = {s.kind: s.size for s in bar.segments}
    assert sizes["parameters"] == "7.65 GiB"
    assert (sizes["free"], sizes["headroom"]) == ("32.0 GiB", "8.00 GiB")
    assert bar.summary == "40.0 GiB of 80.0 GiB on each device (50 %)."


def test_a_plan_larger_than_the_device_says_by_how_much() -> None:
    data = FrontierData.of(exploration([point(100 * GIB, 1.0)]))
    assert memory_bar(data, View(), 0).summary == "100 GiB on each device, 20.0 GiB more than it has."


def test_the_step_is_compute_waiting_and_idle() -> None:
    assert [s.size for s in step_bar(DATA, 0).segments] == ["533 ms", "267 ms", "0 ms"]
    parts = {"compute_s": 0.5, "exposed_s": 0.2, "hidden_s": 0.05, "idle_s": 0.1}
    bar = step_bar(FrontierData.of(exploration([point(GIB, 0.8, **parts)])), 0)
    assert "50.0 ms of communication hide behind compute" in bar.summary
    assert sum(s.share for s in bar.segments) == pytest.approx(1.0)


def test_a_placed_plan_has_devices_of_different_loads() -> None:
    found = placed()
    data, row = FrontierData.of(found), len(found.points)
    assert memory_bar(data, View(), row).summary == "20.0 GiB of 80.0 GiB on the fullest device (25 %)."
    assert [(s.title, s.size, s.share) for s in device_bars(data, row)] == [
        ("device 0", "20.0 GiB", 1.0), ("device 1", "10.0 GiB", 0.5)
    ]  # fmt: skip
    assert device_bars(data, 0) == ()
    assert point_card(data, View(), row).facts[0].value == "m-ETF"
