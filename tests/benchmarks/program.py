"""What benchmarks have in common: their arguments, sections of rows, and tables of Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.machine import Results

Row = dict[str, Any]


def arguments(doc: str | None, quick: str, names: Collection[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of ``--quick`` and, if there are any, of some of ``names``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    if names:

        def known(word: str) -> str:
            if word not in names:
                raise argparse.ArgumentTypeError(f"unknown name {word!r}; choose from {', '.join(names)}")
            return word

        parser.add_argument("names", nargs="*", type=known, help=f"of {', '.join(names)}; default: all")
    return parser


def run_sections(
    doc: str | None,
    name: str,
    sections: Mapping[str, Callable[[bool], Iterator[Row]]],
    markdown: Callable[[Mapping[str, Any]], str],
    order: Callable[[Row], Any] = lambda row: 0,
) -> None:
    """Run the sections that are asked for; the result ``papers/DATE-NAME`` is written after every row.

    Args:
        sections: by name what yields rows, of small models if called with True.
        order: the key by which rows are sorted.
    """
    options = arguments(doc, "a small model, written into out/papers", sections).parse_args()
    results = Results("papers", name, {}, quick=options.quick)
    for section in options.names or sections:
        for row in sections[section](options.quick):
            results.add("key", row)
            results.data["rows"].sort(key=order)
            results.write(markdown(results.data))
            print(row, flush=True)
    print(markdown(results.data))


def line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]
