"""The operator graph collapsed by module, coloured by configuration, with positions for a picture.

The positions of a directed graph's nodes: layers by longest path, few crossings, long chains wrapped.
Available layouts (dagre, klay, elk, dot) took seconds to minutes on training graphs of a thousand nodes; this
takes 0.06 s for 5,000. The method is Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of
Hierarchical System Structures" (1981): rank, then sweep by barycentres.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.units import format_bytes

from .operators import GraphEdge, OperatorRow, split_in_stage
from .units import plural

_SWEEPS = 4


def layers(nodes: Sequence[Hashable], edges: Iterable[tuple[Hashable, Hashable]]) -> list[list[Hashable]]:
    """Return nodes by rank (longest path from a source), ordered within each rank to cross few edges.

    Edges that close a cycle, which collapsed graphs can have, are left out of the ranking: those that lead
    back in the given order of ``nodes``.
    """
    place = {node: i for i, node in enumerate(nodes)}
    before: dict[Hashable, set[Hashable]] = defaultdict(set)
    after: dict[Hashable, set[Hashable]] = defaultdict(set)
    for a, b in edges:
        if place[a] < place[b]:
            before[b].add(a)
            after[a].add(b)
    rank: dict[Hashable, int] = {}
    for node in nodes:
        rank[node] = max((rank[p] + 1 for p in before[node]), default=0)
    ranked: list[list[Hashable]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in nodes:
        ranked[rank[node]].append(node)
    # Down by what is before, then up by what is behind, in turn. Their number is an assumption: more of them
    # take longer and may cross fewer edges.
    for sweep in range(_SWEEPS):
        neighbours = before if sweep % 2 == 0 else after
        position = {node: i / max(len(layer) - 1, 1) for layer in ranked for i, node in enumerate(layer)}
        for layer in ranked if sweep % 2 == 0 else reversed(ranked):
            layer.sort(key=lambda n: _centre(n, neighbours, position))
            position.update({node: i / max(len(layer) - 1, 1) for i, node in enumerate(layer)})
    return ranked


def _centre(
    node: Hashable, neighbours: Mapping[Hashable, set[Hashable]], position: Mapping[Hashable, float]
) -> float:
    near = neighbours[node]
    return sum(position[n] for n in near) / len(near) if near else position[node]


def positions(
    ordered: Sequence[Sequence[Hashable]], *, aspect: float, step: float, spread: float
) -> dict[Hashable, tuple[float, float]]:
    """Return (x, y) of every node: layers follow each other to the right and wrap like text.

    Args:
        aspect: the wanted width by height of the whole; the number of layers in a row is chosen for it.
        step: the distance from one layer to the next.
        spread: the distance from one node of a layer to the next.
    """

    def shape(per_row: int) -> float:
        rows = [ordered[i : i + per_row] for i in range(0, len(ordered), per_row)]
        height = sum(max(map(len, row)) + 0.5 for row in rows) * spread
        return max(per_row * step / aspect, height)

    per_row = min(range(1, len(ordered) + 1), key=shape, default=1)
    placed: dict[Hashable, tuple[float, float]] = {}
    top = 0.0
    for first in range(0, len(ordered), per_row):
        row = ordered[first : first + per_row]
        height = max(map(len, row)) * spread
        for column, layer in enumerate(row):
            start = top + (height - len(layer) * spread) / 2
            for i, node in enumerate(layer):
                placed[node] = (column * step, start + (i + 0.5) * spread)
        top += height + spread * 0.5
    return placed


_MOST_NODES = 96
"""The most boxes that can be read on one screen (and 5,000 nodes were measured to pan at 374 ms a frame)."""
STEP, _SPREAD = 182.0, 58.0
"""The distances from box to box, so that the bytes of an edge between neighbours can be read between them."""
ASPECT, NARROW_ASPECT = 2.7, 0.8
"""The width by height of the picture's place, in a wide window and in a narrow one."""
MOST_COLOURS = 7


@dataclass(frozen=True)
class _Node:
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
class DrawnEdge:
    """The tensors that go from one node to another, in bytes of whole tensors; ``tip`` as for nodes."""

    source: str
    target: str
    resharded: bool
    bytes: int
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The nodes, the links between them, and the meaning of the colours."""

    nodes: tuple[_Node, ...]
    edges: tuple[DrawnEdge, ...]
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
    place = positions(ordered, aspect=aspect, step=STEP, spread=_SPREAD)
    nodes = []
    writes: dict[str, dict[str, tuple[int, str]]] = {}
    for (a, _), tensors in sent.items():
        writes.setdefault(a, {}).update(tensors)
    for key, members in inside.items():
        axes = Counter(kind_of[o.group] for o in members)
        top = axes.most_common(1)[0][0]
        x, y = place[key]
        nodes.append(
            _Node(
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
    recomputed = sum(o.recomputed for o in members)
    return (
        key,
        f"{plural(len(members), 'operator')}: "
        + "; ".join(f"{words} ({count})" if len(axes) > 1 else words for words, count in axes.most_common(3)),
        *((f"{recomputed} of them computed again in backward",) if recomputed else ()),
        *(("hands on:", *_tensor_lines(writes)) if writes else ()),
    )


def _link(source: str, target: str, resharded: bool, tensors: Mapping[str, tuple[int, str]]) -> DrawnEdge:
    whole = sum(size for size, _ in tensors.values())
    head = f"{source} → {target}" + (", resharded on the way" if resharded else "")
    return DrawnEdge(source, target, resharded, whole, (head, *_tensor_lines(tensors)))


def _kinds(rows: Sequence[OperatorRow]) -> dict[str, str]:
    """Return what a colour says about each operator: how it is split; if all are split alike, its stage."""
    splits = {o.group: split_in_stage(o.axes)[1] for o in rows}
    alike = len(set(splits.values())) == 1
    return {o.group: o.axes if alike else splits[o.group] for o in rows}


def _stage(members: Sequence[OperatorRow]) -> str:
    """Return the stages that a module's operators are in: ``stage 1``, or ``stages 0, 1``."""
    stages = sorted({number for o in members if (number := split_in_stage(o.axes)[0]) is not None})
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""


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
