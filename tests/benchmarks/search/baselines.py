"""The published methods implemented plainly, for comparison: FT-LDP and FT-Elimination.

Plain numpy on one thread, one frontier per table entry, but fair: products with a single point are shifts,
equal entries of a factored edge are looked up and not recomputed, and costs are snapped like ours. What is
compiled in ours is interpreted here; ``track_frontier(method="ldp")`` runs the same algorithm on our kernels.

FT-Elimination's seconds depend on which of the operators that can go goes first, so that it is here in two
orders: branch elimination before node elimination (``paper_order``), and node elimination first
(:func:`node_first`), which is the order of MindSpore's implementation (``GetStrategy`` in its
``dp_algo_costmodel.cc``: operator, edge, merge and contract elimination "MUST" be tried in that order; the
last two are the paper's branch elimination).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import networkx as nx
import numpy as np

from tensoropt.costs.cost_graph import CostGraph
from tensoropt.search.flat_tables import FlatTables
from tensoropt.search.order import Order, paper_order
from tensoropt.search.reduced_graph import ReducedGraph, reduce_graph

Points = tuple[np.ndarray, np.ndarray]
NOTHING: Points = (np.empty(0), np.empty(0))


class OutOfTimeError(Exception):
    """The baseline ran past its limit."""


def reduce(m: np.ndarray, t: np.ndarray) -> Points:
    """Algorithm 1."""
    order = np.lexsort((t, m))
    m, t = m[order], t[order]
    best = np.minimum.accumulate(t)
    kept = np.ones(len(m), bool)
    kept[1:] = t[1:] < best[:-1]
    return m[kept], t[kept]


def product(a: Points, b: Points) -> Points:
    if len(a[0]) == 0 or len(b[0]) == 0:
        return NOTHING
    if len(a[0]) == 1 or len(b[0]) == 1:
        return a[0] + b[0], a[1] + b[1]
    return reduce((a[0][:, None] + b[0]).ravel(), (a[1][:, None] + b[1]).ravel())


def union(fronts: list[Points]) -> Points:
    fronts = [f for f in fronts if len(f[0])]
    if not fronts:
        return NOTHING
    if len(fronts) == 1:
        return fronts[0]
    return reduce(np.concatenate([f[0] for f in fronts]), np.concatenate([f[1] for f in fronts]))


def node_first(reduced: ReducedGraph) -> Order:
    """FT-Elimination with node elimination (two neighbours) before branch elimination (one neighbour); among
    equals the operator added first. Operators that no elimination removes are named as fixed."""
    neighbours: list[set[int]] = [set() for _ in reduced.domains]
    for edge in reduced.edges:
        neighbours[edge.source].add(edge.target)
        neighbours[edge.target].add(edge.source)
    removed: list[int] = []
    alive = set(range(len(reduced.domains)))
    while easy := [v for v in alive if len(neighbours[v]) <= 2]:
        v = min(easy, key=lambda v: (-len(neighbours[v]), v))
        for u in neighbours[v]:
            neighbours[u] = (neighbours[u] | neighbours[v]) - {u, v}
        alive.remove(v)
        removed.append(v)
    return Order(tuple(removed), tuple(sorted(alive)), largest=0)


ORDERS: dict[str, Callable[[ReducedGraph], Order]] = {
    "ldp": lambda reduced: paper_order(reduced, linear=True),
    "elimination": lambda reduced: paper_order(reduced, linear=False),
    "elimination_node_first": node_first,
}
"""The published methods by the order in which each eliminates operators."""


def plain_tracking(graph: CostGraph, method: str, limit_s: float) -> Points:
    """A method of :data:`ORDERS`, plainly; raises :class:`OutOfTimeError` after ``limit_s``."""
    reduced = reduce_graph(FlatTables.of(graph))
    order = ORDERS[method](reduced)
    assert not order.fixed, "the comparison uses graphs that reduce exactly"
    deadline = time.perf_counter() + limit_s
    leaves = [
        [(leaf.memory[a:b], leaf.time[a:b]) for a, b in zip(leaf.offsets[:-1], leaf.offsets[1:], strict=True)]
        for leaf in reduced.leaves
    ]
    nodes = [list(leaves[leaf]) for leaf in reduced.node_leaf]
    edges: dict[tuple[int, int], list[list[Points]]] = {}

    def add(a: int, b: int, table: list[list[Points]]) -> None:
        if a > b:
            a, b, table = b, a, [list(row) for row in zip(*table, strict=True)]
        if (a, b) in edges:  # edge elimination
            old = edges[a, b]
            table = [
                [product(x, y) for x, y in zip(r, s, strict=True)] for r, s in zip(old, table, strict=True)
            ]
        edges[a, b] = table

    for e in reduced.edges:
        entries = leaves[e.leaf]
        add(e.source, e.target, [[entries[r * e.width + c] for c in e.cols] for r in e.rows])
    for v in order.removed:
        around = [k for k in edges if v in k]
        tables = {}
        for key in around:
            table = edges.pop(key)
            tables[key[0] if key[1] == v else key[1]] = (
                table if key[0] == v else [list(row) for row in zip(*table, strict=True)]
            )
        if len(tables) == 0:
            nodes[v] = [union(nodes[v])]
        elif len(tables) == 1:  # branch elimination, and every step of the LDP
            ((u, table),) = tables.items()
            for j in range(len(nodes[u])):
                if time.perf_counter() > deadline:
                    raise OutOfTimeError
                found = union([product(nodes[v][k], table[k][j]) for k in range(len(nodes[v]))])
                nodes[u][j] = product(nodes[u][j], found)
        else:  # node elimination
            (a, left), (b, right) = tables.items()
            rows = []
            for i in range(len(nodes[a])):
                with_node = [product(nodes[v][k], left[k][i]) for k in range(len(nodes[v]))]
                row = []
                for j in range(len(nodes[b])):
                    if time.perf_counter() > deadline:
                        raise OutOfTimeError
                    row.append(union([product(with_node[k], right[k][j]) for k in range(len(with_node))]))
                rows.append(row)
            add(a, b, rows)
    total = (np.zeros(1), np.zeros(1))
    for v in _roots(reduced, order.removed):
        total = product(total, nodes[v][0])
    return total


def _roots(reduced: ReducedGraph, removed: Sequence[int]) -> list[int]:
    """The operator removed last of every component holds the component's frontier."""
    graph = nx.Graph([(edge.source, edge.target) for edge in reduced.edges])
    graph.add_nodes_from(removed)
    return [max(component, key=removed.index) for component in nx.connected_components(graph)]
