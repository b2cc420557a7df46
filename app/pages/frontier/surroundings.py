"""The parts of the frontier page below the points: what other devices would give, and what is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from tensoropt.plan.facts_table import Fact

from ...context import Context
from ...views import point, profile
from ...views.point import NOTE, ORIGIN
from ...views.profile import ProfileTable
from .. import explore_callbacks
from ..parts import facts, hint, panel, plain_table, scrolled, view_of
from ..wiring import Callbacks

CALLBACKS = Callbacks()


def layout(context: Context) -> list[Any]:
    refill = (
        [html.Div(explore_callbacks.refill_button(), className="actions")] if context.jobs is not None else []
    )
    title, by_batch = "Devices × memory → time", "Batch × memory → throughput"
    return [
        panel(scrolled(title, id="profile"), title=title, names="later"),
        panel(scrolled(by_batch, id="batches"), title=by_batch, names="later"),
        panel(html.Div(id="assumptions"), *refill, title="Assumptions in effect", names="assumptions later"),
    ]


@CALLBACKS.answer(
    sets="assumptions.children profile.children batches.children",
    when="listed.data",
    given="state.data",
    at_start=True,
)
def _surroundings(context: Context, _: Any, kept: Any) -> Any:
    view = view_of(kept)
    data = context.frontier(view)
    if data is None:
        return None, None, None
    said = point.assumptions(data, view, *context.verified(view))
    by_devices = _table(profile.devices_by_memory(context.library, view), _ONE_NUMBER)
    return _assumed(said), by_devices, _table(profile.batches_by_memory(context.library, view), _ONE_BATCH)


def _assumed(said: Sequence[Fact]) -> list[Any]:
    """Return settings beside their labels; below them the notes, which are sentences, across the whole width:
    what was left out or not timed, and in a fold where figures come from."""
    missing, others = (
        html.Ul([html.Li(fact.words) for fact in said if fact.name == name], className="notes")
        for name in (NOTE, ORIGIN)
    )
    return [
        facts(fact for fact in said if fact.name not in (NOTE, ORIGIN)),
        missing if missing.children else None,
        html.Details([html.Summary("Where figures come from"), others]) if others.children else None,
    ]


_ONE_NUMBER = (
    "Only one number of devices is known for this model. Explore it on fewer too (an option of the Explore "
    "page, or --devices auto) to see here what more devices, or bigger ones, would gain."
)
_ONE_BATCH = (
    "Only one batch is known for this model here. Explore it at several (8,16,32 or auto as the batch on the "
    "Explore page, or --batch auto) to see here which batch reads most per second."
)


def _table(table: ProfileTable | None, otherwise: str) -> Any:
    """Return a table of budgets; every figure links to its point."""
    if table is None:
        return hint(otherwise)
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
    return plain_table([table.corner, *table.head], rows, numbers=tuple(range(1, len(table.head) + 1)))
