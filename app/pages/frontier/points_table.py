"""The table of points on the frontier page.

The server sends columns when figures of the table change (another exploration, a price); the browser alone
handles filters, the order and the selected row, and whether all points are shown or the notable ones.
"""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import html, no_update

from tensoropt.plan.figures import BYTES, LISTED, SECONDS

from ...context import Context
from ...figures.frontier import NOTHING
from ...state import View
from ...views.frontier import FrontierData, rate_arrays
from ...views.points_table import SHOWN, packed, table_columns
from ..parts import CLEAR, D3, ONE_ROW, aria, button, grid, grow, numbers, panel, row, stores, view_of
from ..wiring import Callbacks

CALLBACKS = Callbacks()


def _columns() -> list[dict[str, Any]]:
    def number(field: str, name: str, width: int, fmt: str = ",.4r") -> dict[str, Any]:
        return numbers(field, name, width, D3.format(fmt))

    return [
        number("point", "point", 72, "d"),
        number("needs", "needs", 104),
        number("time", "time", 92),
        # What sets a point apart comes before figures that follow from it.
        {"field": "short", "headerName": "plan", "width": 330, "tooltipField": "name"},
        {"field": "is", "headerName": "what it is", "width": 170, "tooltipField": "is"},
        number("micro", "micro-batches", 118, "d"),
        number("compute", "compute", 118),
        number("network", "network", 118),
        number("memory", "memory", 118),
        *(number(figure.label, figure.label, 118) for figure in LISTED),
        {"field": "mesh", "headerName": "mesh", "width": 84},
        number("devices", "devices", 86, "d"),
        {"field": "gap", "headerName": "proof", "width": 86},
        number("rate", "samples/s", 108),
        number("mfu", "MFU, %", 84),
        number("device_hours", "device-hours", 110),
        {**number("cost", "cost", 124), "hide": True},
    ]  # fmt: skip


def layout() -> Any:
    controls = [
        dmc.Select(
            id=f"filter-{name}", data=[], placeholder=f"all {title}", clearable=True, size="xs", w=136,
            clearButtonProps=CLEAR,
            **aria(label=f"Filter by {title}"),
        )
        for name, title in (("mesh", "meshes"), ("micro", "micro-batches"), ("devices", "device counts"))
    ]  # fmt: skip
    options = {
        "rowSelection": {**ONE_ROW, "enableClickSelection": False},
        "rowHeight": 30,
        "headerHeight": 34,
        "localeText": {"noRowsToShow": NOTHING, "noMatchingRows": NOTHING},
        "rowClassRules": {"over": "!params.data.fits"},
    }
    return panel(
        row(
            row(*controls, names="tight"),
            grow(),
            html.Span(id="points-count", className="muted"),
            button("all", "points-all"),
            names="above",
        ),
        grid(
            "points",
            _columns(),
            330,
            options,
            column={"suppressMovable": True},
            eventListeners={"cellKeyDown": ["chooseRow(params, setEventData)"]},
        ),
        *stores("rows", "list-now", "listed", "shown-rows"),
        title="Points",
        names="later",
    )


@CALLBACKS.answer(
    sets="rows.data points.columnDefs listed.data",
    when="list-now.data",
    given="listing.data state.data points.columnDefs",
)
def _list_points(context: Context, _: Any, listing: Any, kept: Any, columns: Any) -> Any:
    """Fill the table after the plot, which is what a person looks at first."""
    view = view_of(kept)
    data = context.frontier(view)
    if data is None:
        return (no_update,) * 3
    return packed(table_columns(data, view)), _column_units(columns, data, view), listing


CALLBACKS.in_browser(
    "points.rows",
    sets="points.rowData shown-rows.data points-all.children points-all.style",
    when="rows.data points-all.n_clicks pick.data",
)
CALLBACKS.in_browser(
    "points.select",
    sets="points.selectedRows points.scrollTo",
    when="selection.data shown-rows.data",
    given="pick.data",
)


def _column_units(columns: list[dict[str, Any]], data: FrontierData, view: View) -> list[dict[str, Any]]:
    units = {BYTES: data.units.memory.name, SECONDS: data.units.time.name}
    heads = {f.label: f"{f.label}, {units[f.unit]}" for f in SHOWN if f.unit in units}
    rates = rate_arrays(data, view)
    heads |= {
        "needs": f"needs, {data.units.memory.name}",
        "rate": f"{rates.unit}/s",
        "device_hours": f"device-hours, {rates.amount}",
        "cost": f"{view.currency or 'cost'}, {rates.amount}",
    }
    hidden = {
        **{name: getattr(rates, name) is None for name in ("rate", "mfu", "device_hours", "cost")},
        **{figure.label: bool(np.isnan(data.column(figure.name)).all()) for figure in LISTED},
        "devices": len(data.filters()["devices"]) < 2,
    }
    return [
        {
            **c,
            "headerName": heads.get(c["field"], c["headerName"]),
            **({"hide": hidden[c["field"]]} if c["field"] in hidden else {}),
        }
        for c in columns
    ]
