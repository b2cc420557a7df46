"""Graphs whose operators are split, merged or fixed, for searches that elimination alone cannot do.

An operator with too many entangled neighbours is *split*: each of its edges gets a copy of it that chooses
for itself. The split graph is a relaxation, whose hull bounds every strategy. Each copy pays its share of the
operator's cost (cost shifting: Choi, Chavira and Darwiche, "Node splitting", UAI 2007). If all copies are
made to choose one given class, the strategies are real ones (Dechter's cutset conditioning; mini-buckets for
the bound).

Operators that look alike, such as the steps of a recurrent network, should choose alike. *Tying* (merging)
them gives a far smaller graph, whose strategies are good guesses for the operators that have to be fixed.
Look-alikes are the colours of colour refinement (Weisfeiler and Leman 1968; Kersting, Ahmadi and Natarajan,
"Counting belief propagation", UAI 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tensoropt.search.order import Order
from tensoropt.search.reduced_graph import Leaf, LeafEdge, ReducedGraph, numbered, restrict
from tensoropt.types import Floats, Indices


def colourings(reduced: ReducedGraph) -> Iterator[Indices]:
    """Yield partitions of the operators into look-alikes, from coarse (equal costs) to fine (equal
    neighbourhoods). A partition is an array with a number (colour, from 0) per operator, equal for
    look-alikes."""
    colour = numbered(reduced.node_leaf)
    around: list[list[tuple[int, int, int, int, int]]] = [[] for _ in reduced.domains]
    for e in reduced.edges:
        # An edge counts by its table, its maps and its end, because source and target are not alike.
        around[e.source].append((e.leaf, id(e.rows), id(e.cols), 0, e.target))
        around[e.target].append((e.leaf, id(e.rows), id(e.cols), 1, e.source))
    while True:
        yield colour
        finer = numbered(
            (int(colour[v]), *sorted((*look, int(colour[u])) for *look, u in mine))
            for v, mine in enumerate(around)
        )
        # No class was split, and refinement never joins any, so it is finished.
        if finer.max(initial=0) == colour.max(initial=0):
            return
        colour = finer


def tie(reduced: ReducedGraph, colour: Indices) -> ReducedGraph:
    """Return the graph with the operators of each colour (look-alikes) merged; their costs and edges add up.

    An edge between two operators of one colour becomes an edge to an added operator with a single class.
    """
    leaves = list(reduced.leaves)
    scaled: dict[tuple[int, int], int] = {}

    def times(leaf: int, count: int) -> int:
        if count > 1 and (leaf, count) not in scaled:
            plain = leaves[leaf]
            leaves.append(replace(plain, memory=count * plain.memory, time=count * plain.time))
            scaled[leaf, count] = len(leaves) - 1
        return scaled[leaf, count] if count > 1 else leaf

    first = np.unique(colour, return_index=True)[1].tolist()
    domains = [reduced.domains[v] for v in first]
    node_leaf = [times(reduced.node_leaf[v], int((colour == c).sum())) for c, v in enumerate(first)]
    alone = len(domains)
    leaves.append(_free(1))
    domains.append(1)
    node_leaf.append(len(leaves) - 1)

    counts: dict[tuple[int, ...], list[LeafEdge]] = {}
    for e in reduced.edges:
        ends = int(colour[e.source]), int(colour[e.target])
        counts.setdefault((e.leaf, *ends, id(e.rows), id(e.cols)), []).append(e)
    edges = []
    for (leaf, source, target, *_), alike in counts.items():
        e = replace(alike[0], source=source, target=target, leaf=times(leaf, len(alike)))
        # Operators of one colour choose alike: only the diagonal of their edge remains, which is a cost of
        # the colour alone.
        if source == target:
            size = e.height * e.width
            rows = e.rows * e.width + e.cols
            e = LeafEdge(source, alone, e.leaf, size, 1, rows, np.zeros(1, np.int64))
        edges.append(e)
    return replace(
        reduced, leaves=tuple(leaves), domains=tuple(domains), node_leaf=tuple(node_leaf), edges=tuple(edges)
    )


def _free(classes: int) -> Leaf:
    none = np.full(classes, -1, np.int64)
    return Leaf(np.arange(classes + 1), np.zeros(classes), np.zeros(classes), none, none)


@dataclass(frozen=True, eq=False, slots=True)
class SplitGraph:
    """A graph whose fixed operators are split into a copy for each edge; ``copies[f]`` include f itself.

    In ``reduced``, f has its whole cost and the other copies cost nothing. In ``shared``, each copy has an
    equal share of f's cost, which gives better bounds. ``order`` removes the copies first, and fixes no
    operator.
    """

    reduced: ReducedGraph
    shared: ReducedGraph
    copies: dict[int, tuple[int, ...]]
    order: Order


def split(reduced: ReducedGraph, order: Order) -> SplitGraph:
    """Return the graph in which each edge of an operator that ``order`` fixes has its own copy of it."""
    fixed = order.fixed
    leaves = list(reduced.leaves)
    domains, node_leaf = list(reduced.domains), list(reduced.node_leaf)
    copies: dict[int, list[int]] = {f: [] for f in fixed}
    free: dict[int, int] = {}

    def copy(f: int) -> int:
        if f not in copies:
            return f
        if not copies[f]:
            copies[f].append(f)
            return f
        size = domains[f]
        if size not in free:
            leaves.append(_free(size))
            free[size] = len(leaves) - 1
        domains.append(size)
        node_leaf.append(free[size])
        copies[f].append(len(domains) - 1)
        return len(domains) - 1

    edges = tuple(replace(e, source=copy(e.source), target=copy(e.target)) for e in reduced.edges)
    paid = replace(
        reduced, leaves=tuple(leaves), domains=tuple(domains), node_leaf=tuple(node_leaf), edges=edges
    )
    # Every copy has one edge, so removing copies first is cheap and never joins two operators.
    added = tuple(range(len(reduced.domains), len(domains)))
    whole = {f: tuple(t) or (f,) for f, t in copies.items()}
    return SplitGraph(
        paid, _shared(paid, whole), whole, Order((*added, *fixed, *order.removed), (), order.largest)
    )


def _shared(reduced: ReducedGraph, copies: dict[int, tuple[int, ...]]) -> ReducedGraph:
    leaves, node_leaf = list(reduced.leaves), list(reduced.node_leaf)
    for f, same in copies.items():
        leaf = leaves[reduced.node_leaf[f]]
        memory = _share(leaf.memory, len(same), reduced.memory_grid)
        time = _share(leaf.time, len(same), reduced.time_grid)
        rest = len(same) - 1
        for t in same:  # a separate leaf, so that each copy can have its own multipliers
            m, s = (leaf.memory - rest * memory, leaf.time - rest * time) if t == f else (memory, time)
            leaves.append(replace(leaf, memory=m, time=s))
            node_leaf[t] = len(leaves) - 1
    return replace(reduced, leaves=tuple(leaves), node_leaf=tuple(node_leaf))


def _share(costs: Floats, parts: int, grid: float) -> Floats:
    # Rounded down onto the grid: the rest, which the operator itself pays, is then on the grid and not
    # negative, and the shares add up exactly.
    return np.floor(costs / parts / grid) * grid


def condition(
    reduced: ReducedGraph, copies: dict[int, tuple[int, ...]], classes: dict[int, int]
) -> ReducedGraph:
    """Return a split graph in which operator f, and all its ``copies``, must choose class ``classes[f]``."""
    kept = {}
    for f, chosen in classes.items():
        mask = np.zeros(reduced.domains[f], bool)
        mask[chosen] = True
        kept.update(dict.fromkeys(copies[f], mask))
    return restrict(reduced, kept)


def preferred_classes(
    relaxed: SplitGraph, operators: tuple[int, ...], picks: tuple[Indices, ...]
) -> list[dict[int, int]]:
    """Return assignments of classes to some operators that are worth trying, by what their copies chose.

    For each of ``picks`` (a strategy of the split graph), every operator takes the class that most of its
    copies chose. In further assignments, every operator takes the class that one of its copies chose.
    """
    picked: dict[tuple[int, ...], None] = {}
    copies = [relaxed.copies.get(v, (v,)) for v in operators]
    for pick in picks:
        votes = [np.bincount(pick[list(same), 0]) for same in copies]
        picked.setdefault(tuple(int(np.argmax(v)) for v in votes))
    for pick in picks:
        for i in range(max(len(same) for same in copies)):
            picked.setdefault(tuple(int(pick[same[min(i, len(same) - 1)], 0]) for same in copies))
    return [dict(zip(operators, classes, strict=True)) for classes in picked]
