"""The operator graph collapsed by module, coloured by configuration, with positions for a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.units import format_bytes

from .detail import GraphEdge
from .layers import layers, positions
from .operators import OperatorRow, split_in_stage
from .units import plural

_MOST_NODES = 96
"""The most boxes that can be read on one screen (and 5,000 nodes were measured to pan at 374 ms a frame)."""
STEP, SPREAD = 182.0, 58.0
"""The distances from box to box, so that the bytes of an edge between neighbours can be read between them."""
ASPECT, NARROW_ASPECT = 2.7, 0.8
"""The width by height of the picture's place, in a wide window and in a narrow one."""
MOST_COLOURS = 7


@dataclass(frozen=True)
class Node:
    """A module, or an operator if modules are not known.

    Attributes:
        groups: the operator groups in it.
        axes: the configuration that most of them have; ``mixed`` says that others differ.
        colour: the number of that configuration, ``MOST_COLOURS`` for the rare ones.
        again: how many of its groups are recomputed in backward.
        stage: its stage of a pipeline, "" without one.
        tip: everything to say about it, in lines.
    """

    key: str
    label: str
    groups: tuple[str, ...]
    axes: str
    mixed: bool
    colour: int
    x: float
    y: float
    again: int = 0
    stage: str = ""
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """The tensors that go from one node to another, in bytes of whole tensors; ``tip`` as for nodes."""

    source: str
    target: str
    resharded: bool
    bytes: int
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The nodes, the links between them, and the meaning of the colours."""

    nodes: tuple[Node, ...]
    edges: tuple[Link, ...]
    legend: tuple[tuple[str, int], ...]
    depth: int


def picture(rows: Sequence[OperatorRow], edges: Iterable[GraphEdge], aspect: float = ASPECT) -> Picture:
    """Collapse to as many module levels as stay under :data:`_MOST_NODES` nodes, and place them.

    Args:
        rows: operators in the model's order.
        edges: the edges between the rows' groups.
        aspect: the wanted width by height.
    """
    depth = _depth(rows)
    module_of = {o.group: _key(o, depth) for o in rows}
    inside: dict[str, list[OperatorRow]] = {}
    for o in rows:
        inside.setdefault(module_of[o.group], []).append(o)
    joined: dict[tuple[str, str], bool] = {}
    sent: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for edge in edges:
        a, b = module_of.get(edge.source), module_of.get(edge.target)
        if a is not None and b is not None and a != b:
            joined[a, b] = joined.get((a, b), False) or edge.resharded
            # A tensor that several operators of a module read goes there once.
            sent.setdefault((a, b), {}).update(edge.tensors)
    kind_of = _kinds(rows)
    kinds = Counter(kind_of[o.group] for o in rows)
    # Colours go to the commonest configurations; more than a few cannot be distinguished.
    numbers = {axes: i for i, (axes, _) in enumerate(kinds.most_common(MOST_COLOURS))}
    # Without edges (an old file), operators follow each other in the model's order.
    ordered = layers(list(inside), joined) if joined else [[key] for key in inside]
    place = positions(ordered, aspect=aspect, step=STEP, spread=SPREAD)
    nodes = []
    writes: dict[str, dict[str, tuple[int, str]]] = {}
    for (a, _), tensors in sent.items():
        writes.setdefault(a, {}).update(tensors)
    for key, members in inside.items():
        axes = Counter(kind_of[o.group] for o in members)
        top = axes.most_common(1)[0][0]
        x, y = place[key]
        nodes.append(
            Node(
                key, _label(key), tuple(o.group for o in members), top, len(axes) > 1,
                numbers.get(top, MOST_COLOURS), x, y, sum(o.recomputed for o in members), _stage(members),
                _node_tip(key, members, writes.get(key, {})),
            )
        )  # fmt: skip
    legend = [*numbers.items()]
    if len(kinds) > MOST_COLOURS:
        legend.append((f"{len(kinds) - MOST_COLOURS} rarer ones", MOST_COLOURS))
    links = tuple(_link(a, b, resharded, sent[a, b]) for (a, b), resharded in joined.items())
    return Picture(tuple(nodes), links, tuple(legend), depth)


_MOST_TENSORS = 4
"""The most tensors that a tooltip names; it says how many more there are."""


def _tensor_lines(tensors: Mapping[str, tuple[int, str]]) -> tuple[str, ...]:
    lines = [f"{words}, {format_bytes(size)}" for size, words in tensors.values()]
    more = len(lines) - _MOST_TENSORS
    return (*lines[:_MOST_TENSORS], *((f"and {plural(more, 'more tensor')}",) if more > 0 else ()))


def _node_tip(
    key: str, members: Sequence[OperatorRow], writes: Mapping[str, tuple[int, str]]
) -> tuple[str, ...]:
    axes = Counter(o.axes for o in members)
    again = sum(o.recomputed for o in members)
    return (
        key,
        f"{plural(len(members), 'operator')}: "
        + "; ".join(f"{words} ({count})" if len(axes) > 1 else words for words, count in axes.most_common(3)),
        *((f"{again} of them computed again in backward",) if again else ()),
        *(("hands on:", *_tensor_lines(writes)) if writes else ()),
    )


def _link(source: str, target: str, resharded: bool, tensors: Mapping[str, tuple[int, str]]) -> Link:
    whole = sum(size for size, _ in tensors.values())
    head = f"{source} → {target}" + (", resharded on the way" if resharded else "")
    return Link(source, target, resharded, whole, (head, *_tensor_lines(tensors)))


def _kinds(rows: Sequence[OperatorRow]) -> dict[str, str]:
    """Return what a colour says about each operator: how it is split; if all are split alike, its stage."""
    splits = {o.group: split_in_stage(o.axes)[1] for o in rows}
    alike = len(set(splits.values())) == 1
    return {o.group: o.axes if alike else splits[o.group] for o in rows}


def _stage(members: Sequence[OperatorRow]) -> str:
    """Return the stages that a module's operators are in: ``stage 1``, or ``stages 0, 1``."""
    found = sorted({number for o in members if (number := split_in_stage(o.axes)[0]) is not None})
    return f"stage{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}" if found else ""


def _key(o: OperatorRow, depth: int) -> str:
    return ".".join(o.module.split(".")[:depth]) if o.module else o.group


def _depth(rows: Sequence[OperatorRow]) -> int:
    """Return the deepest level of modules that keeps the picture small, at least one."""
    deepest = max((o.module.count(".") + 1 for o in rows if o.module), default=1)
    for depth in range(deepest, 1, -1):
        if len({_key(o, depth) for o in rows}) <= _MOST_NODES:
            return depth
    return 1


def _label(key: str) -> str:
    """Return the last parts of a module's path, with the number of its layer if that is among them."""
    parts = key.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    start = max(numbered[-1] - 1, 0) if numbered else max(len(parts) - 2, 0)
    return ".".join(parts[start:])
