"""The sentence above tables of results: which was taken from which commit, on which machine and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.machine import named

Result = Mapping[str, Any]


def sentence(tables: Mapping[str, Result]) -> str:
    """What all tables were taken from, or, where they differ, which from what.

    Args:
        tables: results by the name that the page has for their table.
    """
    names: dict[str, list[str]] = {}
    dates: dict[str, set[str]] = {}
    for table, result in tables.items():
        rows: dict[str, list[str]] = {}
        for row, origin in origins(result):
            rows.setdefault(origin, []).append(row)
        for origin, of in rows.items():
            names.setdefault(origin, []).append(table if len(rows) == 1 else f"{table} ({joined(of)})")
            dates.setdefault(origin, set()).add(result["date"])
    told = {origin: f"from {origin} on {joined(sorted(dates[origin]))}" for origin in names}
    if len(told) == 1:
        return f"Taken {next(iter(told.values()))}."
    each = "; ".join(f"{joined(names[origin])} {words}" for origin, words in told.items())
    return f"Not all was taken from one commit on one machine: {each}."


def origins(result: Result) -> Iterator[tuple[str, str]]:
    """(a row's name, its commit and machine in words); once without a name where no row has its own."""
    rows = [row for row in (*result.get("rows", ()), *result.get("results", ())) if "taken" in row]
    for row in rows:
        yield str(row.get("model", row.get("key"))), _origin(result, row["taken"])
    if not rows:
        yield "", _origin(result, {**result, "processor": result["machine"]["processor"]})


def _origin(result: Result, part: Mapping[str, Any]) -> str:
    machine = result["machine"]
    size = f", {machine['cores']} cores" if machine["processor"] == part["processor"] else ""
    commit = named(part) if part.get("commit") else "unrecorded commits"
    return f"{commit} on a machine ({part['processor']}{size})"


def joined(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
