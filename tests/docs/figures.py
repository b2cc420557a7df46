"""The generated tables and sentences of the READMEs, written from result files and checked.

    python -m tests.docs.figures           # write them anew, from the newest results

A generated part stands between two lines that name it, so that a page reads well as raw text::

    <!-- begin executed-steps: made by `make figures` -->
    | model | plan | DDP |
    ...
    <!-- end executed-steps -->

``parts.py`` says what each part is made of. Within its words ``{rows.model=gpt2.seconds.plan:.0ms}`` is the
value at a place of a result file, formatted: a step of the place is a key, a number, or ``key=value``, which
picks the element of a list. Formats are Python's, or end in ``GiB``, ``MiB`` or ``ms``; one that begins with
``?`` is of a figure that the newest result may lack, which is a dash then.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.fidelity.report import summary
from tests.docs.pages import ROOT, pages

RESULTS = ROOT / "tests" / "benchmarks" / "results"
PART = re.compile(r"<!-- begin ([\w-]+): made by `make figures` -->\n(.*?)<!-- end \1 -->", re.DOTALL)
UNITS = {"GiB": 2**30, "MiB": 2**20, "ms": 1e-3}
LATER, MISSING = "?", "–"
README = ROOT / "README.md"
MODULES = "files"
"""The part of many pages: what the modules of its folder are for, by their docstrings' first sentences."""
PAGES = tuple(page for page in pages() if PART.search(page.read_text(encoding="utf-8")))
"""Those that hold generated parts."""


def newest(name: str) -> Path:
    """The result file called ``name``, in which ``*`` is a date; of several, the last by name.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(p for p in RESULTS.glob(name) if "quick" not in p.name)
    if not found:
        raise FileNotFoundError(f"no result file is called {name}")
    return found[-1]


def result(path: Path) -> dict[str, Any]:
    """What a result file holds, with summaries of predictions completed from their rows.

    A file from before a part of the summary was reported lacks that part, but has the rows it follows from.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    for one in data.get("results", ()):
        if "time_error" in one:
            one.update({**summary(one["rows"]), **one})
    return data


def lookup(data: Any, place: str) -> Any:
    """The value at ``a.0.name=x.b``; raises :class:`KeyError` where there is none."""
    for step in place.split("."):
        if "=" in step:
            key, value = step.split("=")
            found = [element for element in data if str(element[key]) == value]
            if not found:
                raise KeyError(step)
            data = found[0]
        else:
            data = data[int(step)] if isinstance(data, list) else data[step]
    return data


def shown(value: Any, form: str) -> str:
    """A value as a page shows it; ``.1MiB`` is ``74.7 MiB``, ``.2ms`` likewise; words stay as they are."""
    if isinstance(value, str):
        return value
    for unit, size in UNITS.items():
        if form.endswith(unit):
            return f"{value / size:{form.removesuffix(unit) or '.0'}f} {unit}"
    return format(value, form).replace("%", " %")


class Filled(string.Formatter):
    """Fills ``{place:format}`` with values of one result."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        try:
            return lookup(self.data, field_name), field_name
        except KeyError as error:
            return error, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, KeyError):
            if not format_spec.startswith(LATER):
                raise value
            return MISSING
        return shown(value, format_spec.removeprefix(LATER))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded to one width, so that it is one in a terminal, too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join(map(line, (header, ["-" * width for width in widths], *rows)))


def files(folder: Path, before: str) -> str:
    """A table of a folder's modules, in the order in which the page has them, new ones behind."""
    found = {path.name: path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}
    found |= {f"{path.parent.name}/": path for path in sorted(folder.glob("*/__init__.py"))}
    known = [name for name in re.findall(r"`([\w./]+)`", before) if name in found]
    rows = ["| file | what |", "| --- | --- |"]
    for name in dict.fromkeys([*known, *found]):
        text = ast.get_docstring(ast.parse(found[name].read_text(encoding="utf-8"))) or ""
        words = " ".join(text.split("\n\n")[0].split()).removesuffix(".")
        words = re.sub(r":\w+:`(~?)([\w.]+)`", lambda m: f"`{m[2].split('.')[-1] if m[1] else m[2]}`", words)
        rows.append(f"| `{name}` | {words.replace('``', '`')} |")
    return "\n".join(rows)


def current(text: str, made: Mapping[str, Callable[[], str]], folder: Path = ROOT) -> str:
    """The text of a folder's page with every generated part as the result files have it."""

    def fresh(match: re.Match[str]) -> str:
        name = match[1]
        content = files(folder, match[2]) if name == MODULES else made[name]()
        return f"<!-- begin {name}: made by `make figures` -->\n{content}\n<!-- end {name} -->"

    return PART.sub(fresh, text)


def main() -> None:
    """Write every page's generated parts anew."""
    from tests.docs.parts import PARTS  # parts are made with the tools above

    for page in PAGES:
        page.write_text(current(page.read_text(encoding="utf-8"), PARTS, page.parent), encoding="utf-8")


if __name__ == "__main__":
    main()
