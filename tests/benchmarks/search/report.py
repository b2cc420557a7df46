"""Tables and plots of the search's benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.benchmarks.machine import described, part_described
from tests.benchmarks.search.published import told

Series = dict[str, list[tuple[float, float]]]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f", "#b8860b")
DRAWN = {
    "ours_s": "ours",
    "kernels_ldp_s": "FT-LDP, our kernels",
    "ldp_s": "FT-LDP",
    "elimination_s": "FT-Elimination",
}
"""What of the section ``published`` is drawn."""
WIDTH, HEIGHT, LEFT, TOP, KEY = 360, 260, 60, 40, 190


def markdown(results: dict, stem: str) -> str:
    """One table per section; ``stem`` names the picture beside it."""
    lines = [f"# Search, {results['date']}", "", f"Taken from {described(results)}.", ""]
    lines += [f"![search time against layers, configurations and points]({stem}.svg)", ""]
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


def plots(results: dict) -> str:
    """Search time against layers, configurations and points, both scales logarithmic, as one SVG."""
    by_layers: Series = {}
    by_points: Series = {}
    for row in results.get("published", []):
        for key, name in DRAWN.items():
            if isinstance(row.get(key), float):
                label = f"{row['model']}, {name}"
                by_layers.setdefault(label, []).append((row["layers"], row[key]))
                by_points.setdefault(label, []).append((row["points"], row[key]))
    by_configurations: Series = {}
    for row in results.get("scaling", []):
        if "seconds" in row:
            label = f"GPT, {row['layers']} layers"
            place = (row["most_configurations"], row["seconds"])
            if row["swept"] == "mesh":
                by_configurations.setdefault(label, []).append(place)
            else:
                label = f"GPT, mesh {row['mesh']}, ours"
                by_layers.setdefault(label, []).append((row["layers"], row["seconds"]))
                by_points.setdefault(label, []).append((row["points"], row["seconds"]))
    charts = [
        _chart("layers", by_layers),
        _chart("configurations of an operator", by_configurations),
        _chart("points on the frontier", by_points),
    ]
    height = HEIGHT + TOP + 50
    body = "".join(f'<g transform="translate({i * (WIDTH + KEY)},0)">{c}</g>' for i, c in enumerate(charts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * (WIDTH + KEY)}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them on short axes."""
    steps = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [s * 10.0**e for e in range(first, last + 1) for s in steps]
    return [t for t in found if low <= t * 1.0001 and t <= high * 1.0001]


def _chart(title: str, series: Series) -> str:
    head = f'<text x="{LEFT}" y="20" font-size="13">search time (s) against {escape(title)}</text>'
    points = [p for line in series.values() for p in line if min(p) > 0]
    if not points:
        return head + f'<text x="{LEFT}" y="60">not measured in this run</text>'
    spans = [_span([p[i] for p in points]) for i in (0, 1)]

    def place(value: float, axis: int) -> float:
        low, high = spans[axis]
        share = math.log(value / low) / math.log(high / low)
        return LEFT + share * (WIDTH - LEFT) if axis == 0 else TOP + (1 - share) * HEIGHT

    parts = [head]
    for tick in _ticks(*spans[0]):
        x = place(tick, 0)
        parts.append(f'<path d="M{x:.1f} {TOP}V{TOP + HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(*spans[1]):
        y = place(tick, 1)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5 3"' if "FT-" in name else ""
        spots = [(place(x, 0), place(y, 1)) for x, y in sorted(line) if min(x, y) > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in spots]
        y = TOP + 8 + 15 * i
        parts.append(f'<path d="M{WIDTH + 8} {y}h18" stroke="{colour}"{dash}/>')
        parts.append(f'<text x="{WIDTH + 30}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low / 1.2, high * 1.2) if high > low else (low / 2, high * 2)
