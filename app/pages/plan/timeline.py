"""The timeline's panel: search, zoom by buttons and keys."""

from __future__ import annotations

from typing import Any

from dash import html

from ..parts import aria, buttons, grow, hint, panel, row, search, small
from ..wiring import Callbacks

CALLBACKS = Callbacks()

_KEYS = (
    "Keys over the plots: w or + closer, s or − further, a and d along, 0 all, n and N to the next and the "
    "previous event found; in the search field Enter and Shift+Enter. A click on an event goes to its "
    "operator."
)


def timed(graph: Any, label: str) -> html.Div:
    """Return a plot that keys move, once it has the focus or the pointer."""
    return html.Div(graph, className="timed", tabIndex=0, role="group", **aria(label=f"{label}. {_KEYS}"))


def timeline_panel(graph: Any) -> Any:
    """Return the panel with streams, links and stages in rows."""
    zoom = buttons(
        "timeline",
        ("fit", "fit", "Show the whole step"),
        ("in", "+", "Closer in time"),
        ("out", "−", "Further in time"),
    )
    return panel(
        row(
            search("timeline-search", "find modules, operators, collectives", "Find in the timeline", 260),
            *buttons(
                "timeline",
                ("before", "◀", "The previous event found"),
                ("after", "▶", "The next event found"),
            ),
            small("timeline-found", **aria(live="polite")),
            grow(),
            *zoom,
            names="tight above",
        ),
        timed(graph, "Timeline of the step"),
        hint(_KEYS),
        title="Devices and links",
    )


CALLBACKS.in_browser(
    "timeline.search", sets="timeline-found.children", when="timeline-search.value plan-timeline.figure"
)
CALLBACKS.in_browser(
    "timeline.press",
    sets="timeline-fit.title",
    when=[f"timeline-{name}.n_clicks" for name in ("fit", "in", "out", "before", "after")],
)
