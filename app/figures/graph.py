"""The picture of the operator graph for Cytoscape: elements with positions, and a stylesheet."""

from __future__ import annotations

from typing import Any

from tensoropt.units import format_bytes

from ..views.picture import MOST_COLOURS, Picture
from .palette import palette

_Json = dict[str, Any]


def elements(picture: Picture) -> list[_Json]:
    """Return nodes with their positions, then edges."""
    nodes = [
        {
            "data": {
                "id": n.key, "label": n.label + (f"\n{n.below}" if n.below else ""), "tip": list(n.tip),
                "axes": n.axes + (" (mostly)" if n.mixed else ""), "groups": list(n.groups),
                "colour": n.colour, "closed": n.closed,
            },
            "position": {"x": n.x, "y": n.y},
            "classes": " ".join(
                name for name, is_so in _classes(n) if is_so
            ),
        }
        for n in picture.nodes
    ]  # fmt: skip
    edges = [
        {
            "data": {
                "source": e.source, "target": e.target, "tip": list(e.tip),
                "bytes": format_bytes(e.bytes) if e.bytes else "",
            },
            "classes": " ".join(
                name for name, is_so in (("resharded", e.resharded), ("back", e.back)) if is_so
            ),
        }
        for e in picture.edges
    ]  # fmt: skip
    return nodes + edges


def _classes(node: Any) -> tuple[tuple[str, Any], ...]:
    return ("mixed", node.mixed), ("again", node.again), ("below", node.below), ("closed", node.closed)


def stylesheet(scheme: str) -> list[_Json]:
    """Return boxes with their names inside; resharded edges are thick, mixed boxes have a dashed border,
    recomputed ones a double one."""
    colours = palette(scheme)
    styles: dict[str, _Json] = {
        "node": {
            "shape": "round-rectangle", "width": 132, "height": 40, "label": "data(label)",
            "text-valign": "center", "text-halign": "center", "text-wrap": "ellipsis",
            "text-max-width": "118px", "font-size": 13, "font-family": "sans-serif", "color": colours.ink,
            "background-color": colours.surface, "border-width": 4,
        },
        **{f"node[colour = {i}]": {"border-color": colours.series[i]} for i in range(MOST_COLOURS + 1)},
        # Blocks and stage have a line of their own.
        "node.below": {"text-wrap": "wrap", "font-size": 12},
        "node.closed": {"background-color": colours.grid},
        "node.again": {"border-style": "double", "border-width": 6},
        "node.mixed": {"border-style": "dashed"},
        "edge": {
            "width": 1.5, "line-color": colours.faded, "target-arrow-color": colours.faded,
            "target-arrow-shape": "triangle", "arrow-scale": 0.8, "curve-style": "straight", "opacity": 0.7,
            "label": "data(bytes)", "font-size": 12, "min-zoomed-font-size": 8, "color": colours.muted,
            "text-background-color": colours.surface, "text-background-opacity": 0.85,
            "text-background-padding": "1px",
        },
        "edge.back": {
            "curve-style": "unbundled-bezier",
            "control-point-distances": [48],
            "control-point-weights": [0.5],
            "line-style": "dashed",
        },
        "edge.resharded": {"width": 3.5, "line-color": colours.select, "target-arrow-color": colours.select},
        "node:selected, node.linked, node.found": {
            "background-color": colours.select, "color": colours.surface
        },
    }  # fmt: skip
    return [{"selector": selector, "style": style} for selector, style in styles.items()]
