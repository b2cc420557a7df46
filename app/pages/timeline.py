"""The timeline's panel: search, zoom by buttons and keys."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import Dash, html

from .parts import aria, panel
from .wiring import in_browser

KEYS = (
    "Keys over the plots: w or + closer, s or − further, a and d along, 0 all. A click on an event goes to "
    "its operator."
)


def timed(graph: Any, label: str) -> html.Div:
    """Return a plot that keys move, once it has the focus or the pointer."""
    return html.Div(graph, className="timed", tabIndex=0, role="group", **aria(label=f"{label}. {KEYS}"))


def timeline_panel(graph: Any) -> Any:
    """Return the panel with streams, links and stages in rows."""
    buttons = [
        dmc.Button(text, id=f"timeline-{name}", size="compact-xs", variant="default", **aria(label=label))
        for name, text, label in (
            ("fit", "fit", "Show the whole step"),
            ("in", "+", "Closer in time"),
            ("out", "−", "Further in time"),
        )
    ]
    search = dmc.TextInput(
        id="timeline-search", placeholder="find events, operators, rows", size="xs", w=200, debounce=200,
        **aria(label="Find in the timeline"),
    )  # fmt: skip
    return panel(
        html.Div(
            [search, html.Span(id="timeline-found", className="muted small", **aria(live="polite")),
             html.Span(className="grow"), *buttons],
            className="row tight above",
        ),
        timed(graph, "Timeline of the step"),
        html.P(KEYS, className="hint"),
        title="Devices and links",
    )  # fmt: skip


def register(app: Dash) -> None:
    in_browser(
        app,
        "timeline.search",
        sets="timeline-found.children",
        when="timeline-search.value plan-timeline.figure",
    )
    in_browser(
        app,
        "timeline.press",
        sets="timeline-fit.title",
        when=[f"timeline-{name}.n_clicks" for name in ("fit", "in", "out")],
    )
