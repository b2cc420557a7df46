"""The drawer *Export*: launcher configs, files to download, and commands to copy."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import ALL, ctx, html, no_update, set_props

from tensoropt.errors import TensorOptError
from tensoropt.exploration.recommended import a_config_says
from tensoropt.launchers import LAUNCHERS

from ..context import Context
from ..downloads import address
from ..views.export import commands, files
from ..views.frontier import FrontierData
from ..views.result import two_digits
from .parts import aria, button, copyable, note
from .wiring import Callbacks

CALLBACKS = Callbacks()


def drawer() -> Any:
    """Return the drawer at the page's side, closed and empty."""
    return dmc.Drawer(
        html.Div(id="export-body"), id="export", opened=False, position="right", size="min(680px, 100%)",
        title="Export", closeButtonProps={"aria-label": "Close"},
    )  # fmt: skip


@CALLBACKS.answer(sets="export.opened export-body.children", when="export-open.n_clicks", given="url.search")
def _open(context: Context, clicks: Any, search: Any) -> Any:
    view = context.view_from(search)
    data = context.frontier(view)
    if not clicks or data is None:
        return no_update, no_update
    if view.beside:
        names = ",".join((view.exploration, *view.beside))
        link = html.A("frontiers.csv", href=f"/download/several/{names}", download="frontiers.csv")
        return True, [html.P([link, ": every point of the selected explorations, one row each."])]
    return True, body(context, data, view, data.chosen(view))


def body(context: Context, data: FrontierData, view: Any, row: int) -> list[Any]:
    """Return the selected plan's configs, files and commands."""
    entry = context.library.entry(view.exploration)
    links = [
        html.Li(
            [
                html.A(name, href=address(entry.key, name, row, view), download=name),
                html.Span(words, className="muted"),
            ]
        )
        for name, words in files(data).items()
    ]
    lines: list[Any] = []
    for number, command in enumerate(commands(data, entry, row)):
        lines += [html.H3(command.title), copyable(command.line, command.title, f"command-{number}")]
    told = [
        html.Div(
            [
                html.Strong(name), " ", button("write its config", {"launcher": name}),
                html.Div(id={"told": name}, **aria(live="polite")),
            ],
            className="launcher",
        )
        for name in LAUNCHERS
    ]  # fmt: skip
    says = a_config_says(data.exploration.names[row])
    words = (
        "A launcher's config can express this plan."
        if says
        else "No launcher's config can express this plan: the closest one is written, with its cost."
    )
    return [
        html.P(data.exploration.names[row], className="plan-name"),
        html.P(f"{data.units.memory.text(data.needs[row])} per device, {two_digits(data.time[row])} a step."),
        html.H2("Files"),
        html.Ul(links, className="files"),
        html.H2("A launcher's config"),
        html.P(f"{words} Its cost is simulated first, in seconds to two minutes."),
        *told,
        html.H2("Commands"),
        *lines,
    ]


@CALLBACKS.answer(
    sets="told-last.data", when=[({"launcher": ALL}, "n_clicks")], given="url.search"
)  # fmt: skip
def _tell(context: Context, _: Any, search: Any) -> Any:
    """Write a launcher's config of the selected plan, or of the closest one that it can express."""
    asked = ctx.triggered_id
    view = context.view_from(search)
    data = context.frontier(view)
    if not isinstance(asked, dict) or not any(t["value"] for t in ctx.triggered) or data is None:
        return no_update
    launcher = str(asked.get("launcher"))
    try:
        told = context.told_job(data, data.chosen(view), launcher)
    except TensorOptError as error:
        words: Any = note(f"✕ {error}", "warn")
    else:
        name = data.exploration.names[data.chosen(view)]
        said = (
            "✓ It can express this plan"
            if told.is_the_point
            else f"✕ It cannot express {name}: {told.reason}"
        )
        nearest = "" if told.is_the_point else " The closest that it can express is below."
        words = [
            note(f"{said}.{nearest} {told.sentence()}.", "info" if told.is_the_point else "warn"),
            copyable(told.text.rstrip("\n"), f"{launcher}'s config", f"told-{launcher}"),
        ]
    set_props({"told": launcher}, {"children": words})
    return launcher
