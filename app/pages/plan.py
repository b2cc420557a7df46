"""The plan page: what the selected point does, and where its memory and time go."""

from __future__ import annotations

from typing import Any, cast

import dash_ag_grid as dag
import dash_cytoscape as cyto
import dash_mantine_components as dmc
from dash import Dash, dcc, html

from ..context import Context
from ..figures.palette import GRAPH_CONFIG
from . import plan_callbacks
from .parts import panel


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
                    html.Div(
                        [
                            panel(_graph("plan-curve"), title="Memory during the step"),
                            panel(_graph("plan-timeline"), title="Devices and links"),
                        ],
                        id="plan-time",
                        className="halves",
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
    return html.Div(
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
        ),
        className="picture",
    )


def _operators() -> Any:
    def number(field: str, name: str, width: int = 128, tip: str = "") -> dict[str, Any]:
        return {
            "field": field, "headerName": name, "headerTooltip": tip, "type": "rightAligned", "width": width,
            "valueFormatter": {"function": "params.value == null ? '' : d3.format(',.3r')(params.value)"},
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
                columnDefs=[
                    {"field": "group", "headerName": "operator", "width": 190, "pinned": "left"},
                    {"field": "module", "headerName": "module", "flex": 1, "minWidth": 180,
                     "tooltipField": "module"},
                    {"field": "axes", "headerName": "axis → dim", "flex": 1, "minWidth": 180,
                     "tooltipField": "axes"},
                    {"field": "options", "headerName": "options", "width": 150, "tooltipField": "options"},
                    number("memory", "memory", 122,
                           tip="parameters, gradients, optimizer state; below, what else is at the peak"),
                    number("compute", "compute", 120, tip="forward and backward, without what runs again"),
                    number("communication", "communication", 164, tip="waited for or hidden"),
                    number("kept", "keeps", 108,
                           tip="for backward, of one micro-batch; the total has what is alive at the peak"),
                    {"field": "source", "headerName": "figures", "width": 110},
                ],
                rowData=[],
                getRowId="params.data.group",
                columnSize=None,
                defaultColDef={"sortable": True, "resizable": True, "suppressMovable": True,
                               "suppressHeaderFilterButton": True},
                dashGridOptions={
                    "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
                    "rowHeight": 30, "headerHeight": 34, "animateRows": False,
                },
                className="grid",
                style={"height": 420},
            ),
        ]
    )  # fmt: skip


def register(app: Dash, context: Context) -> None:
    plan_callbacks.register(app, context)
