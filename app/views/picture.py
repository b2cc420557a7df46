"""The operator graph by modules, coloured by configuration, with positions for a picture; equal
blocks are folded into one (:mod:`tensoropt.report.folds`).

The positions of a directed graph's nodes: layers by longest path, few crossings, long chains wrapped.
Available layouts (dagre, klay, elk, dot) took seconds to minutes on training graphs of a thousand nodes; this
takes 0.06 s for 5,000. The method is Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of
Hierarchical System Structures" (1981): rank, then sweep by barycentres.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensoropt.report.folds import boxes, keys
from tensoropt.report.step_parts import kind_of
from tensoropt.units import format_bytes

from .operators import GraphEdge, OperatorRow, split_in_stage, tail
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
    ordered: Sequence[Sequence[Hashable]], *, columns: int, step: float, spread: float
) -> dict[Hashable, tuple[float, float]]:
    """Return (x, y) of every node: layers follow each other to the right and wrap like text.

    Args:
        columns: the most layers in a row; rows are about equally long.
        step: the distance from one layer to the next.
        spread: the distance from one node of a layer to the next.
    """
    per_row = math.ceil(len(ordered) / max(math.ceil(len(ordered) / columns), 1))
    placed: dict[Hashable, tuple[float, float]] = {}
    top = 0.0
    for first in range(0, len(ordered), max(per_row, 1)):
        row = ordered[first : first + per_row]
        height = max(map(len, row)) * spread
        for column, layer in enumerate(row):
            start = top + (height - len(layer) * spread) / 2
            for i, node in enumerate(layer):
                placed[node] = (column * step, start + (i + 0.5) * spread)
        top += height + spread * 0.5
    return placed


_MOST_NODES = 28
"""The most boxes that can be read at once; what is inside of others opens by a click."""
STEP, _SPREAD = 182.0, 64.0
"""The distances from box to box, so that the bytes of an edge between neighbours can be read between them."""
COLUMNS, NARROW_COLUMNS = 7, 2
"""The boxes beside each other that can be read in a window of 1,280 pixels, and in a narrow one."""
MOST_COLOURS = 7


@dataclass(frozen=True)
class _Node:
    """A module, or operators of one, or an operator if modules are not known.

    Attributes:
        label: its name; ``below``: how many blocks it stands for, and its stage of a pipeline, in words.
        groups: the operator groups in it.
        axes: the configuration that most of them have; ``mixed`` says that others differ.
        colour: the number of that configuration, ``MOST_COLOURS`` for the rare ones.
        again: how many of its groups are recomputed in backward.
        closed: whether a click opens it.
        stage: its stage of a pipeline, "" without one.
        tip: everything to say about it, in lines.
    """

    key: str
    label: str
    below: str
    groups: tuple[str, ...]
    axes: str
    mixed: bool
    colour: int
    x: float
    y: float
    again: int = 0
    closed: bool = False
    stage: str = ""
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrawnEdge:
    """The tensors that go from one node to another, in bytes of whole tensors; ``tip`` as for nodes.

    Attributes:
        back: whether it leads back, as from a block to the next one that is folded with it.
    """

    source: str
    target: str
    resharded: bool
    bytes: int
    back: bool = False
    tip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """The nodes, the links between them, and the meaning of the colours."""

    nodes: tuple[_Node, ...]
    edges: tuple[DrawnEdge, ...]
    legend: tuple[tuple[str, int], ...]

    @property
    def height(self) -> int:
        """The pixels in which all rows can be read; at most what fits on a screen."""
        ys = [node.y for node in self.nodes] or [0.0]
        return round(min(max(max(ys) - min(ys) + 2 * _SPREAD, 240), 680))


_Tensors = dict[str, tuple[int, str]]


def picture(
    rows: Sequence[OperatorRow],
    edges: Iterable[GraphEdge],
    columns: int = COLUMNS,
    opened: Sequence[str] = (),
) -> Picture:
    """Fold equal blocks into one, show as many levels of modules as stay under :data:`_MOST_NODES` nodes, and
    place them.

    Args:
        rows: operators in the model's order.
        edges: the edges between the rows' groups.
        columns: the most boxes beside each other.
        opened: the keys of nodes that a person opened.
    """
    boxed = boxes(rows)
    path_of = keys(boxed, _MOST_NODES, opened)
    key_of = {group: ".".join(path) for group, path in path_of.items()}
    inside: dict[str, list[OperatorRow]] = {}
    for o in rows:
        inside.setdefault(key_of[o.group], []).append(o)
    joined: dict[tuple[str, str], bool] = {}
    by_block: dict[tuple[str, str], dict[str, _Tensors]] = {}
    for edge in edges:
        a, b = key_of.get(edge.source), key_of.get(edge.target)
        if a is not None and b is not None and a != b:
            joined[a, b] = joined.get((a, b), False) or edge.resharded
            # A tensor that several operators of a module read goes there once. Of folded blocks, one counts.
            block = boxed[edge.source].block or boxed[edge.target].block
            by_block.setdefault((a, b), {}).setdefault(block, {}).update(edge.tensors)
    sent = {pair: max(of.values(), key=_bytes) for pair, of in by_block.items()}
    kind_of_split = _kinds(rows)
    kinds = Counter(kind_of_split[o.group] for o in rows)
    # Colours go to the commonest configurations; more than a few cannot be distinguished.
    numbers = {axes: i for i, (axes, _) in enumerate(kinds.most_common(MOST_COLOURS))}
    # Without edges (an old file), operators follow each other in the model's order.
    ordered: list[list[Hashable]] = layers(list(inside), joined) if joined else [[key] for key in inside]
    rank: dict[Hashable, int] = {key: i for i, layer in enumerate(ordered) for key in layer}
    place = positions(ordered, columns=columns, step=STEP, spread=_SPREAD)
    nodes = []
    writes: dict[str, _Tensors] = {}
    for (a, _), tensors in sent.items():
        writes.setdefault(a, {}).update(tensors)
    for key, members in inside.items():
        axes = Counter(kind_of_split[o.group] for o in members)
        top = axes.most_common(1)[0][0]
        path, of = path_of[members[0].group], boxed[members[0].group]
        times = of.blocks if len({boxed[o.group].block for o in members}) == of.blocks else 1
        nodes.append(
            _Node(
                key, _label(path, of.blocks, members), _below(times, _stage(members)),
                tuple(o.group for o in members), top, len(axes) > 1, numbers.get(top, MOST_COLOURS),
                *place[key],
                again=sum(o.recomputed for o in members),
                closed=any(len(boxed[o.group].path) > len(path) for o in members),
                stage=_stage(members), tip=_node_tip(key, members, writes.get(key, {}), times),
            )
        )  # fmt: skip
    legend = [*numbers.items()]
    if len(kinds) > MOST_COLOURS:
        legend.append((f"{len(kinds) - MOST_COLOURS} rarer ones", MOST_COLOURS))
    links = tuple(
        _link(a, b, resharded, sent[a, b], back=rank[a] >= rank[b]) for (a, b), resharded in joined.items()
    )
    return Picture(tuple(nodes), links, tuple(legend))


def _bytes(tensors: Mapping[str, tuple[int, str]]) -> int:
    return sum(size for size, _ in tensors.values())


def _label(path: Sequence[str], blocks: int, members: Sequence[OperatorRow]) -> str:
    """Return a box's name: inside of folded blocks that within the block; of a module's own operators what
    they compute."""
    first = members[0]
    if " " in first.group and not first.module:  # a tensor that comes from another stage, or goes there
        return first.group.partition(" in stage")[0].partition(" from stage")[0]
    if path[-1].startswith("#") or not first.module:
        words = list(dict.fromkeys(kind_of(o.group) for o in members))
        return (
            words[0]
            if len(words) == 1
            else f"{words[0]}, {words[-1]}"
            if len(words) == 2
            else f"{words[0]}, …"
        )
    folded = next((at for at, name in enumerate(path) if blocks > 1 and "–" in name), None)
    if folded is not None and folded + 1 < len(path):
        return ".".join(path[folded + 1 :])
    return tail(".".join(path))


def _below(times: int, stage: str) -> str:
    return ", ".join(filter(None, (f"×{times}" if times > 1 else "", stage)))


_MOST_TENSORS = 4
"""The most tensors that a tooltip names; it says how many more there are."""


def _tensor_lines(tensors: Mapping[str, tuple[int, str]]) -> tuple[str, ...]:
    lines = [f"{words}, {format_bytes(size)}" for size, words in tensors.values()]
    more = len(lines) - _MOST_TENSORS
    return (*lines[:_MOST_TENSORS], *((f"and {plural(more, 'more tensor')}",) if more > 0 else ()))


def _node_tip(
    key: str, members: Sequence[OperatorRow], writes: Mapping[str, tuple[int, str]], times: int
) -> tuple[str, ...]:
    axes = Counter(o.axes for o in members)
    recomputed = sum(o.recomputed for o in members)
    each = f"each of {times} equal blocks has " if times > 1 else ""
    return (
        key.partition(".#")[0],
        f"{each}{plural(len(members) // times, 'operator')}: "
        + "; ".join(f"{words} ({count})" if len(axes) > 1 else words for words, count in axes.most_common(3)),
        *((f"{recomputed // times} of them computed again in backward",) if recomputed else ()),
        *(("hands on:", *_tensor_lines(writes)) if writes else ()),
    )


def _link(
    source: str, target: str, resharded: bool, tensors: Mapping[str, tuple[int, str]], *, back: bool
) -> DrawnEdge:
    head = f"{source} → {target}" + (", of the next block" if back and "–" in source else "")
    head += ", resharded on the way" if resharded else ""
    return DrawnEdge(source, target, resharded, _bytes(tensors), back, (head, *_tensor_lines(tensors)))


def _kinds(rows: Sequence[OperatorRow]) -> dict[str, str]:
    """Return what a colour says about each operator: how it is split; if all are split alike, its stage."""
    splits = {o.group: split_in_stage(o.axes)[1] for o in rows}
    alike = len(set(splits.values())) == 1
    return {o.group: o.axes if alike else splits[o.group] for o in rows}


def _stage(members: Sequence[OperatorRow]) -> str:
    """Return the stages that a module's operators are in: ``stage 1``, or ``stages 0, 1``."""
    stages = sorted({number for o in members if (number := split_in_stage(o.axes)[0]) is not None})
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""
