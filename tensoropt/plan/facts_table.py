"""Rows of a name, a value and its source, written as lines of text or as HTML tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any


@dataclass(frozen=True)
class Fact:
    """A named value for people, with its unit and its source.

    Attributes:
        name: the name that is shown; "" for a further line of the row above.
        value: the value; None if unknown, in which case ``note`` gives the reason.
        unit: the function that formats the value.
        source: the origin of the value, in words.
        note: a remark.
    """

    name: str
    value: Any
    unit: Callable[[Any], str] = str
    source: str = ""
    note: str = ""

    @property
    def words(self) -> str:
        """The value with its source and its remark in brackets."""
        remarks = "; ".join(filter(None, (self.source, self.note)))
        if self.value is None:
            return f"unknown: {remarks}"
        return f"{self.unit(self.value)} ({remarks})" if remarks else self.unit(self.value)


def named(facts: Mapping[str, Fact], *names: str) -> list[Fact]:
    """Return the facts with these names, in the order of ``names``; names without a fact are skipped."""
    return [facts[name] for name in names if name in facts]


def fact_lines(facts: Iterable[Fact]) -> list[str]:
    return [f"  {fact.name}: {fact.words}" for fact in facts]


class Html(str):
    """A text that is already HTML and needs no escaping."""

    __slots__ = ()


def filled(template: Path, **values: Any) -> str:
    """Return a file's text with each ``$name`` replaced by a value, escaped unless it is :class:`Html`."""
    words = {name: value if isinstance(value, Html) else escape(str(value)) for name, value in values.items()}
    return Template(template.read_text(encoding="utf-8")).substitute(words)


def facts_rows(facts: Iterable[Fact]) -> Html:
    """Return the facts as an HTML table of the CSS class ``facts``."""
    cells = "".join(f"<tr><th scope=row>{escape(fact.name)}<td>{escape(fact.words)}" for fact in facts)
    return Html(f"<table class=facts><tbody>{cells}</tbody></table>")


def table_html(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Html:
    """Return rows of cells (first the header) as an HTML table; columns ``left`` are aligned to the left."""

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ("left" if i in left else "right" for i in range(len(row)))
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )

    head, *body = rows
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    return Html(f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>")
