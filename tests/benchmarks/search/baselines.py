"""The published methods implemented plainly, for comparison: FT-LDP and FT-Elimination.

Plain numpy, one frontier per table entry, but fair: products with a single point are shifts, equal
entries of a factored edge are looked up and not recomputed, and costs are snapped like ours.
"""

from __future__ import annotations

import time

import numpy as np

from tensoropt.search.order import paper_order
from tensoropt.search.problem import build_problem

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


def plain_tracking(graph, linear: bool, limit_s: float) -> Points:
    """FT-LDP (``linear``) or FT-Elimination, plainly; raises :class:`OutOfTimeError` after ``limit_s``."""
    problem = build_problem(graph)
    order = paper_order(problem, linear)
    assert not order.fixed, "the comparison uses graphs that reduce exactly"
    deadline = time.perf_counter() + limit_s
    leaves = [
        [(leaf.memory[a:b], leaf.time[a:b]) for a, b in zip(leaf.offsets[:-1], leaf.offsets[1:], strict=True)]
        for leaf in problem.leaves
    ]
    nodes = [list(leaves[leaf]) for leaf in problem.node_leaf]
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

    for e in problem.edges:
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
    for v in _roots(problem, order.removed):
        total = product(total, nodes[v][0])
    return total


def _roots(problem, removed) -> list[int]:
    """The operator removed last of every component holds the component's frontier."""
    parent = list(range(len(problem.domains)))

    def find(v: int) -> int:
        while parent[v] != v:
            v = parent[v]
        return v

    for e in problem.edges:
        parent[find(e.source)] = find(e.target)
    last = {find(v): v for v in removed}
    return list(last.values())
