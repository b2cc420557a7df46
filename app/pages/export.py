"""The export page: files to take along and commands to copy."""

from __future__ import annotations

from typing import Any

from dash import html

from ..context import Context
from ..downloads import address
from ..state import View
from ..views.export import commands, files, place
from ..views.frontier import FrontierData
from ..views.point import point_card
from .parts import copyable, empty, facts, halves, heading, hint, panel, shown_point, stack
from .wiring import Callbacks

CALLBACKS = Callbacks()


def layout() -> Any:
    sentence = (
        "Files of the selected point to take along, and the commands that do the same without this page."
    )
    return html.Div([heading("Export", sentence), html.Div(id="export-body")])


def body(context: Context, data: FrontierData, view: View) -> Any:
    """Return the selected point's files and commands."""
    assert view.point is not None
    entry = context.library.entry(view.exploration)
    card = point_card(data, view, view.point, context.verified(view)[0])
    links = [
        html.Li(
            [
                html.A(file.name, href=address(entry.key, file.what, view.point, view), download=file.name),
                html.Span(file.text, className="muted"),
            ]
        )
        for file in files(data)
    ]
    lines: list[Any] = [hint(place(data, entry))]
    for number, command in enumerate(commands(data, entry, view.point)):
        lines += [html.H3(command.title), copyable(command.line, command.title, f"command-{number}")]
    plan = data.exploration.plan(view.point).to_json()
    return halves(
        stack(
            panel(
                html.P(card.name, className="plan-name"),
                html.P(f"{card.memory} per device, {card.time} per step. {card.verdict}"),
                html.Ul(links, className="files"),
                title=card.title,
            ),
            panel(*lines, title="Commands"),
        ),
        stack(
            panel(facts(card.facts), title="What it is"),
            panel(copyable(plan, "the plan", "plan-text"), title="plan.json", names="plan-text"),
        ),
    )


@CALLBACKS.answer(sets="export-body.children", when="export-pick.data")
def _show(context: Context, pick: Any) -> Any:
    data, view = shown_point(context, pick, "export", "export")
    if data is None:
        return empty("Nothing to export yet", "Pick an exploration above and a point on its frontier.")
    return body(context, data, view)
