"""The small building blocks of several pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import html

from tensoropt.planners import ENTRIES

from ..views.frontier import planner_title


def aria(**attributes: str) -> dict[str, Any]:
    """Return ARIA attributes, which Dash takes under names that Python does not have."""
    return {f"aria-{name}": value for name, value in attributes.items()}


CLEAR: Any = {"aria-label": "clear"}
"""The attributes of the button that empties a select."""


def planner_options(refusals: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return published planners for a select; those that are known to refuse say why and cannot be chosen."""
    whys = refusals or {}
    return [
        {
            "value": name,
            "label": f"{planner_title(name)} ({whys[name]})" if whys.get(name) else planner_title(name),
            "disabled": bool(whys.get(name)),
        }
        for name in ENTRIES
    ]


def planner_choice(id: str, label: str, chosen: Sequence[str] = ()) -> Any:
    """Return a choice of published planners."""
    options = planner_options()
    return dmc.MultiSelect(
        id=id, label=label, data=options, value=list(chosen), clearable=True, clearButtonProps=CLEAR,
        placeholder="choose", hidePickedOptions=True,
    )  # fmt: skip


def number_field(id: str, label: str, *, value: str = "", placeholder: str = "", **more: Any) -> Any:
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


def facts(pairs: Sequence[tuple[str, Any]]) -> html.Dl:
    """Return labels and figures, aligned."""
    cells: list[Any] = []
    for label, value in pairs:
        cells += [html.Dt(label), html.Dd(value)]
    return html.Dl(cells, className="facts")


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
    return html.Table(
        [
            html.Thead(
                html.Tr([html.Th(h, className=right.get(i, ""), scope="col") for i, h in enumerate(head)])
            ),
            html.Tbody(
                [html.Tr([html.Td(c, className=right.get(i, "")) for i, c in enumerate(r)]) for r in rows]
            ),
        ],
        className="plain",
    )


def upload_rule(
    said: str, endings: Sequence[str], most: int, remedy: str, larger: str = "Use the command line"
) -> Any:
    """Return what the browser needs to say why a file is not accepted (``assets/upload.js``).

    Args:
        said: the id of the place where it is shown.
        endings: the endings of accepted files' names.
        most: the most bytes of a file.
        remedy: what to do about an empty file.
        larger: what to do with larger ones.
    """
    values = {
        "said": said, "endings": ",".join(endings), "most-bytes": str(most), "remedy": remedy,
        "larger": larger,
    }  # fmt: skip
    return {f"data-{name}": value for name, value in values.items()}
