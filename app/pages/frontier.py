"""The frontier page: the plot, the limits that select a point, the point's card, the table of points."""

from __future__ import annotations

from typing import Any, cast

import dash_mantine_components as dmc
from dash import Dash, dcc, html

from ..context import Context
from ..figures import frontier as drawing
from ..figures.palette import GRAPH_CONFIG
from ..state import ACROSS, UP
from ..views.axes import TITLES
from . import frontier_callbacks, planners, points_table, surroundings
from .parts import aria, number_field, panel

OPTIONS = (
    ("log_x", "log memory"),
    ("log_y", "log time"),
    ("lines", "compute / network"),
    ("band", "certificate"),
    ("marks", "planners"),
)
AXES = (("axis-y", "up", UP), ("axis-x", "across", ACROSS))

PLACES = {
    "dots": [drawing.FITS, drawing.OVER],
    "selected": drawing.SELECTED,
    "budget": drawing.BUDGET,
    "target": drawing.TARGET,
}
"""The places in the figure at which the browser moves things with a slider, before it asks the server."""


def layout(context: Context) -> Any:
    return html.Div(
        [
            html.H1("Frontier", className="unseen"),
            html.Div(id="frontier-empty"),
            dcc.Store(id="handled"),
            dcc.Store(id="filled"),
            dcc.Store(id="fired"),
            dcc.Store(id="places", data=PLACES),
            dcc.Store(id="zoom"),
            *(dcc.Store(id=f"{name}-{what}") for name in ("budget", "target") for what in ("slid", "rest")),
            html.Div(
                [
                    html.Div(
                        [
                            _plot(),
                            _comparison(),
                            points_table.layout(),
                            planners.layout(context),
                            *surroundings.layout(context),
                        ],
                        className="stack",
                    ),
                    html.Div([_limits(), _card()], className="stack"),
                ],
                id="frontier-body",
                className="columns",
            ),
        ]
    )


def _plot() -> Any:
    return panel(
        html.Div(
            [
                dmc.ChipGroup(
                    html.Div(
                        [dmc.Chip(t, value=value, size="xs", variant="outline") for value, t in OPTIONS],
                        className="row tight",
                    ),
                    id="options",
                    multiple=True,
                    value=["marks"],
                ),
                html.Span(className="grow"),
                html.Span("A click picks to", className="muted small"),
                dmc.SegmentedControl(
                    id="click-mode",
                    data=[
                        {"value": "select", "label": "select"},
                        {"value": "compare", "label": "compare"},
                    ],
                    value="select",
                    size="xs",
                ),
            ],
            className="row plot-controls",
        ),
        html.Div([_axis(*axis) for axis in AXES], className="row tight axes"),
        html.Div(id="frontier-notes"),
        html.Div(
            dcc.Graph(
                id="graph",
                config=cast(Any, GRAPH_CONFIG | {"doubleClick": "reset"}),
                style={"height": 400},
                figure={"data": [], "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}}},
            ),
            id="plot",
            tabIndex=0,
            role="application",
            **aria(label="Memory against time. Arrow keys walk along the frontier."),
        ),
        html.P(
            [
                html.Kbd("←"), " ", html.Kbd("→"), " walk along the frontier, ", html.Kbd("k"), " knee, ",
                html.Kbd("Home"), " leanest, ", html.Kbd("End"), " fastest, ", html.Kbd("c"),
                " keep for comparison. Drag a box to zoom, double-click to see all.",
            ],
            className="hint",
        ),
        names="plot-panel",
    )  # fmt: skip


def _axis(name: str, direction: str, choices: tuple[str, ...]) -> Any:
    return dmc.Select(
        id=name, size="xs", w=230, allowDeselect=False, value=choices[0],
        data=[{"value": one, "label": f"{direction}: {TITLES[one]}"} for one in choices],
        **aria(label=f"What the plot shows {direction}"),
    )  # fmt: skip


def _limit(name: str, title: str) -> Any:
    return html.Div(
        [
            html.Div(
                [
                    html.Label(title, htmlFor=f"{name}-text"),
                    dmc.TextInput(
                        id=f"{name}-text", size="xs", placeholder="no limit",
                        debounce=True, value="",
                        **aria(label=title),
                    ),
                ],
                className="limit-head",
            ),
            dmc.Slider(
                id=name, min=0, max=1, value=1, step=0.01, label=None, thumbLabel=title, size="sm",
                updatemode="drag",
                **aria(label=title),
            ),
        ],
        className="limit",
    )  # fmt: skip


def _limits() -> Any:
    return panel(
        _limit("budget", "Memory budget"),
        _limit("target", "Time target"),
        html.Div(
            [
                number_field("headroom", "Headroom, %", value="5", size="xs", w=104, debounce=True),
                number_field(
                    "price", "Price per device-hour", size="xs", w=150, placeholder="unknown", debounce=True
                ),
                number_field("currency", "Currency", size="xs", w=86, placeholder="none", debounce=True),
                number_field(
                    "amount", "Hours and cost of", size="xs", w="100%", placeholder="1,000 steps",
                    debounce=True,
                    description="1e9 tokens, 50000 samples, 3 epochs of 50000 samples",
                ),
            ],
            className="row",
        ),
        title="Pick by a limit",
    )  # fmt: skip


def _card() -> Any:
    buttons = [
        dmc.Button("leanest", id="pick-leanest", size="compact-xs", variant="default"),
        dmc.Button("knee", id="pick-knee", size="compact-xs", variant="default"),
        dmc.Button("fastest", id="pick-fastest", size="compact-xs", variant="default"),
        html.Span(className="grow"),
        dmc.Button("keep for comparison", id="compare-this", size="compact-xs", variant="default"),
    ]
    return panel(
        html.Div(id="card", **aria(live="polite")),
        html.Div(buttons, className="row tight actions"),
        names="card-panel",
    )


def _comparison() -> Any:
    return panel(
        html.Div(id="comparison"),
        html.Div(
            [
                dmc.Button("swap", id="compare-swap", size="compact-xs", variant="default"),
                dmc.Button("clear", id="compare-clear", size="compact-xs", variant="default"),
            ],
            className="row tight actions",
        ),
        title="Two points",
        id="comparison-panel",
    )


def register(app: Dash, context: Context) -> None:
    frontier_callbacks.register(app, context)
    surroundings.register(app, context)
