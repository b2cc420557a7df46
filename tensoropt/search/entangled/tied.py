"""Strategies in which look-alikes choose alike: good guesses for operators that have to be fixed.

Repeated blocks that share operators (the steps of a recurrent network share its weights) are too entangled
for exact elimination, yet a good strategy treats the repetitions alike. *Tying* operators that look alike, up
to some distance, gives a far smaller graph, a restriction of the given one, whose hull is exact. The choices
of its strategies for the fixed operators are then tried with everything else free. Look-alikes are the
colours of colour refinement (Weisfeiler and Leman 1968), which is how lifted inference finds interchangeable
variables (Kersting, Ahmadi and Natarajan, "Counting belief propagation", UAI 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tensoropt.search.reduced_graph import Leaf, LeafEdge, ReducedGraph
from tensoropt.types import Indices


def colourings(reduced: ReducedGraph) -> Iterator[Indices]:
    """(operators,) colours 0..n-1, from coarse (equal costs) to fine (equal surroundings); at least two
    colours."""
    colour = _numbered(list(reduced.node_leaf))
    around: list[list[tuple[int, int, int, int, int]]] = [[] for _ in reduced.domains]
    for e in reduced.edges:
        # An edge counts by its table, its maps and its end, because source and target are not alike.
        around[e.source].append((e.leaf, id(e.rows), id(e.cols), 0, e.target))
        around[e.target].append((e.leaf, id(e.rows), id(e.cols), 1, e.source))
    while True:
        yield colour
        finer = _numbered(
            [
                (
                    int(colour[v]),
                    *sorted((leaf, rows, cols, end, int(colour[u])) for leaf, rows, cols, end, u in mine),
                )
                for v, mine in enumerate(around)
            ]
        )
        # No class was split, and refinement never joins any, so it is finished.
        if finer.max(initial=0) == colour.max(initial=0):
            return
        colour = finer


def _numbered(keys: list[object]) -> Indices:
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def tie(reduced: ReducedGraph, colour: Indices) -> ReducedGraph:
    """The graph in which the operators of one colour are one: their costs, and those of like edges, add up.

    Its variables are the colours, and one with a single class for edges between operators of one colour.
    """
    leaves = list(reduced.leaves)
    scaled: dict[tuple[int, int], int] = {}

    def times(leaf: int, count: int) -> int:
        if count > 1 and (leaf, count) not in scaled:
            one = leaves[leaf]
            leaves.append(replace(one, memory=count * one.memory, time=count * one.time))
            scaled[leaf, count] = len(leaves) - 1
        return scaled[leaf, count] if count > 1 else leaf

    first = np.unique(colour, return_index=True)[1].tolist()
    domains = [reduced.domains[v] for v in first]
    node_leaf = [times(reduced.node_leaf[v], int((colour == c).sum())) for c, v in enumerate(first)]
    alone = len(domains)
    leaves.append(_nothing())
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
        reduced,
        leaves=tuple(leaves),
        domains=tuple(domains),
        node_leaf=tuple(node_leaf),
        edges=tuple(edges),
    )


def _nothing() -> Leaf:
    none = np.full(1, -1, np.int64)
    return Leaf(np.arange(2), np.zeros(1), np.zeros(1), none, none)
