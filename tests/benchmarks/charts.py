"""Charts with logarithmic axes as SVG, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f", "#b8860b")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 300, 240, 62, 40, 44, 150
Places = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        lines: polylines by name; drawn as stairs with ``stairs``.
        marks: single points by name.
        limits: vertical lines by name: a capacity.
    """

    title: str
    across: str
    up: str
    lines: dict[str, Places] = field(default_factory=dict)
    marks: dict[str, Places] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    stairs: bool = False


def ticks(low: float, high: float) -> list[float]:
    """Powers of ten, on short axes with as many between them as it takes to see three."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found: list[float] = []
    for steps in ((10,), (10, 20, 50), range(10, 100, 10), range(10, 100, 5), range(10, 100)):
        every = [s * 10.0 ** (e - 1) for e in range(first, last + 1) for s in steps]
        found = [t for t in every if low <= t * 1.0001 and t <= high * 1.0001]
        if len(found) >= 3:
            break
    return found


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)


def figure(charts: Sequence[Chart], columns: int = 2) -> str:
    """Charts in rows of ``columns``, each with its key at its right."""
    step_x, step_y = LEFT + WIDTH + KEY, TOP + HEIGHT + BOTTOM
    rows = -(-len(charts) // columns)
    body = "".join(
        f'<g transform="translate({i % columns * step_x},{i // columns * step_y})">{_drawn(c)}</g>'
        for i, c in enumerate(charts)
    )
    size = f'viewBox="0 0 {columns * step_x} {rows * step_y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" '
        f'fill="#1f2933"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _drawn(chart: Chart) -> str:
    head = f'<text x="{LEFT}" y="22" font-size="13">{escape(chart.title)}</text>'
    drawn = (*chart.lines.values(), *chart.marks.values())
    spots = [p for places in drawn for p in places if min(p) > 0]
    spans = _span([p[0] for p in spots] + list(chart.limits.values())), _span([p[1] for p in spots])

    def share(value: float, low: float, high: float) -> float:
        return math.log(value / low) / math.log(high / low)

    def placed(places: Places) -> Places:
        """Where points of the chart are in the picture."""
        across, up = spans
        return [(LEFT + share(x, *across) * WIDTH, TOP + (1 - share(y, *up)) * HEIGHT) for x, y in places]

    (low_x, _), (low_y, _) = spans
    floor = TOP + HEIGHT
    parts = [head]
    for tick in ticks(*spans[0]):
        [(x, _)] = placed([(tick, low_y)])
        parts.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(*spans[1]):
        [(_, y)] = placed([(low_x, tick)])
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = LEFT + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{floor + 32}" text-anchor="middle">{escape(chart.across)}</text>')
    turned = f'transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(chart.up)}</text>')
    for name, value in chart.limits.items():
        [(x, _)] = placed([(value, low_y)])
        parts.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="#9aa5b1" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="{TOP + 12}" text-anchor="end">{escape(name)}</text>')
    for key, (name, places) in enumerate((*chart.lines.items(), *chart.marks.items())):
        colour = COLOURS[key % len(COLOURS)]
        if key >= len(chart.lines):
            sign = f'<circle cx="8" cy="0" r="4" fill="{colour}"/>'
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in placed(places)]
        else:
            sign = f'<path d="M0 0h16" stroke="{colour}" stroke-width="2"/>'
            line = placed([p for p in sorted(places) if min(p) > 0])
            way = f'<path d="{_path(line, chart.stairs)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            parts.append(way)
            if not chart.stairs:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in line]
        parts.append(_key(key, name, sign))
    return "".join(parts)


def _key(number: int, name: str, sign: str) -> str:
    place = f'transform="translate({LEFT + WIDTH + 8},{TOP + 10 + 16 * number})"'
    return f'<g {place}>{sign}<text x="20" y="4">{escape(name)}</text></g>'


def _path(placed: Places, stairs: bool) -> str:
    path = f"M{placed[0][0]:.1f} {placed[0][1]:.1f}"
    for x, y in placed[1:]:
        path += f"H{x:.1f}V{y:.1f}" if stairs else f"L{x:.1f} {y:.1f}"
    return path
