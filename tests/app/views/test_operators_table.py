"""The table of a plan's operators as the page gets it."""

from __future__ import annotations

from samples_app import exploration
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.operators import OperatorRow
from tensoropt_app.views.operators_table import bottom_rows, columns_of, table_rows

from tensoropt.report.rows import Share

UNITS = FrontierData.of(exploration()).units  # GiB and ms
KNOWN = OperatorRow("a", "m.a", 1, "batch ×2", "", "fitted", 2.0**30, 0.002, 0.0, 0.0)
UNKNOWN = OperatorRow("b", "", 1, "stage 0", "", "plan")


def test_figures_are_in_the_units_of_the_heads_and_blank_where_unknown() -> None:
    known, unknown = table_rows((KNOWN, UNKNOWN), {"a": "m.a"}, UNITS)
    assert (known["memory"], known["compute"], known["communication"]) == (1.0, 2.0, 0.0)
    assert {unknown[name] for name in ("memory", "compute", "communication", "kept")} == {None}
    assert (known["node"], unknown["node"]) == ("m.a", "")


def test_heads_have_units_and_modules_are_hidden_where_none_is_known() -> None:
    columns = [
        {"field": "module"},
        {"field": "kept", "headerName": "keeps"},
        {"field": "axes", "headerName": "split"},
    ]
    heads = columns_of(columns, (KNOWN, UNKNOWN), UNITS)
    assert [head["headerName"] for head in heads[1:]] == ["keeps, GiB", "split"]
    assert heads[0]["hide"] is False
    assert columns_of(columns, (UNKNOWN,), UNITS)[0]["hide"] is True


def test_below_the_operators_nothing_stands_for_zero() -> None:
    (row,) = bottom_rows((Share("optimizer", 0.0, 0.003, 0.0),), UNITS)
    assert row == {"group": "optimizer", "memory": None, "compute": 3.0, "communication": None}


def test_figures_are_rounded_as_elsewhere_on_the_page() -> None:
    """The browser rounds a half up, Python to the even digit: 0.3125 GiB would be told as two sizes."""
    (row,) = bottom_rows((Share("device 2", 0.3125 * 2.0**30, 0.0, 0.0),), UNITS)
    assert row["memory"] == 0.312
    assert UNITS.memory.text(0.3125 * 2.0**30) == "0.312 GiB"
