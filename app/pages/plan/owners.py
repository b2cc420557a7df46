"""The panel beside the memory curve: the owners of the memory at a moment, chosen by a click or by keys."""

from __future__ import annotations

from typing import Any, cast

from dash import Patch, ctx, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.report.owners import PointOwners, point_owners

from ...context import Context
from ...views.frontier import FrontierData
from ...views.plan import moment, moment_words, owner_cells, total_cells
from ..parts import ONE_ROW, aria, buttons, grid, grow, hint, numbers, panel, point_shown, row, search
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_SIZE = "params.data ? params.data.size : ''"


def owners_panel() -> Any:
    """Return the search, the steps from moment to moment, and the table."""
    steps = buttons(
        "owners",
        ("before", "◀", "The moment before"),
        ("peak", "peak", "Owners at the peak"),
        ("next", "▶", "The next moment"),
    )
    columns = [
        {"field": "operator", "headerName": "operator", "width": 170, "tooltipField": "operator"},
        numbers("bytes", "bytes", 100, _SIZE),
        {"field": "share", "headerName": "share", "type": "rightAligned", "width": 76, "sortable": False},
        {"field": "what", "headerName": "what", "width": 180, "tooltipField": "what"},
        {"field": "tensor", "headerName": "tensor", "width": 170, "tooltipField": "tensor"},
        {"field": "kind", "headerName": "kind", "width": 150},
        {"field": "until", "headerName": "until", "width": 300, "tooltipField": "until", "sortable": False},
    ]
    return panel(
        row(
            html.Span(id="owners-moment", **aria(live="polite")),
            grow(),
            search("owners-search", "operator, tensor, kind", "Search owners", 130),
            *steps,
            names="tight above",
        ),
        grid(
            "owners",
            columns,
            236,
            {"rowSelection": ONE_ROW, "rowHeight": 28, "headerHeight": 32},
            column={"suppressMovable": True, "suppressHeaderFilterButton": True},
        ),
        hint(id="owners-note"),
        title="Whose memory",
    )


def _owners_of(context: Context, data: FrontierData, point: int) -> PointOwners:
    """Return the owners of a point's memory, remembered."""
    # The data is part of the remembered value, so that its id cannot be reused meanwhile.
    key = (id(data.exploration), point)
    owners: PointOwners = context.owners.get(key, lambda: (data, point_owners(data.exploration, point)))[1]
    return owners


@CALLBACKS.answer(
    sets="owners.rowData owners.dashGridOptions owners-moment.children owners-moment.title "
    "owners-note.children +plan-curve.figure",
    when=[
        "plan-pick.data",
        "plan-curve.clickData",
        *(f"owners-{name}.n_clicks" for name in ("before", "peak", "next")),
    ],
    given="page.data owners-moment.title owners.dashGridOptions",
)
def _show(context: Context, pick: Any, clicked: Any, *rest: Any) -> Any:
    page, shown, options = rest[-3:]
    data, _, point = point_shown(context, pick, page, "plan")
    try:
        owners = _owners_of(context, data, point)
    except TensorOptError as error:
        return [], {**options, "pinnedBottomRowData": []}, "", "", str(error), no_update
    fired = ctx.triggered_id
    before = int(shown) if str(shown).isdecimal() else None
    if fired == "plan-curve":
        at = moment(owners, _clicked(clicked))
    elif fired in ("owners-before", "owners-next"):
        at = moment(owners, before, -1 if fired == "owners-before" else 1)
    else:
        at = moment(owners, None)
    rows, below = owner_cells(at, data.units), total_cells(at, data.units)
    grid = {**options, "pinnedBottomRowData": below}
    words = moment_words(owners, at, data.units)
    mark: Any = no_update
    if str(fired).startswith(("plan-curve", "owners-")):
        mark = Patch()
        x, y = data.units.time.of(at.at.time_s), data.units.memory.of(at.at.total)
        mark["layout"]["annotations"] = [
            {"x": x, "y": y, "text": "▼", "showarrow": False, "yanchor": "bottom"}
        ]
    return rows, grid, words, str(at.number), owners.note, mark


CALLBACKS.in_browser(
    "plan.filter",
    sets="+owners.dashGridOptions",
    when="owners-search.value",
    given="owners.dashGridOptions",
)
# A row leads to its operator.
CALLBACKS.in_browser(
    "plan.follow",
    sets="operators.selectedRows operators.scrollTo",
    when="owners.selectedRows",
    given="operators.rowData",
)


def _clicked(data: Any) -> int | None:
    """Return the point of the curve that was clicked; None if it was none."""
    points = data.get("points", []) if isinstance(data, dict) else []
    for point in points:
        number = cast(Any, point).get("pointNumber")
        if isinstance(number, int) and not isinstance(number, bool) and point.get("curveNumber") == 0:
            return number
    return None
