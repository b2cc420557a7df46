"""The plan page: what the selected point does, and where its memory and time go."""

from __future__ import annotations

from typing import Any, cast

from dash import Dash, dcc, html

from ..context import Context
from ..figures.palette import GRAPH_CONFIG
from . import operators, owners, plan_callbacks, timeline, why
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
                        operators.graph(),
                        title="Operators by module",
                    ),
                    panel(operators.table(), title="Operators"),
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


def register(app: Dash, context: Context) -> None:
    plan_callbacks.register(app, context)
    operators.register(app, context)
    owners.register(app, context)
    timeline.register(app)
    why.register(app, context)
