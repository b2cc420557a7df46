"""The runs page: all explorations in one plot and one table, named, shown and hidden."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import dash_mantine_components as dmc
from dash import html, no_update

from tensoropt.errors import TensorOptError

from ..context import Context
from ..figures.palette import run_style
from ..figures.runs import runs_figure
from ..views import runs as view
from ..views.units import Units
from . import parts
from .wiring import Callbacks

CALLBACKS = Callbacks()

_ROW_PX, _HEAD_PX, _MOST_ROWS = 32, 54, 14
"""Sizes of the table: a row, the head with a scroll bar, and how many rows it shows without scrolling."""
_LOCALE = {
    "ariaRowToggleSelection": "Press Space to show or hide this run in the plot",
    "ariaRowSelectAll": "Press Space to show or hide all runs of the table",
    "noRowsToShow": "No exploration yet: start one on the Explore page",
    "noMatchingRows": "No run matches",
}


def layout() -> Any:
    kept = parts.stores(*(f"runs-{name}" for name in _STORES))
    heading = parts.heading(
        "Runs",
        "All explorations in one plot and one table. Axes are logarithmic unless you switch that off, as "
        "models differ by factors.",
    )
    return html.Div([heading, *kept, parts.stack(_plot(), _table())])


_STORES = (
    "view", "axes", "known", "rows", "drawn", "edited", "asked", "named", "clicked", "hovered", "searched",
)  # fmt: skip
"""``view``: the content of the URL; ``axes``: the part of it that the server draws; ``known``: what the
browser has to know."""


def _segments(id: str, label: str, *pairs: tuple[str, str]) -> Any:
    return dmc.SegmentedControl(
        id=id, data=[{"value": v, "label": t} for v, t in pairs], value=pairs[0][0], size="xs",
        **parts.aria(label=label),
    )  # fmt: skip


def _plot() -> Any:
    chips = [
        dmc.Chip(text, value=value, size="xs", variant="outline")
        for value, text in (("logx", "log memory"), ("logy", "log time"))
    ]
    return parts.panel(
        parts.row(
            _segments("runs-memory", "Memory", ("device", "memory per device"), ("total", "of all devices")),
            _segments(
                "runs-time", "Time", ("step", "time per step"), ("sample", "per sample"),
                ("rate", "samples per second"),
            ),
            dmc.ChipGroup(
                parts.row(*chips, names="tight"), id="runs-logs", multiple=True, value=["logx", "logy"]
            ),
            names="above",
        ),
        html.Div(id="runs-said", role="status"),
        html.Div(id="runs-notes"),
        parts.keyboard_plot(
            parts.plot("runs-graph", 400),
            "runs-plot",
            "Frontiers of the runs that are shown, memory against time. Left and right move along a "
            "frontier, up and down to another run, Enter opens the point.",
        ),
        html.Div(id="runs-legend", className="runs-legend"),
        html.P(id="runs-point", role="status", className="runs-point"),
        parts.hint(
            "A click on a point opens it. ", html.Kbd("←"), " ", html.Kbd("→"), " move along a frontier, ",
            html.Kbd("↑"), " ", html.Kbd("↓"), " to another run, ", html.Kbd("Enter"), " opens.",
        ),
        names="plot-panel",
    )  # fmt: skip


def _columns(units: Units | None = None) -> list[dict[str, Any]]:
    size, time = (units.memory.name, units.time.name) if units else ("GiB", "ms")

    def words(field: str, name: str, width: int, **more: Any) -> dict[str, Any]:
        return {"field": field, "headerName": name, "width": width, "filter": "agTextColumnFilter", **more}

    def number(field: str, name: str, width: int, fmt: str = ",.4~r") -> dict[str, Any]:
        return parts.numbers(field, name, width, parts.D3.format(fmt), filter="agNumberColumnFilter")

    return [
        {"field": "style", "headerName": "colour", "width": 84, "cellRenderer": "RunSwatch"},
        words("name", "name", 230, editable=True, headerTooltip="Double-click or Enter changes it",
              tooltipField="fault", valueFormatter={"function": "runName(params)"}),
        {"field": "open", "headerName": "", "width": 66, "cellRenderer": "RunLink", "sortable": False,
         "valueGetter": {"function": "'open'"}},
        number("memory", f"leanest, {size}", 118),
        number("time", f"fastest, {time}", 118),
        words("model", "model", 110),
        words("cluster", "cluster", 120),
        number("devices", "devices", 98, "d"),
        words("dtype", "dtype", 96),
        number("batch", "batch", 88, "d"),
        words("mode", "mode", 86),
        words("optimizer", "optimizer", 112),
        number("points", "points", 92, ",d"),
        words("made", "made", 142),
        words("origin", "from", 96),
    ]  # fmt: skip


def _table() -> Any:
    options = {
        "rowSelection": {
            "mode": "multiRow", "checkboxes": True, "headerCheckbox": True, "selectAll": "filtered",
            "enableClickSelection": False,
        },
        "selectionColumnDef": {"headerName": "", "width": 44, "pinned": None, "sortable": True},
        "rowHeight": _ROW_PX, "headerHeight": 34, "tooltipShowDelay": 300,
        "enterNavigatesVerticallyAfterEdit": False, "stopEditingWhenCellsLoseFocus": True,
        "localeText": _LOCALE, "enableCellTextSelection": True, "ensureDomOrder": True,
    }  # fmt: skip
    shown = parts.buttons(
        "runs",
        ("all", "show listed", "Show the runs that the table lists"),
        ("only", "only listed", "Show the runs that the table lists and hide the others"),
        ("none", "hide all", "Hide all runs"),
        ("csv", "CSV", "Save the table as it is listed as a CSV file"),
    )
    return parts.panel(
        parts.row(
            parts.search(
                "runs-search", "search names, models …", "Search the runs", 240, value="",
                debounce=False,
            ),
            parts.row(*shown, names="tight"),
            parts.grow(),
            html.Span(id="runs-count", role="status", className="muted"),
            names="above",
        ),
        html.Div(id="runs-told"),
        parts.grid(
            "runs-table", _columns(), _HEAD_PX + _ROW_PX * _MOST_ROWS, options,
            eventListeners={"cellKeyDown": ["openRun(params)"]},
        ),
        parts.hint(
            "The box at a row's left shows or hides the run. A name is changed in the table (double-click, ",
            "or ", html.Kbd("Enter"), " on the cell) and kept beside the jobs; an empty one restores the ",
            "exploration's own. Colours repeat after six, with another dash and marks.",
        ),
        title="All explorations",
    )  # fmt: skip


CALLBACKS.in_browser(
    "runs.state",
    sets="runs-view.data runs-axes.data runs-memory.value runs-time.value runs-logs.value",
    when="url.search runs-memory.value runs-time.value runs-logs.value",
    given="runs-view.data runs-axes.data",
    at_start=True,
)
CALLBACKS.in_browser(
    "runs.show",
    sets="runs-said.children runs-legend.children runs-count.children",
    when="runs-view.data runs-known.data runs-drawn.data runs-table.rowData "
    "runs-table.virtualRowData scheme.data",
    at_start=True,
)
CALLBACKS.in_browser("runs.rows", sets="runs-table.rowData", when="runs-rows.data")
CALLBACKS.in_browser("runs.search", sets="runs-searched.data", when="runs-search.value")
CALLBACKS.in_browser(
    "runs.many",
    sets="runs-clicked.data",
    when=[f"runs-{name}.n_clicks" for name in ("all", "only", "none", "csv")],
)
CALLBACKS.in_browser("runs.open", sets="+runs-clicked.data", when="runs-graph.clickData")
CALLBACKS.in_browser("runs.hover", sets="runs-hovered.data", when="runs-graph.hoverData")
CALLBACKS.in_browser("runs.named", sets="+runs-hovered.data", when="runs-named.data")


@CALLBACKS.answer(
    sets="runs-rows.data runs-table.columnDefs runs-table.style runs-known.data",
    when="page.data finished.data runs-edited.data",
    given="runs-known.data",
    at_start=True,
)
def _fill(context: Context, page: Any, *rest: Any) -> Any:
    """Return the table and what the browser needs; nothing while another page is shown, or if nothing
    changed."""
    if page != "runs":
        return (no_update,) * 4
    runs = view.runs_of(context.library)
    units = view.common_units(runs)
    browser_data = view.known_to_the_browser(runs, units)
    for fact in browser_data["facts"].values():
        fact["look"] = _look(fact["style"])
    rows = [{**row, "look": _look(row["style"])} for row in view.table_rows(runs, units)]
    # With the edit, so that one that was refused puts back what the table showed.
    browser_data["of"] = json.dumps([hash(json.dumps([rows, browser_data])), rest[1]])
    before = rest[-1] if isinstance(rest[-1], Mapping) else {}
    if before.get("of") == browser_data["of"]:
        return (no_update,) * 4
    browser_data["units"] = [units.memory.name, units.time.name]
    # Columns that are set anew end what is being typed into a cell.
    columns = no_update if before.get("units") == browser_data["units"] else _columns(units)
    return rows, columns, {"height": _HEAD_PX + _ROW_PX * min(max(len(rows), 3), _MOST_ROWS)}, browser_data


@CALLBACKS.answer(
    sets="runs-graph.figure runs-drawn.data runs-notes.children",
    when="runs-known.data runs-axes.data scheme.data",
    given="runs-view.data",
)
def _draw(context: Context, browser_data: Any, axes: Any, scheme: Any, kept: Any) -> Any:
    if not isinstance(browser_data, Mapping):
        return no_update, no_update, no_update
    runs = view.runs_of(context.library)
    units, meant = view.common_units(runs), view.AxisOptions.from_data(axes)
    shown = view.shown_keys(kept, browser_data)
    figure = runs_figure(runs, shown, meant, units, str(scheme))
    lines = [*view.plot_notes(runs), context.library.labels.fault]
    said = [parts.note(line, "warn") for line in lines if line]
    return figure, [browser_data.get("of"), axes, scheme, [run.key for run in runs]], said


@CALLBACKS.answer(sets="runs-named.data", when="runs-asked.data")
def _name_plans(context: Context, key: Any) -> Any:
    """Return the names of an exploration's plans, requested when a person looks at one of its points."""
    try:
        exploration = context.library.load(str(key))
    except TensorOptError:
        return no_update  # the table says what is wrong with it
    return {"key": str(key), "names": list(exploration.names[: len(exploration.points)])}


@CALLBACKS.answer(sets="runs-edited.data runs-told.children", when="runs-table.cellValueChanged")
def _edit(context: Context, changes: Any) -> Any:
    said = ""
    for change in changes if isinstance(changes, list) else [changes]:
        try:
            _renamed(context, change)
        except TensorOptError as error:
            said = str(error)
    # Not counted: two edits that follow each other quickly would both be the same number.
    return uuid4().hex, parts.note(said, "error")


def _look(style: int | None) -> tuple[int, str, str] | None:
    return None if style is None else run_style(style)


def _renamed(context: Context, change: Any) -> None:
    """Apply one cell's change.

    Raises:
        TensorOptError: it cannot be applied; the message says why.
    """
    if not isinstance(change, Mapping) or change.get("colId") != "name":
        return
    entry = context.library.entry(str(change.get("rowId", "")))
    text = str(change.get("value") or "").strip()
    # The table shows the exploration's own title where it has no name: typed again, it is no name.
    context.library.labels.rename(
        entry.identity, "" if text == view.own_title(context.library, entry) else text
    )
