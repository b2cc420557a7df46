"""track_frontier: cost graph -> frontier."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import product as cross
from typing import Any

import numpy as np

from tensoropt.frontier import Frontier, product, reduce, union
from tensoropt.search.costgraph import CostGraph
from tensoropt.search.result import TrackedFrontier

METHODS = ("auto", "ldp", "elimination")


def track_frontier(
    graph: CostGraph,
    *,
    epsilon: float = 0.0,
    method: str = "auto",
    max_points: int | None = None,
    threads: int | None = None,
) -> TrackedFrontier:
    """The cost frontier of ``graph``; see DESIGN section 7."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if not len(graph):
        return TrackedFrontier(
            np.zeros(1), np.zeros(1), True, (), lambda _: ({}, {}), lambda m: 0.0 if m >= 0 else math.inf
        )
    return _simple(graph)


def _grid(tables: list[Any], name: str) -> float:
    total = sum(float(getattr(t, name).max()) for t in tables if len(t.memory))
    return 2.0 ** (math.frexp(total)[1] - 51) if total > 0 else 1.0


def _simple(graph: CostGraph) -> TrackedFrontier:
    """Variable elimination with tables of frontiers as dictionaries; every point carries its whole choice."""
    tables = [*graph.nodes, *(e.table for e in graph.edges)]
    grids = [_grid(tables, "memory"), _grid(tables, "time")]
    snapped = any((np.rint(t.memory / grids[0]) * grids[0] != t.memory).any() for t in tables)
    tolerance = 2 * len(tables) * grids[0] if snapped else 0.0

    def entry(table: Any, e: int) -> Frontier:
        span = slice(int(table.offsets[e]), int(table.offsets[e + 1]))
        return reduce(
            np.rint(table.memory[span] / grids[0]) * grids[0], np.rint(table.time[span] / grids[1]) * grids[1]
        )

    Factor = tuple[tuple[int, ...], dict[tuple[int, ...], Any]]
    factors: list[Factor] = []
    for v, table in enumerate(graph.nodes):
        factors.append(((v,), {(k,): ("leaf", entry(table, k), table, k, v) for k in range(table.entries)}))
    for n, edge in enumerate(graph.edges):
        width = edge.table.shape[1]
        factors.append(
            (
                (edge.source, edge.target),
                {
                    (i, j): ("leaf", entry(edge.table, r * width + c), edge.table, r * width + c, ~n)
                    for i, r in enumerate(edge.rows.tolist())
                    for j, c in enumerate(edge.cols.tolist())
                },
            )
        )
    remaining = set(range(len(graph)))
    while remaining:
        neighbours = {v: {u for scope, _ in factors if v in scope for u in scope} for v in remaining}
        v = min(remaining, key=lambda u: (math.prod(graph.nodes[w].entries for w in neighbours[u]), u))
        remaining.remove(v)
        mine = [f for f in factors if v in f[0]]
        factors = [f for f in factors if v not in f[0]]
        scope = tuple(sorted(neighbours[v] - {v}))
        table = {}
        for key in cross(*(range(graph.nodes[u].entries) for u in scope)):
            at = dict(zip(scope, key, strict=True))
            choices = []
            for k in range(graph.nodes[v].entries):
                at[v] = k
                parts = [f[1][tuple(at[u] for u in f[0])] for f in mine]
                node = parts[0]
                for part in parts[1:]:
                    node = ("product", product(node[1], part[1]), node, part)
                choices.append((k, node))
            table[key] = ("union", union([c[1][1] for c in choices]), choices, v)
        factors.append((scope, table))
    node = factors[0][1][()]
    for scope, table in factors[1:]:
        node = ("product", product(node[1], table[scope][1]), node, table[scope])
    final = node[1]
    if not len(final):
        raise ValueError(
            "no strategy is possible: every combination meets an inf entry; loosen one of the tables"
        )

    def unroll(index: int) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
        chosen: dict[Hashable, int] = {}
        options: dict[Hashable, int] = {}
        stack = [(node, index)]
        while stack:
            (kind, front, *rest), i = stack.pop()
            a, b = front.origin[i].tolist()
            if kind == "leaf":
                table, e, who = rest
                option = int(table.option[int(table.offsets[e]) + b])
                if who >= 0:
                    options[graph.names[who]] = option
                else:
                    edge = graph.edges[~who]
                    options[graph.names[edge.source], graph.names[edge.target], edge.ordinal] = option
            elif kind == "product":
                stack += [(rest[0], a), (rest[1], b)]
            else:
                k, child = rest[0][a]
                chosen[graph.names[rest[1]]] = k
                stack.append((child, b))
        return {n: chosen[n] for n in graph.names}, options

    def bound(memory: float) -> float:
        i = int(np.searchsorted(final.memory, memory + tolerance, side="right"))
        return float(final.time[i - 1]) if i else math.inf

    return TrackedFrontier(final.memory, final.time, True, (), unroll, bound)
