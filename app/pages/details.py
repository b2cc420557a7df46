"""The page *Details*: first the saved parts of a plan's step and memory, then what has to be simulated."""

from __future__ import annotations

from typing import Any

from dash import dcc, html, no_update

from tensoropt.errors import TensorOptError
from tensoropt.report.owners import point_owners

from ..context import Context
from ..downloads import address
from ..views.frontier import FrontierData
from ..views.operators import beside_rows, bottom_rows, columns_of, operator_rows
from ..views.plan import Bar, device_bars, memory_bar, owner_rows, owners_words, step_bar, step_rows
from ..views.point import of_point, point_card, verified_words
from ..views.result import two_digits
from . import parts
from .wiring import Callbacks

CALLBACKS = Callbacks()
_FIGURE = (
    "params.value == null ? '' : params.value === 0 ? '0' : "
    "Math.abs(params.value) < 0.001 ? '< 0.001' : d3.format(',.3r')(params.value)"
)
"""Format with three digits; tiny values appear as "< 0.001"."""
_COMING = "The step is simulated again, which takes seconds, or half a minute for a large model."


def layout() -> Any:
    return html.Div(
        [
            html.H1("Details", className="unseen"),
            *parts.stores("details-shown"),
            html.Div(id="details-empty"),
            parts.stack(
                parts.panel(html.Div(id="details-head")),
                parts.halves(
                    parts.panel(html.Div(id="details-memory"), title="Memory of one device"),
                    parts.panel(html.Div(id="details-step"), title="One step"),
                ),
                html.Div(id="details-more"),
                id="details-body",
            ),
        ]
    )


@CALLBACKS.answer(
    sets="details-empty.children details-body.style details-head.children details-memory.children "
    "details-step.children details-more.children details-shown.data",
    when="url.search page.data made.data",
    given="details-shown.data",
    at_start=True,
)
def _saved(context: Context, search: Any, page: Any, made: Any, shown: Any) -> Any:
    """Show the saved data of the selected plan."""
    if page != "details" or "details" not in (made or []) or shown == search:
        return (no_update,) * 7
    view = context.view_from(search)
    data = context.frontier(view)
    if data is None:
        text = parts.empty("No plan to show yet", dcc.Link("Plan it first", href="/new"))
        return text, parts.visible(False), *(None,) * 4, search
    row = data.chosen(view)
    verified = context.verified(view)[0]
    card, ran = point_card(data, view, row, verified), of_point(data, row, verified)
    said = "" if ran is None else verified_words(ran, data)
    head = [
        html.P(card.name, className="plan-name"),
        html.P(
            [
                html.Strong(f"{card.memory} per device"),
                ", ",
                html.Strong(f"{two_digits(data.time[row])} a step"),
            ]
        ),
        html.P(card.verdict, className=f"verdict {card.mark}"),
        parts.hint(f"{card.title}. {card.dominant}"),
        *([parts.note(said, "warn")] if "far off" in said else []),
        html.Details([html.Summary("All figures"), parts.facts(card.facts)]),
    ]
    memory = [*_bar(memory_bar(data, view, row)), *_devices(data, row)]
    return None, {}, head, memory, _bar(step_bar(data, row)), parts.hint(_COMING), search


@CALLBACKS.answer(sets="+details-more.children", when="details-shown.data gridded.data", given="url.search")
def _rest(context: Context, shown: Any, gridded: Any, search: Any) -> Any:
    """Show the data for which the step must be simulated again."""
    view = context.view_from(search)
    data = context.frontier(view)
    if data is None or shown is None or not gridded:
        return no_update
    row = data.chosen(view)
    try:
        detail: Any = context.detail(data, row)
    except TensorOptError as error:
        words = f"The parts of the step and the costs of operators cannot be shown: {error}"
        return [parts.note(words, "warn"), _operators(data, row, None)]
    trace = html.A(
        "The timeline of the step, for ui.perfetto.dev",
        href=address(view.exploration, "trace.json", row), download="trace.json",
    )  # fmt: skip
    goes = [parts.plain_table(["", "", "share"], step_rows(detail), numbers=(1, 2)), html.P(trace)]
    whose = _owners(data, row)
    return [
        parts.halves(
            parts.panel(*goes, title="Where the step's time goes"),
            parts.panel(*whose, title="Owners of memory at the peak"),
        ),
        _operators(data, row, detail),
    ]


def _owners(data: FrontierData, row: int) -> list[Any]:
    try:
        owners = point_owners(data.exploration, row)
    except TensorOptError as error:
        return [parts.hint(str(error))]
    table = parts.plain_table(["operator", "", "share", "what"], owner_rows(owners), numbers=(1, 2))
    return [
        parts.hint(owners_words(owners, data.units)),
        parts.scrolled("Owners", table),
        parts.hint(owners.note),
    ]


def _bar(bar: Bar) -> list[Any]:
    cells = [
        html.Span(
            className=f"seg-{s.kind}", style={"width": f"{100 * s.share:.3f}%"}, title=f"{s.title}: {s.size}"
        )
        for s in bar.segments
        if s.share > 0
    ]
    rows = [
        [html.Span([html.Span(className=f"swatch seg-{s.kind}"), s.title]), s.size, s.part]
        for s in bar.segments
    ]
    return [
        html.P(bar.summary, className="bar-summary"),
        html.Div(cells, className="bar", role="img", **parts.aria(label=bar.summary)),
        parts.plain_table(["", "", "share"], rows, numbers=(1, 2)),
    ]


def _devices(data: FrontierData, row: int) -> list[Any]:
    rows = [[s.title, s.size] for s in device_bars(data, row)]
    table = parts.plain_table(["", ""], rows, numbers=(1,))
    return [html.H3("Peak memory of each device, without driver and allocator"), table] if rows else []


def _operators(data: FrontierData, row: int, detail: Any) -> Any:
    def number(field: str, name: str, width: int, tip: str) -> dict[str, Any]:
        return parts.numbers(field, name, width, _FIGURE, headerTooltip=tip)

    # Fixed widths: a growing column makes the grid (35.3) never show its rows where there is no room to grow,
    # as in windows below 1,200 px.
    columns = [
        {"field": "group", "headerName": "operator", "width": 190, "pinned": "left", "filter": True},
        {"field": "module", "headerName": "module", "width": 240, "tooltipField": "module", "filter": True},
        {"field": "axes", "headerName": "split by", "width": 238, "tooltipField": "axes", "filter": True},
        {"field": "options", "headerName": "stored in shards", "width": 150, "tooltipField": "options"},
        number("memory", "memory", 112, "parameters, gradients, optimizer state"),
        number("compute", "compute", 112, "forward and backward, without recomputation and copies"),
        number("copies", "copies", 112, "copies and additions that redistribute tensors"),
        number("communication", "communication", 156, "waited for or hidden"),
        number("kept", "keeps", 108, "for backward, of one micro-batch"),
        {"field": "source", "headerName": "figures", "width": 110},
    ]
    rows = operator_rows(data.exploration, row, data.units, detail)
    below = bottom_rows(beside_rows(data.exploration, row, detail), data.units)
    options = {"rowHeight": 30, "headerHeight": 34, "pinnedBottomRowData": below}
    kind = data.exploration.all_points[row].kind
    said = kind.rows and f"Operators: {kind.rows}; below them, {kind.each}."
    table = parts.grid(
        "operators", columns_of(columns, rows, data.units), 480, options, key="group", rowData=rows,
    )  # fmt: skip
    return parts.panel(table, parts.hint(said) if said else None, title="Operators")
