"""The table of the plan page's operators, with its search."""

from __future__ import annotations

from typing import Any

from dash import html

from ...context import Context
from ...views.operators import beside_rows, bottom_rows, columns_of, operator_rows, table_rows
from ..parts import ONE_ROW, grid, numbers, point_shown, row, search
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_FIGURE = (
    "params.value == null ? '' : params.value === 0 ? '0' : "
    "Math.abs(params.value) < 0.001 ? '< 0.001' : d3.format(',.3r')(params.value)"
)
"""Three figures; values close to zero are not written out to their eighth digit."""


def table() -> Any:
    """Return the operators, with search."""

    def number(field: str, name: str, width: int, tip: str) -> dict[str, Any]:
        return numbers(field, name, width, _FIGURE, headerTooltip=tip)

    # No column grows with the window: the grid (35.3) then never shows its rows where there is no room to
    # grow into, as on every window below 1,200 px.
    columns = [
        {"field": "group", "headerName": "operator", "width": 190, "pinned": "left"},
        {"field": "module", "headerName": "module", "width": 240, "tooltipField": "module"},
        {"field": "axes", "headerName": "split by", "width": 238, "tooltipField": "axes"},
        {"field": "options", "headerName": "stored in shards", "width": 150, "tooltipField": "options"},
        number(
            "memory", "memory", 112, "parameters, gradients, optimizer state; below, what else is at the peak"
        ),
        number("compute", "compute", 112, "forward and backward, without recomputation and copies"),
        number("copies", "copies", 112, "copies and additions that bring something to where it is used"),
        number("communication", "communication", 156, "waited for or hidden"),
        number(
            "kept", "keeps", 108, "for backward, of one micro-batch; the total has what is alive at the peak"
        ),
        {"field": "source", "headerName": "figures", "width": 110},
    ]
    return html.Div(
        [
            row(
                search("operator-search", "search operators, modules, dims", "Search operators", 280),
                names="above",
            ),
            grid(
                "operators",
                columns,
                520,
                {"rowSelection": ONE_ROW, "rowHeight": 30, "headerHeight": 34},
                key="group",
                column={"suppressMovable": True, "suppressHeaderFilterButton": True},
            ),
        ]
    )


@CALLBACKS.answer(
    sets="operators.rowData operators.columnDefs +operators.dashGridOptions",
    when="plan-pick.data",
    given="page.data operators.columnDefs operators.dashGridOptions",
)
def _draw(context: Context, pick: Any, page: Any, columns: Any, options: Any) -> Any:
    data, _, point = point_shown(context, pick, page, "plan")
    detail, _ = context.detail_or_why(data, point)
    rows = operator_rows(data.exploration, point, detail)
    heads = columns_of(columns, rows, data.units)
    below = bottom_rows(beside_rows(data.exploration, point, detail), data.units)
    return table_rows(rows, data.units), heads, {**options, "pinnedBottomRowData": below}


CALLBACKS.in_browser(
    "plan.filter",
    sets="operators.dashGridOptions",
    when="operator-search.value",
    given="operators.dashGridOptions",
)
