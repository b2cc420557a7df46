"""The plan page: what the selected point does, and where its memory and time go."""

from __future__ import annotations

from typing import Any, cast

import dash_ag_grid as dag
import dash_cytoscape as cyto
import dash_mantine_components as dmc
from dash import Dash, dcc, html

from ..context import Context
from ..figures.palette import GRAPH_CONFIG
from . import owners, plan_callbacks, timeline, why
from .measured import measured_panel
from .owners import owners_panel
from .parts import panel
from .timeline import timed, timeline_panel


def layout() -> Any:
    return html.Div(
        [
            html.H1("Plan", className="unseen"),
            html.Div(id="plan-empty"),
            html.Div(
                [
                    panel(html.Div(id="plan-headline"), names="headline"),
                    html.Div(
                        [
                            panel(html.Div(id="plan-memory"), title="Memory of one device"),
                            panel(html.Div(id="plan-step"), title="One step"),
                        ],
                        className="halves",
                    ),
                    why.layout(),
                    html.Div(
                        [
                            html.Div(
                                [
                                    panel(
                                        timed(_graph("plan-curve"), "Memory during the step"),
                                        title="Memory during the step",
                                    ),
                                    owners_panel(),
                                ],
                                className="halves",
                            ),
                            timeline_panel(_graph("plan-timeline")),
                            measured_panel(),
                        ],
                        id="plan-time",
                        className="stack",
                    ),
                    html.Div(id="plan-note"),
                    panel(
                        html.Div(id="plan-legend", className="row legend"),
                        _picture(),
                        title="Operators by module",
                    ),
                    panel(_operators(), title="Operators"),
                    panel(html.Div(id="plan-difference"), title="Difference of two plans"),
                ],
                id="plan-body",
                className="stack",
            ),
        ]
    )


def _graph(name: str) -> Any:
    blank = {"data": [], "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}}}
    return dcc.Graph(id=name, config=cast(Any, GRAPH_CONFIG), figure=blank, style={"height": 270})


def _picture() -> Any:
    buttons = [
        dmc.Button(text, id=f"picture-{name}", size="compact-xs", variant="default", **cast(Any, label))
        for name, text, label in (
            ("fit", "fit", {"aria-label": "Show the whole graph"}),
            ("in", "+", {"aria-label": "Zoom in"}),
            ("out", "−", {"aria-label": "Zoom out"}),
        )
    ]
    search = dmc.TextInput(
        id="picture-search", placeholder="find in the graph", size="xs", w=200, debounce=200,
        **cast(Any, {"aria-label": "Find in the graph"}),
    )  # fmt: skip
    hint = "double border: computed again in backward; dashed: not all its operators alike; thick: resharded"
    return html.Div(
        [
            html.Div(
                [search, html.Span(id="picture-found", className="muted small"), html.Span(className="grow"),
                 *buttons],
                className="row tight above",
            ),
            _graph_picture(),
            html.P(hint, className="hint"),
        ]
    )  # fmt: skip


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
                # The wheel is the page's.
                userZoomingEnabled=False,
                clearOnUnhover=True,
            ),
            html.Div(id="picture-tip", className="tip", role="tooltip", hidden=True),
        ],
        className="picture",
    )


FIGURE = (
    "params.value == null ? '' : params.value === 0 ? '0' : "
    "Math.abs(params.value) < 0.001 ? '< 0.001' : d3.format(',.3r')(params.value)"
)
"""Three figures; what is next to nothing is not written out to its eighth digit."""


def _operators() -> Any:
    def number(field: str, name: str, width: int = 128, tip: str = "") -> dict[str, Any]:
        return {
            "field": field, "headerName": name, "headerTooltip": tip, "type": "rightAligned", "width": width,
            "valueFormatter": {"function": FIGURE},
        }  # fmt: skip

    return html.Div(
        [
            html.Div(
                [
                    dmc.TextInput(
                        id="operator-search", placeholder="search operators, modules, dims", size="xs", w=280,
                        debounce=200, **cast(Any, {"aria-label": "Search operators"}),
                    ),
                    dmc.Button("all modules", id="operator-all", size="compact-xs", variant="default"),
                    html.Span(id="operator-shown", className="muted small"),
                ],
                className="row above",
            ),
            dag.AgGrid(
                id="operators",
                # None of them grows with the window: the grid (35.3) then never shows its rows where there is
                # no room to grow into, as on every window below 1,200 px.
                columnDefs=[
                    {"field": "group", "headerName": "operator", "width": 190, "pinned": "left"},
                    {"field": "module", "headerName": "module", "width": 240,
                     "tooltipField": "module"},
                    {"field": "axes", "headerName": "split by", "width": 238,
                     "tooltipField": "axes"},
                    {"field": "options", "headerName": "stored in shards", "width": 150,
                     "tooltipField": "options"},
                    number("memory", "memory", 112,
                           tip="parameters, gradients, optimizer state; below, what else is at the peak"),
                    number("compute", "compute", 112, tip="forward and backward, without what runs again"),
                    number("communication", "communication", 156, tip="waited for or hidden"),
                    number("kept", "keeps", 108,
                           tip="for backward, of one micro-batch; the total has what is alive at the peak"),
                    {"field": "source", "headerName": "figures", "width": 110},
                    {"field": "node", "hide": True, "filter": "agTextColumnFilter"},
                ],
                rowData=[],
                getRowId="params.data.group",
                columnSize=None,
                defaultColDef={"sortable": True, "resizable": True, "suppressMovable": True,
                               "suppressHeaderFilterButton": True},
                dashGridOptions={
                    "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
                    "rowHeight": 30, "headerHeight": 34, "animateRows": False,
                    # As in the table of points: tab leaves it.
                    "tabToNextCell": {"function": "false"}, "tabToNextHeader": {"function": "false"},
                },
                className="grid",
                style={"height": 520},
            ),
        ]
    )  # fmt: skip


def register(app: Dash, context: Context) -> None:
    plan_callbacks.register(app, context)
    owners.register(app, context)
    timeline.register(app)
    why.register(app, context)
