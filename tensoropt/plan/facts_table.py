"""Facts as rows of a table, shown as text and HTML; this module knows none of the figures.

A class that derives from :class:`Shown` is described by the function registered with :func:`described` for it
(:mod:`tensoropt.exploration.facts`), so that data needs no words of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from html import escape
from pathlib import Path
from string import Template
from typing import Any


@dataclass(frozen=True)
class Fact:
    """A row of a fact sheet: a name, its value, and the value's source.

    Attributes:
        name: the name that people use; "" for a further line of the fact above.
        value: the value; None if it is unknown, in which case ``note`` says why.
        unit: writes a value for people.
        source: where the value comes from.
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
    """Return the facts with these names, in the order of the names; names without a fact are skipped."""
    return [facts[name] for name in names if name in facts]


@singledispatch
def described(thing: object) -> tuple[str, Sequence[Fact]]:
    """Return the title and the facts of something that is shown.

    Raises:
        TypeError: no function is registered for its class.
    """
    importlib.import_module("tensoropt.exploration.facts")  # which says it of points and plans
    words = described.dispatch(type(thing))
    if words is described.dispatch(object):
        raise TypeError(f"{type(thing).__name__} has no facts")
    return words(thing)


class Shown:
    """Something that a notebook shows as its title and its facts."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return facts_html(*described(self))


def fact_lines(facts: Iterable[Fact]) -> list[str]:
    """Return an indented line for each fact."""
    return [f"  {fact.name}: {fact.words}" for fact in facts]


def facts_text(title: str, facts: Sequence[Fact]) -> str:
    """Return the title and a line per fact, the names in one column."""
    width = max((len(fact.name) for fact in facts), default=0)
    return "\n".join([title, *(f"  {fact.name.ljust(width)}  {fact.words}" for fact in facts)])


def facts_html(title: str, facts: Sequence[Fact]) -> str:
    """Return the title above a table of two columns."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(fact.name)}</th>'
        f'<td style="text-align:left">{escape(fact.words)}</td></tr>'
        for fact in facts
    )
    return f"<div><p><b>{escape(title)}</b></p><table>{rows}</table></div>"


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def filled(template: Path, **values: Any) -> str:
    """Return a :class:`string.Template` filled with values, escaped unless they are :class:`Html`."""
    words = {name: value if isinstance(value, Html) else escape(str(value)) for name, value in values.items()}
    return Template(template.read_text(encoding="utf-8")).substitute(words)


def facts_rows(facts: Iterable[Fact]) -> Html:
    """Return the facts as an HTML table of the class ``facts``, for a page with a style of its own."""
    cells = "".join(f"<tr><th scope=row>{escape(fact.name)}<td>{escape(fact.words)}" for fact in facts)
    return Html(f"<table class=facts><tbody>{cells}</tbody></table>")


def table_html(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Html:
    """Return rows (the first is the header) as an HTML table, aligned to the right except for the columns
    ``left``.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ("left" if i in left else "right" for i in range(len(row)))
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, row, strict=True)
        )

    head, *body = rows
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
    return Html(f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{lines}</tbody></table>")
