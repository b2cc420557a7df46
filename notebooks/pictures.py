"""Small pictures for the notebooks, drawn as SVG: nothing to install."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from IPython.display import SVG

COLOURS = ("#2f6fb2", "#c2410c", "#5a9367", "#8d6a9f", "#b8860b", "#56b4e9", "#111111")
WIDTH, HEIGHT, LEFT, TOP = 420, 240, 64, 14
Places = Sequence[tuple[float, float]]


def chart(lines: Mapping[str, Places], marks: Mapping[str, Places] = {}, *, across: str, up: str,
          stairs: bool = False) -> SVG:  # fmt: skip
    """Lines (stairs for frontiers) and single marks over two linear axes, with a key."""
    spots = [spot for places in (*lines.values(), *marks.values()) for spot in places]
    (x0, x1), (y0, y1) = (_span([spot[i] for spot in spots]) for i in (0, 1))

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - x0) / (x1 - x0) * WIDTH, TOP + (1 - (y - y0) / (y1 - y0)) * HEIGHT

    parts = [f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cbd2d9"/>']
    for share in (0.1, 0.5, 0.9):
        x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
        parts.append(
            f'<text x="{at(x, y)[0]:.0f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{x:.3g}</text>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{at(x, y)[1] + 4:.0f}" text-anchor="end">{y:.3g}</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{escape(across)}</text>'
    )
    turned = f'transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)"'
    parts.append(f'<text {turned} text-anchor="middle">{escape(up)}</text>')
    for number, (name, places) in enumerate((*lines.items(), *marks.items())):
        colour, placed = COLOURS[number % len(COLOURS)], [at(*spot) for spot in places]
        if name in lines:
            parts.append(
                f'<path d="{_path(placed, stairs)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        radius = 2 if name in lines else 5
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in placed]
        y = TOP + 12 + 17 * number
        parts.append(f'<circle cx="{LEFT + WIDTH + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 26}" y="{y}">{escape(name)}</text>')
    return _svg(parts, LEFT + WIDTH + 190, TOP + HEIGHT + 44)


def network(places: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str, str]],
            removed: Sequence[str] = ()) -> SVG:  # fmt: skip
    """Operators as circles at ``places`` (columns and rows) and named edges; parallel ones are bent."""
    centre = {name: (60 + 130 * x, 40 + 70 * y) for name, (x, y) in places.items()}
    parts = []
    for number, (a, b, name) in enumerate(edges):
        (ax, ay), (bx, by) = centre[a], centre[b]
        twins = [i for i, edge in enumerate(edges) if {*edge[:2]} == {a, b}]
        bend = 0 if len(twins) == 1 else 60 * (twins.index(number) - (len(twins) - 1) / 2)
        mx, my = (ax + bx) / 2, (ay + by) / 2 + bend
        parts.append(f'<path d="M{ax} {ay}Q{mx} {my + bend / 2} {bx} {by}" fill="none" stroke="#7b8794"/>')
        beside = (ay + by) / 4 + (my + bend / 2) / 2 + (16 if bend > 0 else -6)
        parts.append(f'<text x="{mx}" y="{beside}" text-anchor="middle" fill="#52606d">{escape(name)}</text>')
    for name, (x, y) in centre.items():
        fill, ink = ("#f5f7fa", "#cbd2d9") if name in removed else ("#e3eefa", "#2f6fb2")
        dash = ' stroke-dasharray="4 3"' if name in removed else ""
        parts.append(f'<circle cx="{x}" cy="{y}" r="20" fill="{fill}" stroke="{ink}"{dash}/>')
        parts.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">{escape(name)}</text>')
    width, height = (max(c[i] for c in centre.values()) + 60 for i in (0, 1))
    return _svg(parts, width, height)


def _svg(parts: Sequence[str], width: float, height: float) -> SVG:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
    return SVG(head + ' font-family="sans-serif" font-size="13" fill="#1f2933">' + "".join(parts) + "</svg>")


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def _path(placed: Places, stairs: bool) -> str:
    path = "M{:.1f} {:.1f}".format(*placed[0])
    for x, y in placed[1:]:
        path += f"H{x:.1f}V{y:.1f}" if stairs else f"L{x:.1f} {y:.1f}"
    return path
