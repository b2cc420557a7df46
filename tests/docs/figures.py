"""Figures in README.md and in stages' READMEs that come from result files, written and checked.

    python -m tests.docs.figures           # write them anew, from the newest results

``<!--= search/*-search.json large.0.seconds .2f -->0.25<!--/-->`` is the value at a place of a JSON file in
tests/benchmarks/results, formatted. A ``*`` in the file's name takes the newest date; a step of the place is
a key, a number, or ``key=value``, which picks the element of a list. Formats are Python's, or end in
``GiB``, ``MiB`` or ``ms``; one that begins with ``?`` is of a figure that the newest result may lack.

The summary of a model's predictions is worked out from its rows again where a file lacks a part of it, so
that results from before that part was reported show it, too.

``<!--= the_steps:execute/*-step.json,the_search:search/*-search.json taken sentence -->...<!--/-->`` is the
sentence that says from which commit and machine each of these tables was taken, and when (``taken.py``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.benchmarks.fidelity.report import summary
from tests.docs.pages import ROOT
from tests.docs.taken import sentence

RESULTS = ROOT / "tests" / "benchmarks" / "results"
MARK = re.compile(r"<!--= (\S+) (\S+) (\S+) -->(.*?)<!--/-->", re.DOTALL)
UNITS = {"GiB": 2**30, "MiB": 2**20, "ms": 1e-3}
LATER = "?"
"""Before a format: the newest result may lack the figure, which is a dash then; the first that has it ends
that."""
README = ROOT / "README.md"
PAGES = (README, ROOT / "tensoropt" / "costs" / "README.md")
"""Those that hold figures; ``WRITTEN`` of tests/benchmarks/machine.py names them, too."""


def newest(name: str) -> Path:
    """The result file called ``name``; of several, the last by name, which starts with the date.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(p for p in RESULTS.glob(name) if "quick" not in p.name)
    if not found:
        raise FileNotFoundError(f"no result file is called {name}")
    return found[-1]


def result(path: Path) -> dict[str, Any]:
    """What a result file holds, and what follows from its rows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for one in data.get("results", ()):
        if "time_error" in one:
            one.update({**summary(one["rows"]), **one})
    return data


def parts(name: str) -> list[tuple[str, str]]:
    """Tables and their files of ``the_steps:execute/*-step.json,...``; a file alone has no table's name."""
    pairs = (one.rpartition(":") for one in name.split(","))
    return [(table, file) for table, _, file in pairs]


def lookup(data: Any, place: str) -> Any:
    """The value at ``a.0.name=x.b``."""
    for step in place.split("."):
        if "=" in step:
            key, value = step.split("=")
            data = next(element for element in data if str(element[key]) == value)
        else:
            data = data[int(step)] if isinstance(data, list) else data[step]
    return data


def shown(value: Any, form: str) -> str:
    """A value as README shows it; ``.1MiB`` is ``74.7 MiB``, ``.2ms`` likewise; words stay as they are."""
    if isinstance(value, str):
        return value
    for unit, size in UNITS.items():
        if form.endswith(unit):
            digits = form.removesuffix(unit)
            return f"{value / size:{digits or '.0'}f} {unit}"
    text = format(value, form)
    return text.replace("%", " %")


def current(text: str) -> str:
    """The text with every marked figure as the result files have it."""

    def fresh(match: re.Match[str]) -> str:
        name, place, form, _ = match.groups()
        if form == "sentence":
            tables = {table.replace("_", " "): result(newest(file)) for table, file in parts(name)}
            return f"<!--= {name} {place} {form} -->{sentence(tables)}<!--/-->"
        try:
            value = lookup(result(newest(name)), place)
        except KeyError:
            if not form.startswith(LATER):
                raise
            return f"<!--= {name} {place} {form} -->–<!--/-->"
        form = form.removeprefix(LATER)
        return f"<!--= {name} {place} {form} -->{shown(value, form)}<!--/-->"

    return MARK.sub(fresh, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page.read_text(encoding="utf-8")), encoding="utf-8")
