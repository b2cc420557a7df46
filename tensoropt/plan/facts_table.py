"""Rows of words as HTML, and labelled facts as text: what ``repr`` and notebooks show."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Facts = Sequence[tuple[str, str]]
"""Labels and what is to be said of them, in order."""


def facts_text(title: str, facts: Facts) -> str:
    """The title and a line per fact, the labels in one column."""
    width = max((len(label) for label, _ in facts), default=0)
    return "\n".join([title, *(f"  {label.ljust(width)}  {said}" for label, said in facts)])


def facts_html(title: str, facts: Facts) -> str:
    """The title above a table of two columns."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(said)}</td></tr>'
        for label, said in facts
    )
    return f"<div><p><b>{escape(title)}</b></p><table>{rows}</table></div>"


def table_html(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Rows (the first is the header) as a table: to the right, but columns in ``left`` to the left."""

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ("left" if i in left else "right" for i in range(len(row)))
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )

    head, *body = rows
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    return f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>"
