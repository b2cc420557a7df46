"""The parts of the frontier page below the points: what other devices would give, and what is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from tensoropt.plan.facts_table import Fact

from ...context import Context
from ...state import View
from ...views import clusters, point
from ...views.point import NOTE
from .. import explore_callbacks
from ..parts import facts, hint, panel, plain_table, scrolled, view_of
from ..wiring import Callbacks

CALLBACKS = Callbacks()


def layout(context: Context) -> list[Any]:
    refill = (
        [html.Div(explore_callbacks.refill_button(), className="actions")] if context.jobs is not None else []
    )
    title = "Devices × memory → time"
    return [
        panel(scrolled(title, id="profile"), title=title, names="later"),
        panel(html.Div(id="assumptions"), *refill, title="Assumptions in effect", names="assumptions later"),
    ]


@CALLBACKS.answer(
    sets="assumptions.children profile.children", when="listed.data", given="state.data", at_start=True
)
def _surroundings(context: Context, _: Any, kept: Any) -> Any:
    view = view_of(kept)
    data = context.frontier(view)
    if data is None:
        return None, None
    said = point.assumptions(data, view, *context.verified(view))
    return _assumed(said), _profile(context, view)


def _assumed(said: Sequence[Fact]) -> list[Any]:
    """Return settings beside their labels; below them the notes, which are sentences, across the whole
    width."""
    notes = [html.Li(fact.words) for fact in said if fact.name == NOTE]
    return [
        facts(fact for fact in said if fact.name != NOTE),
        html.Ul(notes, className="notes") if notes else None,
    ]


def _profile(context: Context, view: View) -> Any:
    """Return the table devices × memory → time; every figure links to its point."""
    table = clusters.devices_by_memory(context.library, view)
    if table is None:
        return hint(
            "Only one number of devices is known for this model. Explore it on fewer too (an option of the "
            "Explore page, or --devices auto) to see here what more devices, or bigger ones, would gain."
        )
    rows = []
    for row in table.rows:
        cells: list[Any] = [html.Strong(row.label) if row.current else row.label]
        for cell in row.cells:
            if cell is None:
                cells.append(html.Span("—", title="no plan fits"))
            else:
                link = dcc.Link(cell.time, href=f"/frontier?{cell.view.to_query()}")
                cells.append([link, html.Div(cell.cost, className="muted small")] if cell.cost else link)
        rows.append(cells)
    return plain_table(["within", *table.head], rows, numbers=tuple(range(1, len(table.head) + 1)))
