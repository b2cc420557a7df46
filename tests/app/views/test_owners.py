"""Whose memory: the rows that a person sees, and the words above them."""

from __future__ import annotations

import pytest
from tensoropt_app.views.owners import moment, moment_words, owner_cells, total_cells, until
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
