"""The elements with which several pages show a point, or two."""

from __future__ import annotations

from typing import Any

from dash import html

from ..state import View
from ..views.frontier import FrontierData
from ..views.point import PointCard, differences
from .parts import hint, plain_table, scrolled


def big(card: PointCard, words: str, *, wide: bool = False) -> Any:
    """Return memory and time in large type, then whether it fits and what dominates: beside them, or
    below."""
    figures = [
        html.Div([html.Span("memory per device"), html.Strong(card.memory)]),
        html.Div([html.Span("time per step"), html.Strong(card.time)]),
    ]
    said = [
        html.P(card.verdict, className="verdict fits" if card.fits else "verdict over"),
        hint(words),
    ]
    if wide:
        return html.Div([*figures, html.Div(said, className="said")], className="big wide")
    return html.Div([html.Div(figures, className="big"), *said])


def difference_table(data: FrontierData, view: View) -> Any:
    """Return the compared point beside the selected one, differences only; None without two points."""
    if view.other is None or view.point is None:
        return None
    rows = [[d.label, d.first, d.second, d.change] for d in differences(data, view.other, view.point)]
    if not rows:
        return hint("Both points have the same figures.")
    head = ["", data.label(view.other), data.label(view.point), "change"]
    return scrolled("Two points", plain_table(head, rows, numbers=(1, 2, 3)), names="compare")
