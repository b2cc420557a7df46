"""A frontier as a small SVG, drawn without any plotting library: for notebooks, READMEs and reports."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from xml.sax.saxutils import escape

from tensoropt.files import write_text
from tensoropt.plan.findings import Findings
from tensoropt.plan.frontier_table import marks_of, units_of
from tensoropt.units import format_bytes, format_seconds

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 52
INK, GRID, LINE, MARK = "#1f2933", "#e4e7eb", "#2f6fb2", "#c2410c"
TICKS = 6
"""Lines of the grid each way: so few that their labels have room in a picture of 720 by 400 units."""


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two ends, at most about :data:`TICKS`."""
    if high <= low:
        return [low]
    raw = (high - low) / TICKS
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(f * base for f in (1, 2, 5, 10) if f * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def frontier_svg(found: Findings, path: str | os.PathLike[str], *, title: str) -> None:
    """Write the picture that :func:`draw_frontier` gives into a file."""
    write_text(path, draw_frontier(found, title=title) + "\n")


def draw_frontier(
    found: Findings, *, title: str, indices: Sequence[int] | None = None, chosen: int | None = None
) -> str:
    """The SVG of memory against time as a staircase, with the ends and the knee named.

    Args:
        indices: ascending, of the points to draw; None for all. The ends and the knee must be among them.
        chosen: a point of ``all_points`` that is marked, wherever it lies.
    """
    (size_name, size), (time_name, second) = units_of(found)
    drawn = range(len(found.points)) if indices is None else indices
    xs = [found.points[i].memory_bytes / size for i in drawn]
    ys = [found.points[i].time_s / second for i in drawn]
    reach_x, reach_y = list(xs), list(ys)
    if chosen is not None:
        reach_x.append(found.all_points[chosen].memory_bytes / size)
        reach_y.append(found.all_points[chosen].time_s / second)
    right, left_end, high, low = max(reach_x), min(reach_x), max(reach_y), min(reach_y)
    pad_x, pad_y = 0.04 * (right - left_end) or 0.1 * left_end, 0.06 * (high - low) or 0.1 * high
    x0, x1, y0, y1 = left_end - pad_x, right + 3 * pad_x, low - 2 * pad_y, high + pad_y

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16">{escape(title)}</text>',
    ]
    for x in ticks(x0, x1):
        px, base = at(x, y0)
        parts.append(f'<path d="M{px:.1f} {TOP}V{base:.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{px:.1f}" y="{base + 18:.1f}" text-anchor="middle">{x:g}</text>')
    for y in ticks(y0, y1):
        left, py = at(x0, y)
        parts.append(f'<path d="M{left:.1f} {py:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">memory per device, {size_name}</text>'
        f'<text transform="translate(18 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"time per step, {time_name}</text>"
    )
    stairs = "M{:.1f} {:.1f}".format(*at(xs[0], ys[0]))
    for x, y in zip(xs[1:], ys[1:], strict=True):
        stairs += "H{:.1f}V{:.1f}".format(*at(x, y))
    parts.append(f'<path d="{stairs}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    for x, y in zip(xs, ys, strict=True):
        px, py = at(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="{LINE}"/>')
    marks = marks_of(found)
    if chosen is not None:
        # Drawn last, over the others; a point that has a name keeps it.
        marks[chosen] = ["chosen", *marks.pop(chosen, [])]
    for index, words in marks.items():
        point = found.all_points[index]
        px, py = at(point.memory_bytes / size, point.time_s / second)
        last = index == len(found.points) - 1 and index > 0
        # The stairs come from above left: the last point's words stand below them, all others above.
        anchor, across, down = ("end", 4, 22) if last else ("start", 10, -10)
        figures = f"{format_bytes(point.memory_bytes)}, {format_seconds(point.time_s)}"
        label = f"{', '.join(words)}: {figures}"
        if index == chosen:
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="9" fill="none" stroke="{MARK}" stroke-width="2.5"/>'
            )
            # Beside the point, so that the knee's words and the leanest's have their usual places.
            across, down, anchor = (-14, 24, "end") if px > (LEFT + WIDTH - RIGHT) / 2 else (14, 24, "start")
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="{MARK}"/>')
        parts.append(
            f'<text x="{px + across:.1f}" y="{py + down:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
        )
    return "\n".join([*parts, "</svg>"])
