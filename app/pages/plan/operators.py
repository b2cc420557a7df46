"""The operators of the plan page: the graph by module and the table, linked with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_cytoscape as cyto
from dash import ctx, html, no_update

from ...context import Context
from ...figures.graph import elements, stylesheet
from ...figures.palette import palette
from ...views.operators import beside_rows, bottom_rows, columns_of, graph_edges, operator_rows, table_rows
from ...views.picture import COLUMNS, NARROW_COLUMNS, picture
from ..parts import ONE_ROW, button, grid, grow, hint, numbers, point_shown, row, search, small, stores
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_LEGEND = (
    "×12: equal blocks folded into one; a click opens a filled box; double border: computed again in "
    "backward; dashed border: its operators differ; thick: resharded; dashed line: to the next block"
)


def graph() -> Any:
    """Return the modules as boxes, with search and zoom."""
    zoom = [
        button("fold", "picture-fold", "Close the boxes that were opened"),
        button("fit", "picture-fit", "Show the whole graph"),
        button("+", "picture-in", "Zoom in"),
        button("−", "picture-out", "Zoom out"),
    ]
    search_field = search("picture-search", "find in the graph", "Find in the graph", 200)
    return html.Div(
        [
            row(search_field, small("picture-found"), grow(), *zoom, names="tight above"),
            _graph_picture(),
            hint(_LEGEND),
            *stores("picture-opened"),
        ]
    )


def _graph_picture() -> Any:
    return html.Div(
        [
            cyto.Cytoscape(
                id="plan-picture",
                elements=[],
                stylesheet=[],
                layout={"name": "preset", "fit": True, "padding": 12},
                style={"width": "100%", "height": "430px"},
                autoungrabify=True,
                boxSelectionEnabled=False,
                minZoom=0.15,
                maxZoom=2.5,
                # The wheel scrolls the page.
                userZoomingEnabled=False,
                clearOnUnhover=True,
            ),
            html.Div(id="picture-tip", className="tip", role="tooltip", hidden=True),
        ],
        className="picture",
    )


_MOST_OPENED = 40
"""The most boxes that stay opened, the last ones."""
_FIGURE = (
    "params.value == null ? '' : params.value === 0 ? '0' : "
    "Math.abs(params.value) < 0.001 ? '< 0.001' : d3.format(',.3r')(params.value)"
)
"""Three figures; values close to zero are not written out to their eighth digit."""


def table() -> Any:
    """Return the operators, with search and the control that narrows them to a module."""

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
        {"field": "node", "hide": True, "filter": "agTextColumnFilter"},
    ]
    return html.Div(
        [
            row(
                search("operator-search", "search operators, modules, dims", "Search operators", 280),
                button("all modules", "operator-all"),
                small("operator-shown"),
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
    sets="operators.rowData operators.columnDefs plan-picture.elements plan-picture.stylesheet "
    "plan-picture.style plan-legend.children +operators.dashGridOptions",
    when="plan-pick.data scheme.data picture-opened.data",
    given="page.data operators.columnDefs operators.dashGridOptions narrow.data",
)
def _draw(
    context: Context, pick: Any, scheme: Any, opened: Any, page: Any, columns: Any, options: Any, narrow: Any
) -> Any:
    data, _, point = point_shown(context, pick, page, "plan")
    detail, _ = context.detail_or_why(data, point)
    rows = operator_rows(data.exploration, point, detail)
    wide, known = NARROW_COLUMNS if narrow else COLUMNS, [str(key) for key in opened or ()]
    drawing = picture(rows, graph_edges(data.exploration, detail), wide, known)
    # With a dot behind, as what is in an opened box begins with the box's own key.
    node_of = {group: f"{node.key}." for node in drawing.nodes for group in node.groups}
    heads = columns_of(columns, rows, data.units)
    below = bottom_rows(beside_rows(data.exploration, point, detail), data.units)
    options = {**options, "pinnedBottomRowData": below}
    legend = _legend(drawing.legend, str(scheme))
    return (
        table_rows(rows, node_of, data.units),
        heads,
        elements(drawing),
        stylesheet(str(scheme)),
        {"width": "100%", "height": f"{drawing.height}px"},
        legend,
        options,
    )


@CALLBACKS.answer(
    sets="operators.dashGridOptions operators.filterModel operator-shown.children",
    when="operator-search.value plan-picture.tapNodeData operator-all.n_clicks",
    given="operators.dashGridOptions",
)
def _narrow(context: Context, search: Any, node: Any, _: Any, options: Any) -> Any:
    """Show the operators of a tapped module; the search narrows what is shown."""
    options = {**options, "quickFilterText": str(search or "")[:80]}
    key = node.get("id") if isinstance(node, Mapping) and ctx.triggered_id == "plan-picture" else None
    if ctx.triggered_id == "operator-search":
        return options, no_update, no_update
    if key is None:
        return options, {}, ""
    inside = {"node": {"filterType": "text", "type": "startsWith", "filter": f"{key}."}}
    return options, inside, f"in {key.partition('.#')[0]}"


@CALLBACKS.answer(
    sets="picture-opened.data",
    when="plan-picture.tapNodeData picture-fold.n_clicks",
    given="picture-opened.data",
)
def _open(_: Context, node: Any, __: Any, opened: Any) -> Any:
    """Open a tapped box, or close all."""
    if ctx.triggered_id == "picture-fold":
        return []
    key = node.get("id") if isinstance(node, Mapping) and node.get("closed") else None
    known = [str(other) for other in opened or ()][-_MOST_OPENED:]
    return no_update if key is None or key in known else [*known, str(key)]


@CALLBACKS.answer(
    sets="+plan-picture.stylesheet", when="operators.selectedRows", given="plan-picture.elements scheme.data"
)
def _link(context: Context, selected: Any, drawn: Any, scheme: Any) -> Any:
    """Mark the module of a selected operator."""
    groups = {r.get("group") for r in selected or () if isinstance(r, Mapping)}
    base = stylesheet(str(scheme))
    colours = palette(str(scheme))
    for element in drawn or ():
        data = element.get("data", {})
        if groups & set(data.get("groups", ())):
            mark = {"background-color": colours.select, "color": colours.surface}
            base.append({"selector": f'node[id = "{data["id"]}"]', "style": mark})
    return base


CALLBACKS.in_browser(
    "picture.zoom",
    sets="picture-fit.title",
    when=[f"picture-{name}.n_clicks" for name in ("fit", "in", "out")],
)
CALLBACKS.in_browser("picture.first", sets="picture-in.title", when="plan-picture.elements")
CALLBACKS.in_browser(
    "picture.find", sets="picture-found.children", when="picture-search.value plan-picture.elements"
)
CALLBACKS.in_browser(
    "picture.tip",
    sets="picture-tip.title",
    when="plan-picture.mouseoverNodeData plan-picture.mouseoverEdgeData",
)


def _legend(legend: tuple[tuple[str, int], ...], scheme: str) -> Any:
    colours = palette(scheme)
    return [
        html.Span([html.Span(className="swatch", style={"background": colours.series[number]}), axes])
        for axes, number in legend
    ]
