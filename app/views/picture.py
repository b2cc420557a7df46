"""The operator graph collapsed by module, coloured by configuration, with places for a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .layers import layers, positions
from .plan import OperatorRow

MOST_NODES = 96
"""More boxes cannot be read on one screen (and 5,000 nodes were measured to pan at 374 ms a frame)."""
STEP, SPREAD = 150.0, 58.0
ASPECT, NARROW_ASPECT = 2.7, 0.8
"""Width by height of the place where the picture is drawn, on a wide window and on a narrow one."""
MOST_COLOURS = 7


@dataclass(frozen=True)
class Node:
    """One module, or one operator where modules are not known.

    Attributes:
        groups: the operator groups in it.
        axes: the configuration most of them have; ``mixed`` says that others differ.
        colour: number of that configuration, ``MOST_COLOURS`` for the rare ones.
    """

    key: str
    label: str
    groups: tuple[str, ...]
    axes: str
    mixed: bool
    colour: int
    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """Nodes, edges between their keys (a resharding is marked), and what the colours mean."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str, bool], ...]
    legend: tuple[tuple[str, int], ...]
    depth: int


def picture(
    rows: Sequence[OperatorRow], edges: Iterable[tuple[str, str, bool]], aspect: float = ASPECT
) -> Picture:
    """Collapse to as many module levels as stay under :data:`MOST_NODES` nodes, and place them.

    Args:
        rows: operators in the model's order.
        edges: (from group, to group, whether the tensor is resharded on the way).
        aspect: wanted width by height.
    """
    depth = _depth(rows)
    module_of = {o.group: _key(o, depth) for o in rows}
    inside: dict[str, list[OperatorRow]] = {}
    for o in rows:
        inside.setdefault(module_of[o.group], []).append(o)
    joined: dict[tuple[str, str], bool] = {}
    for a, b, resharded in edges:
        if a in module_of and b in module_of and module_of[a] != module_of[b]:
            joined[module_of[a], module_of[b]] = joined.get((module_of[a], module_of[b]), False) or resharded
    kinds = Counter(o.axes for o in rows)
    # Colours go to the commonest configurations; more than a few cannot be told apart.
    numbers = {axes: i for i, (axes, _) in enumerate(kinds.most_common(MOST_COLOURS))}
    # Without edges (an old file), operators follow each other in the model's order.
    ordered = layers(list(inside), joined) if joined else [[key] for key in inside]
    place = positions(ordered, aspect=aspect, step=STEP, spread=SPREAD)
    nodes = []
    for key, members in inside.items():
        axes = Counter(o.axes for o in members)
        top = axes.most_common(1)[0][0]
        x, y = place[key]
        nodes.append(
            Node(
                key, _label(key), tuple(o.group for o in members), top, len(axes) > 1,
                numbers.get(top, MOST_COLOURS), x, y,
            )
        )  # fmt: skip
    legend = [*numbers.items()]
    if len(kinds) > MOST_COLOURS:
        legend.append((f"{len(kinds) - MOST_COLOURS} rarer ones", MOST_COLOURS))
    return Picture(tuple(nodes), tuple((a, b, r) for (a, b), r in joined.items()), tuple(legend), depth)


def _key(o: OperatorRow, depth: int) -> str:
    return ".".join(o.module.split(".")[:depth]) if o.module else o.group


def _depth(rows: Sequence[OperatorRow]) -> int:
    """The deepest level of modules that keeps the picture small, at least one."""
    deepest = max((o.module.count(".") + 1 for o in rows if o.module), default=1)
    for depth in range(deepest, 1, -1):
        if len({_key(o, depth) for o in rows}) <= MOST_NODES:
            return depth
    return 1


def _label(key: str) -> str:
    """The last parts of a module's path, with the number of its layer if that is among them."""
    parts = key.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    start = max(numbered[-1] - 1, 0) if numbered else max(len(parts) - 2, 0)
    return ".".join(parts[start:])
