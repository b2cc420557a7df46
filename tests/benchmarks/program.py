"""What benchmarks have in common: their arguments, parts, and pages and tables of Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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


def run_parts(
    doc: str | None,
    quick: str,
    stem: tuple[str, str],
    parts: Mapping[str, Callable[[bool], Iterable[Row]]],
    shown: Callable[[Mapping[str, Any]], tuple[str, str | None]],
    *,
    key: str = "model",
    rows: str = "rows",
    few: Collection[str] = (),
    order: Callable[[Row], Any] = lambda row: 0,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Run the parts that are asked for; the result is written after every row.

    Args:
        quick: what ``--quick`` does.
        stem: folder and name of the result.
        parts: by name what gives rows, of small models if called with True.
        shown: Markdown and picture of a result.
        key: what tells rows apart.
        rows: where the result has them.
        few: the parts of ``--quick``; none for all.
        order: the key by which rows are sorted.
        about: what else the result says.
    """
    options = arguments(doc, quick, parts).parse_args()
    results = Results(*stem, about or {}, quick=options.quick, rows=rows)
    for name in options.names or (options.quick and few) or parts:
        for row in parts[name](options.quick):
            results.add(key, row)
            results.data[rows].sort(key=order)
            results.write(*shown(results.data))
            print(row[key], flush=True)
    print(shown(results.data)[0])


def page(*blocks: str | Iterable[str]) -> str:
    """Return Markdown of blocks with an empty line between two; a block is a text, or its lines."""
    texts = (block if isinstance(block, str) else "\n".join(block) for block in blocks)
    return "\n\n".join(filter(None, texts))


def line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]
