"""Tables of the search's benchmark."""

from __future__ import annotations

from tests.benchmarks.machine import described, part_described
from tests.benchmarks.search.published import told


def markdown(results: dict) -> str:
    """One table per section."""
    lines = [f"# Search, {results['date']}", "", f"Taken from {described(results)}.", ""]
    for section, rows in ((k, v) for k, v in results.items() if isinstance(v, list)):
        lines += [f"## {section}", "", f"Taken: {part_described(results['taken'][section])}.", ""]
        if section == "published" and "error" not in rows[0]:
            lines += [*told(rows), ""]
            continue
        columns = list(dict.fromkeys(c for row in rows for c in row))
        lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for row in rows:
            cells = [row.get(c, "") for c in columns]
            shown = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells]
            lines.append("| " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)
