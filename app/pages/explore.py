"""The explore page: for now, how to make an exploration that this dashboard opens."""

from __future__ import annotations

from typing import Any

from dash import Dash, html

from ..context import Context
from .parts import copyable, panel

LINES = "tensoropt explore zoo:gpt2-tiny --cluster local:2 --out out/gpt2\ntensoropt dashboard out"


def layout(context: Context) -> Any:
    return html.Div(
        [
            html.H1("Explore", className="unseen"),
            panel(
                html.P("Explorations are started on the command line; the dashboard opens their folder."),
                copyable(LINES, "the commands", "explore-lines"),
                title="Explore a model",
            ),
        ]
    )


def register(app: Dash, context: Context) -> None:
    """Nothing on this page changes."""
