"""The dated result: a table per target, and every survivor with what was decided about it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.machine import dated, described, write
from tests.benchmarks.program import page, table
from tests.mutants.mutant import ROOT, Mutant, file_of
from tests.mutants.sample import generated, handmade

DECISIONS = Path(__file__).parent / "decisions.yaml"
KINDS = ("equivalent", "performance only", "accepted")
OUTCOMES = ("killed", "timed out", "survived")
Results = dict[str, list[tuple[Mutant, dict[str, Any]]]]


def decisions(path: Path = DECISIONS) -> dict[str, dict[str, str]]:
    """What was decided about survivors, by id."""
    found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for name, entry in found.items():
        if entry["decision"] not in KINDS or not entry["reason"].strip():
            raise ValueError(
                f"{path.name}: {name} needs a reason and one of the decisions {', '.join(KINDS)}"
            )
    return found


def outdated(decided: dict[str, dict[str, str]]) -> list[str]:
    """Which decisions are about mutants that the source no longer has."""
    files = set(map(file_of, decided))
    there = {m.id for file in files if (ROOT / file).exists() for m in generated(file)}
    there |= {m.id for m in handmade()[0]}
    return [f"{name} has a decision and is not there" for name in decided if name not in there]


def write_report(results: Results, complaints: list[str], about: Mapping[str, Any], *, quick: bool) -> str:
    """Write the result beside the benchmarks' (to ``out/`` where it is of a part) and give its text.

    Args:
        about: date, commit and machine, from when the first mutant was tried.
    """
    decided = decisions()
    data = {
        **about,
        "load_at_end": round(os.getloadavg()[0], 2),
        "no_longer_fitting": [*complaints, *outdated(decided)],
        "targets": {name: _figures(found, decided) for name, found in results.items()},
        "mutants": [_row(name, m, record, decided) for name, found in results.items() for m, record in found],
    }
    text = markdown(data)
    write(dated("mutants", "mutants", quick=quick), data, text)
    return text


def _figures(found: list[tuple[Mutant, dict[str, Any]]], decided: dict[str, Any]) -> dict[str, Any]:
    counts = Counter(record["outcome"] for _, record in found)
    left = [m.id for m, record in found if record["outcome"] == "survived"]
    same = [i for i in left if decided.get(i, {}).get("decision") in ("equivalent", "performance only")]
    return {
        "mutants": len(found),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "same_results": len(same),
        "undecided": sum(i not in decided for i in left),
        "seconds": round(sum(record["seconds"] for _, record in found), 1),
    }


def _row(target: str, mutant: Mutant, record: dict[str, Any], decided: dict[str, Any]) -> dict[str, Any]:
    row = {key: getattr(mutant, key) for key in ("id", "line", "before", "after")} | {"target": target}
    row |= {key: record[key] for key in ("outcome", "by", "seconds")}
    return row | ({"decided": decided[mutant.id]} if mutant.id in decided else {})


def markdown(data: dict[str, Any]) -> str:
    """A result for people."""
    keys = ("mutants", *OUTCOMES, "same_results", "seconds")
    total = {k: sum(f[k] for f in data["targets"].values()) for k in keys}
    survivors = [row for row in data["mutants"] if row["outcome"] == "survived"]
    slow = [row for row in data["mutants"] if row["outcome"] == "timed out"]
    missing = "Made by hand or decided about, and no longer fitting the source:"
    return page(
        "# Changed places of the source, and whether a test noticed",
        f"{data['date']}, {described(data)}, load at the end {data['load_at_end']}",
        table(
            ["target", *keys[:-2], "of these change no result", "killed of the rest", "s each"],
            (
                [
                    name,
                    *(of[k] for k in keys[:-1]),
                    _share(of),
                    f"{of['seconds'] / max(of['mutants'], 1):.1f}",
                ]
                for name, of in {**data["targets"], "**all**": total}.items()
            ),
        ),
        "A time-out counts as killed. What survived:",
        table(["mutant", "before", "after", "decided", "why"], map(_cells, survivors)),
        "What timed out:" if slow else "",
        [f"- {row['id']}, in {row['by']}" for row in slow],
        missing if data["no_longer_fitting"] else "",
        [f"- {words}" for words in data["no_longer_fitting"]],
    )


def _cells(row: dict[str, Any]) -> list[str]:
    decided = row.get("decided", {"decision": "**undecided**", "reason": ""})
    return [row["id"], _code(row["before"]), _code(row["after"]), decided["decision"], decided["reason"]]


def _share(figures: dict[str, Any]) -> str:
    counted = figures["mutants"] - figures["same_results"]
    return f"{100 * (figures['killed'] + figures['timed out']) / counted:.1f} %" if counted else "–"


def _code(text: str) -> str:
    return "`" + text.replace("\n", " ⏎ ").replace("|", "\\|").replace("`", "'") + "`"
