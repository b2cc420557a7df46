"""The frontier page: the plot, the limits that select a point, the point's card, the table of points."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from tensoropt.exploration.notable import CARDS_GIB

from ...context import Context
from ...figures import frontier as drawing
from ...state import ACROSS, UP
from ...views.frontier import TITLES
from .. import parts
from ..wiring import Callbacks
from . import callbacks, planners, points_table, surroundings

CALLBACKS = Callbacks(callbacks.CALLBACKS, points_table.CALLBACKS, planners.CALLBACKS, surroundings.CALLBACKS)

_OPTIONS = (
    ("log_x", "log memory"),
    ("log_y", "log time"),
    ("lines", "compute / network"),
    ("band", "certificate"),
    ("marks", "planners"),
)
AMOUNTS = "1e9 tokens, 50000 samples, 1000 steps"
_AXES = (("axis-y", "up", UP), ("axis-x", "across", ACROSS))

_PLACES = {
    "dots": [drawing.FITS, drawing.OVER],
    "selected": drawing.SELECTED,
    "budget": drawing.BUDGET,
    "target": drawing.TARGET,
    "line": drawing.LIMIT,
    "label": drawing.LABEL,
    "free": drawing.NO_BUDGET,
}
"""The places in the figure at which the browser moves things with a slider, before it asks the server."""


def layout(context: Context) -> Any:
    body = [
        parts.stack(
            _plot(), _comparison(), points_table.layout(), planners.layout(context),
            *surroundings.layout(context),
        ),
        parts.stack(_limits(), _card()),
    ]  # fmt: skip
    return html.Div(
        [
            html.H1("Frontier", className="page-title"),
            parts.hint(
                "Each point is a way to train this model on these devices that no other beats: its memory "
                "per device against the time of a step. Write the memory that you have; the simplest of "
                "the fastest plans within it is chosen."
            ),
            html.Div(id="frontier-empty"),
            *parts.stores("handled", "filled", "fired"),
            dcc.Store(id="places", data=_PLACES),
            *parts.stores("zoom", "budget-slid", "budget-rest", "target-slid", "target-rest"),
            html.Div(body, id="frontier-body", className="columns"),
        ]
    )


def _plot() -> Any:
    chips = [dmc.Chip(text, value=value, size="xs", variant="outline") for value, text in _OPTIONS]
    return parts.panel(
        *_answer(),
        parts.row(
            html.Details(
                [
                    html.Summary("Plot options"),
                    dmc.ChipGroup(
                        parts.row(*chips, names="tight"), id="options", multiple=True, value=["marks"]
                    ),
                    parts.row(*(_axis(*axis) for axis in _AXES), names="tight axes"),
                    parts.row(
                        html.Span("A click picks the point to", className="muted small"),
                        dmc.SegmentedControl(
                            id="click-mode", value="select", size="xs",
                            data=[{"value": mode, "label": mode} for mode in ("select", "compare")],
                        ),
                        names="tight",
                    ),
                ],
                id="plot-options",
            ),
            names="plot-controls",
        ),
        parts.keyboard_plot(
            parts.plot("graph", 450, doubleClick="reset"),
            "plot",
            "Memory against time. Arrow keys walk along the frontier.",
        ),
        html.Div(id="frontier-notes"),
        parts.hint(
            html.Kbd("←"), " ", html.Kbd("→"), " walk along the ", parts.term("frontier"), ", ",
            html.Kbd("k"), " ", parts.term("knee"), ", ",
            html.Kbd("Home"), " leanest, ", html.Kbd("End"), " fastest, ", html.Kbd("c"),
            " keep for comparison. Drag a box to zoom, double-click to see all.",
        ),
        names="plot-panel",
    )  # fmt: skip


def _answer() -> list[Any]:
    """Return the answer's sentence, whose budget is a field, and budgets that people have."""
    budget = dmc.TextInput(
        id="budget-text", size="xs", w=110, debounce=True, value="", **parts.aria(label="Memory budget")
    )  # fmt: skip
    sentence = [
        "Within", budget, "of ", html.Span(id="answer-devices"), ": ",
        html.Strong(id="answer-plan"), html.Span(id="answer-costs"),
    ]  # fmt: skip
    cards = [parts.button(f"{size} GiB", f"budget-{size}") for size in CARDS_GIB]
    return [
        html.Div(sentence, className="answer", **parts.aria(live="polite")),
        html.P(id="answer-beside", className="answer-beside"),
        parts.row(html.Span("Cards of", className="muted small"), *cards, names="tight"),
    ]


def _axis(name: str, direction: str, choices: tuple[str, ...]) -> Any:
    return dmc.Select(
        id=name, size="xs", w=230, allowDeselect=False, value=choices[0],
        data=[{"value": choice, "label": f"{direction}: {TITLES[choice]}"} for choice in choices],
        **parts.aria(label=f"What the plot shows {direction}"),
    )  # fmt: skip


def _limit(name: str, title: str, *texts: Any) -> Any:
    head = html.Div([html.Label(title, htmlFor=f"{name}-text"), *texts], className="limit-head")
    slider = dmc.Slider(
        id=name, min=0, max=1, value=1, step=0.01, label=None, thumbLabel=title, size="sm",
        updatemode="drag", **parts.aria(label=title),
    )  # fmt: skip
    return html.Div([head, slider], className="limit")


def _limits() -> Any:
    target = dmc.TextInput(
        id="target-text", size="xs", placeholder="no limit", debounce=True, value="",
        **parts.aria(label="Time target"),
    )  # fmt: skip
    fields = (
        ("headroom", "Headroom, %", 104, {"value": "5", "rightSection": parts.what("headroom")}),
        ("price", "Price per device-hour", 150, {"placeholder": "unknown"}),
        ("currency", "Currency", 86, {"placeholder": "none"}),
        ("amount", "Hours and cost of", "100%", {"placeholder": "1,000 steps", "description": AMOUNTS}),
    )
    return parts.panel(
        _limit("budget", "Memory budget"),
        _limit("target", "Time target", target),
        parts.row(
            *(
                parts.number_field(name, title, size="xs", w=width, debounce=True, **more)
                for name, title, width, more in fields
            )
        ),
        title="Pick by a limit",
    )


def _card() -> Any:
    picks = [parts.button(name, f"pick-{name}") for name in ("leanest", "knee", "fastest")]
    keep = parts.button("keep for comparison", "compare-this")
    return parts.panel(
        parts.row(*picks, parts.grow(), keep, names="tight above"), parts.spoken("card"), names="card-panel"
    )


def _comparison() -> Any:
    return parts.panel(
        html.Div(id="comparison"),
        parts.row(
            *(parts.button(name, f"compare-{name}") for name in ("swap", "clear")), names="tight actions"
        ),
        title="Two points",
        id="comparison-panel",
    )
