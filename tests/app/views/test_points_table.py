"""The table of points: columns, what the browser gets of them, and its filters."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from samples_app import GIB, exploration, long_exploration, point, space
from tensoropt_app.state import View
from tensoropt_app.views.frontier import FrontierData
from tensoropt_app.views.points_table import packed, table_columns, table_rows

from tensoropt.exploration.notable import NOTABLE

MARKS = (point(15 * GIB, 1.2, planner="zero"), point(16 * GIB, 1.3, planner="megatron", space=1))
POINTS = tuple(point((10 + 10 * i) * GIB, 1.0 - 0.1 * i, space=i % 2) for i in range(6))
DATA = FrontierData.of(exploration(POINTS, (space((8,)), space((2, 4))), others=MARKS))


def unpacked(column: dict[str, Any]) -> list[Any]:
    """As ``assets/points.js`` does."""
    if "words" in column:
        return [column["words"][place] for place in column["at"]]
    values = np.frombuffer(base64.b64decode(column["floats"]), "<f4").tolist()
    return [None if np.isnan(v) else v for v in values]


def test_what_the_browser_gets_is_the_table() -> None:
    columns = table_columns(DATA, View())
    found, rows = packed(columns), table_rows(columns)
    assert found.keys() == rows[0].keys()
    for name, column in found.items():
        shown = [None if v is None else v if isinstance(v, str) else float(f"{v:.4g}")
                 for v in unpacked(column)]  # fmt: skip
        assert shown == [row[name] for row in rows]
    assert rows[6]["point"] is rows[0]["cost"] is None


def test_thousands_of_rows_are_small() -> None:
    data = FrontierData.of(long_exploration(20_000))
    found = packed(table_columns(data, View()))
    assert len(unpacked(found["memory"])) == 20_000
    assert sum(len(str(column)) for column in found.values()) < 100 * 20_000


def test_a_row_says_what_it_is_and_which_planner_found_it() -> None:
    columns = table_columns(DATA, View())
    assert columns["is"][0].startswith("leanest")
    assert columns["is"][-2:] == ["by ZeRO", "by Megatron"]
    long = table_columns(FrontierData.of(long_exploration(500)), View())
    few = np.flatnonzero(long["few"])
    assert 3 <= len(few) <= NOTABLE
    # From the leanest to one that differs by less than 1 % from the last.
    assert few[0] == 0
    assert few[-1] >= 498
    assert {row for row, words in enumerate(long["is"]) if words} <= set(few.tolist())


def test_rows_can_be_chosen() -> None:
    columns = table_columns(DATA, View())
    assert [row["needs"] for row in table_rows(columns, (0, 2))] == [10, 30]
