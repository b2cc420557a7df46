"""Building blocks of several pages: small elements, the display of one or two points, the view in a page's
store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import dcc, html

from tensoropt.plan.facts_table import Fact
from tensoropt.terms import TERMS

from ..figures.palette import GRAPH_CONFIG

# A quarter of what a first page would load: it comes with the first table (``assets/tensoropt.js``).
dag._js_dist[0]["dynamic"] = True


def aria(**attributes: str) -> dict[str, Any]:
    """Return ARIA attributes under the hyphenated names that Dash takes, which Python does not allow."""
    return {f"aria-{name}": value for name, value in attributes.items()}


def stores(*names: str) -> list[Any]:
    """Return places where a page keeps data in the browser, by their ids."""
    return [dcc.Store(id=name) for name in names]


def row(*children: Any, names: str = "", **more: Any) -> html.Div:
    """Return elements side by side."""
    return html.Div(list(children), className=f"row {names}".strip(), **more)


def stack(*children: Any, names: str = "", **more: Any) -> html.Div:
    """Return elements below each other."""
    return html.Div(list(children), className=f"stack {names}".strip(), **more)


def halves(*children: Any) -> html.Div:
    """Return two elements of the same width beside each other."""
    return html.Div(list(children), className="halves")


def grow() -> html.Span:
    """Return what takes the room that a row has left."""
    return html.Span(className="grow")


def hint(*content: Any, **more: Any) -> html.P:
    """Return a remark in small print."""
    return html.P(content[0] if len(content) == 1 else list(content), className="hint", **more)


def what(name: str, sentence: str = "") -> Any:
    """Return a ``?`` that says what a term means when the pointer, a finger or the keyboard is on it.

    Args:
        name: its name in :data:`tensoropt.terms.TERMS`.
        sentence: what is said instead of its meaning there.
    """
    said = sentence or TERMS[name]
    named = {**aria(label=f"What is {name}? {said}"), "data-said": said}
    return html.Button("?", type="button", className="what", **named)


def term(name: str, words: str = "", sentence: str = "") -> html.Span:
    """Return a word with its :func:`what`; ``words`` is how the page writes it, if not by its name."""
    return html.Span([words or name, what(name, sentence)], className="term")


def explained(words: str) -> Any:
    """Return a name as a :func:`term` if its meaning, or that of its first words, is known, otherwise as it
    is."""
    name = words if words in TERMS else words.partition(" (")[0]
    return term(name, words) if name in TERMS else words


def small(id: str, **more: Any) -> html.Span:
    """Return the place of a few words in small print."""
    return html.Span(id=id, className="muted small", **more)


def spoken(id: str, **more: Any) -> html.Div:
    """Return the place of words that a screen reader says when they change."""
    return html.Div(id=id, **aria(live="polite"), **more)


def button(text: str, id: Any, label: str = "") -> Any:
    """Return a small button; ``label`` says what it does where its text does not."""
    named = aria(label=label) if label else {}
    return dmc.Button(text, id=id, size="compact-xs", variant="default", **named)


def plot(id: str, height: int, **config: Any) -> dcc.Graph:
    """Return the place of a plot, empty."""
    clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    blank = {"data": [], "layout": {"xaxis": {"visible": False}, "yaxis": {"visible": False}, **clear}}
    return dcc.Graph(id=id, config=cast(Any, GRAPH_CONFIG | config), figure=blank, style={"height": height})


def upload(
    id: str,
    place: str,
    prompt: str,
    endings: Sequence[str],
    most: int,
    *,
    said: str,
    remedy: str,
    larger: str = "Use the command line",
    accept: str = "",
) -> html.Div:
    """Return a place to drop a file; the browser says why one is not accepted (``assets/upload.js``).

    Args:
        place: the id of the element around it.
        prompt: what may be dropped here.
        endings: the endings of accepted files' names.
        most: the most bytes of a file.
        said: the id of the place where a refusal is shown.
        remedy: what to do about an empty file.
        larger: what to do with larger ones.
        accept: what the browser offers, if not only these endings.
    """
    rule: Any = {
        "data-said": said,
        "data-endings": ",".join(endings),
        "data-most-bytes": str(most),
        "data-remedy": remedy,
        "data-larger": larger,
    }
    return html.Div(
        dcc.Upload(
            html.Div([f"Drop {prompt} here, or ", html.Span("choose one", className="linklike")]),
            id=id, className="upload", max_size=most, min_size=1, multiple=False,
            accept=accept or ",".join(endings),
        ),
        id=place,
        **rule,
    )  # fmt: skip


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
        key: the field that tells its rows apart.
        column: what all columns have.
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
            # Tab leaves the table instead of walking through its cells; arrow keys do that.
            "tabToNextCell": {"function": "false"}, "tabToNextHeader": {"function": "false"},
        },
        className="grid",
        style={"height": height},
        **more,
    )  # fmt: skip


def numbers(field: str, name: str, width: int, function: str, **more: Any) -> dict[str, Any]:
    """Return a column of figures that a function of the browser writes."""
    return {
        "field": field, "headerName": name, "type": "rightAligned", "width": width,
        "valueFormatter": {"function": function}, **more,
    }  # fmt: skip


ONE_ROW = {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True}
"""The selection of a table in which a click selects a row."""
D3 = "params.value == null ? '' : d3.format('{}')(params.value)"
"""The function that writes a figure in a format of d3; blank if there is none."""


def number_field(id: Any, label: str, *, value: str = "", placeholder: str = "", **more: Any) -> Any:
    """Return a field for a number, which keeps what was typed.

    It is not Mantine's NumberInput, which drops letters as they are typed, so that 1e9 becomes 19, and moves
    what is out of bounds to the nearest bound; here the rule is shown instead.
    """
    return dmc.TextInput(id=id, label=label, value=value, placeholder=placeholder, **more)


def panel(*children: Any, title: str = "", id: str = "", names: str = "") -> html.Section:
    """Return a titled card."""
    head = [html.H2(title, className="panel-title")] if title else []
    names = f"panel {names}".strip()
    more: dict[str, Any] = {"id": id} if id else {}
    return html.Section([*head, *children], className=names, **more)


def visible(yes: bool) -> dict[str, str]:
    """Return the style of something that is only sometimes there."""
    return {} if yes else {"display": "none"}


def scrolled(label: str, *children: Any, names: str = "", **more: Any) -> html.Div:
    """Return a frame for content that may be wider or taller than its place: it has a name, and is reached by
    Tab, to be scrolled by keys."""
    attributes = {**aria(label=label), **more}
    return html.Div(
        list(children), className=f"scroll {names}".strip(), tabIndex=0, role="region", **attributes
    )


def facts(rows: Iterable[Fact]) -> html.Dl:
    """Return facts as names, explained where that is known, and words, aligned."""
    cells = [cell for fact in rows for cell in (html.Dt(explained(fact.name)), html.Dd(fact.words))]
    # Where a whole card is spoken when it changes, its explanations are not.
    return html.Dl(cells, className="facts", **aria(live="off"))


def facts_of(pairs: Iterable[tuple[str, str]]) -> html.Dl:
    """Return names and words, aligned."""
    return html.Dl(
        [cell for name, words in pairs for cell in (html.Dt(name), html.Dd(words))], className="facts"
    )


def empty(title: str, *sentences: Any) -> html.Div:
    """Return the words for where there is nothing to show, with what to do about it."""
    return html.Div([html.P(title, className="empty-title"), *map(html.P, sentences)], className="empty")


def note(text: str, kind: str = "info") -> Any:
    """Return a remark in a box: ``info``, ``warn`` or ``error``; nothing for an empty text."""
    if not text:
        return None
    role = "alert" if kind == "error" else "status"
    return html.Div(text, className=f"note note-{kind}", role=role)


def copyable(text: str, label: str, id: str) -> html.Div:
    """Return code, found by ``id``, with a button that copies it."""
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
    """Return a small table; columns in ``numbers`` are aligned to the right."""
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
