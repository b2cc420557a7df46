"""The plan page: what the selected point does, and where its memory and time go."""

from __future__ import annotations

from typing import Any

from dash import html

from ..parts import aria, halves, heading, hint, panel, plot, stack
from ..wiring import Callbacks
from . import callbacks, operators, owners
from .owners import owners_panel

CALLBACKS = Callbacks(
    callbacks.CALLBACKS,
    operators.CALLBACKS,
    owners.CALLBACKS,
)


_FIRST = "The plan is being simulated, operator by operator: some seconds for a large model."


def layout() -> Any:
    label = "Memory during the step; the table beside it says whose it is."
    curve = html.Div(plot("plan-curve", 270), role="group", **aria(label=label))
    return html.Div(
        [
            heading("Plan", "How the chosen point splits the model, and where its memory and time go."),
            html.Div(id="plan-empty"),
            stack(
                panel(html.Div(hint(_FIRST), id="plan-headline"), names="headline"),
                halves(
                    panel(html.Div(id="plan-memory"), title="Memory of one device"),
                    panel(html.Div(id="plan-step"), title="One step"),
                ),
                stack(
                    panel(html.Div(id="plan-parts"), title="What the step goes into"),
                    halves(panel(curve, title="Memory during the step"), owners_panel()),
                    id="plan-time",
                ),
                html.Div(id="plan-note"),
                panel(operators.table(), title="Operators"),
                panel(html.Div(id="plan-difference"), title="Difference of two plans"),
                id="plan-body",
            ),
        ]
    )
