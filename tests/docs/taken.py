"""The sentence above README.md's tables: which was taken from which commit, on which machine and when."""

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
    groups: dict[str, list[str]] = {}
    for table, result in tables.items():
        by_origin: dict[str, list[str]] = {}
        for row, origin in origins(result):
            by_origin.setdefault(origin, []).append(row)
        for origin, rows in by_origin.items():
            whole = len(by_origin) == 1
            groups.setdefault(origin, []).append(table if whole else f"{table} ({joined(rows)})")
    if len(groups) == 1:
        return f"All of it was taken {next(iter(groups))}."
    told = "; ".join(f"{joined(names)} {origin}" for origin, names in groups.items())
    return f"The tables were not taken from one commit on one machine: {told}."


def origins(result: Result) -> Iterator[tuple[str, str]]:
    """(a row's name, its commit, processor and date in words); once without a name where rows do not say."""
    rows = [row for row in (*result.get("rows", ()), *result.get("results", ())) if "taken" in row]
    for row in rows:
        yield str(row.get("model", row.get("key"))), _origin(result, row["taken"])
    if not rows:
        yield "", _origin(result, {**result, "processor": result["machine"]["processor"]})


def _origin(result: Result, part: Mapping[str, Any]) -> str:
    machine = result["machine"]
    cores = f" with {machine['cores']} cores" if machine["processor"] == part["processor"] else ""
    return f"on {result['date']} from {named(part)} on {part['processor']}{cores}"


def joined(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
