"""Building blocks of pages: small elements, fields, tables and panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from tensoropt.plan.facts_table import Fact
from tensoropt.terms import TERMS

from ..figures.palette import GRAPH_CONFIG

# A quarter of a first page's bytes, so it comes with the first table (``assets/tensoropt.js``).
dag._js_dist[0]["dynamic"] = True


def aria(**attributes: str) -> dict[str, Any]:
    """Return ARIA attributes under Dash's hyphenated names, which Python does not allow."""
    return {f"aria-{name}": value for name, value in attributes.items()}


def stores(*names: str) -> list[Any]:
    """Return Dash stores with the given ids, which keep data in the browser."""
    return [dcc.Store(id=name) for name in names]


def row(*children: Any, names: str = "", **more: Any) -> html.Div:
    """Return elements side by side."""
    return html.Div(list(children), className=f"row {names}".strip(), **more)


def stack(*children: Any, **more: Any) -> html.Div:
    """Return elements below each other."""
    return html.Div(list(children), className="stack", **more)


def halves(*children: Any) -> html.Div:
    """Return two elements of equal width side by side."""
    return html.Div(list(children), className="halves")


def grow() -> html.Span:
    """Return an element that fills a row's remaining space."""
    return html.Span(className="grow")


def hint(*content: Any, **more: Any) -> html.P:
    """Return a remark in small print."""
    return html.P(content[0] if len(content) == 1 else list(content), className="hint", **more)


def explained(words: str) -> Any:
    """Return a name with a ``?`` that explains it on hover, touch or keyboard focus, if the name or its first
    words are in :data:`tensoropt.terms.TERMS`; else unchanged."""
    name = words if words in TERMS else words.partition(" (")[0]
    if name not in TERMS:
        return words
    named = {**aria(label=f"What is {name}? {TERMS[name]}"), "data-said": TERMS[name]}
    return html.Span([words, html.Button("?", type="button", className="what", **named)], className="term")


def spoken(id: str) -> html.Div:
    """Return an element whose changes a screen reader announces."""
    return html.Div(id=id, **aria(live="polite"))


def button(text: str, id: Any) -> Any:
    """Return a small button."""
    return dmc.Button(text, id=id, size="compact-xs", variant="default")


def plot(id: str, height: int) -> dcc.Graph:
    """Return an empty plot."""
    clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    blank = {"data": [], "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}, **clear}}
    return dcc.Graph(id=id, config=cast(Any, GRAPH_CONFIG), figure=blank, style={"height": height})


def grid(
    id: str,
    columns: Sequence[Any],
    height: int,
    options: Mapping[str, Any],
    *,
    key: str = "id",
    column: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Return a table that the browser sorts and filters.

    Args:
        key: the field that identifies a row.
        column: settings of all columns.
    """
    return dag.AgGrid(
        id=id,
        columnDefs=list(columns),
        getRowId=f"params.data.{key}",
        columnSize=None,
        defaultColDef={"sortable": True, "resizable": True, **(column or {})},
        dashGridOptions={
            **options,
            "animateRows": False,
            "suppressNoRowsOverlay": "localeText" not in options,
            # Tab leaves the table; arrow keys move between its cells.
            "tabToNextCell": {"function": "false"}, "tabToNextHeader": {"function": "false"},
        },
        className="grid",
        style={"height": height},
        **more,
    )  # fmt: skip


def numbers(field: str, name: str, width: int, function: str, **more: Any) -> dict[str, Any]:
    """Return a column of figures, formatted by a browser function."""
    return {
        "field": field, "headerName": name, "type": "rightAligned", "width": width,
        "valueFormatter": {"function": function}, **more,
    }  # fmt: skip


ONE_ROW = {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True}
"""Row selection by clicking."""
D3 = "params.value == null ? '' : d3.format('{}')(params.value)"
"""The browser function that formats a figure by d3; blank if there is none."""


def panel(*children: Any, title: str = "", id: str = "", names: str = "") -> html.Section:
    """Return a titled card."""
    head = [html.H2(title, className="panel-title")] if title else []
    names = f"panel {names}".strip()
    more: dict[str, Any] = {"id": id} if id else {}
    return html.Section([*head, *children], className=names, **more)


def visible(yes: bool) -> dict[str, str]:
    """Return the style of an element that is shown or hidden."""
    return {} if yes else {"display": "none"}


def scrolled(label: str, content: Any) -> html.Div:
    """Return a scrollable frame for large content, with a name and a tab stop, for scrolling by keyboard."""
    return html.Div(content, className="scroll", tabIndex=0, role="region", **aria(label=label))


def facts(rows: Iterable[Fact]) -> html.Dl:
    """Return labelled values in two columns; terms among the labels are explained."""
    cells = [cell for fact in rows for cell in (html.Dt(explained(fact.name)), html.Dd(fact.words))]
    # When a whole card is announced, its explanations are not.
    return html.Dl(cells, className="facts", **aria(live="off"))


def empty(title: str, *sentences: Any) -> html.Div:
    """Return a message where there is nothing to show yet, with advice."""
    return html.Div([html.P(title, className="empty-title"), *map(html.P, sentences)], className="empty")


def note(text: str, kind: str = "info") -> Any:
    """Return a remark in a box: ``info``, ``warn`` or ``error``; nothing for an empty text."""
    if not text:
        return None
    role = "alert" if kind == "error" else "status"
    return html.Div(text, className=f"note note-{kind}", role=role)


def copyable(text: str, label: str, id: str) -> html.Div:
    """Return code with a copy button; ``label`` names the code to a screen reader."""
    return html.Div(
        [
            html.Pre(html.Code(text, id=id), tabIndex=0),
            dmc.CopyButton(
                value=text, children="Copy", copiedChildren="Copied", size="xs", variant="default",
                buttonProps={"aria-label": f"Copy {label}"},
            ),
        ],
        className="copyable",
    )  # fmt: skip


def plain_table(
    head: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()
) -> html.Table:
    """Return a small table; columns ``numbers`` are aligned to the right."""
    right = dict.fromkeys(numbers, "num")
    titles = [html.Th(h, className=right.get(i, ""), scope="col") for i, h in enumerate(head)]
    return html.Table(
        [
            html.Thead(html.Tr(titles)) if any(head) else None,
            html.Tbody(
                [html.Tr([html.Td(c, className=right.get(i, "")) for i, c in enumerate(r)]) for r in rows]
            ),
        ],
        className="plain",
    )
