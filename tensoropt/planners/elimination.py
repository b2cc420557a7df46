"""Node and edge elimination for one objective: the dynamic program of OptCNN.

Z. Jia, S. Lin, C. R. Qi, A. Aiken, *Exploring Hidden Dimensions in Parallelizing Convolutional Neural
Networks*, ICML 2018, section 5: a node between two others is replaced by an edge that costs the best of its
configurations (node elimination), parallel edges are added up (edge elimination). A node with one neighbour
is folded into it, which is what enumerating the final graph would do to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_IN_FINAL_GRAPH = 2


class IrreducibleError(Exception):
    """More nodes remain than the method enumerates.

    Attributes:
        remaining: their names.
    """

    def __init__(self, remaining: Sequence[str]):
        super().__init__(f"{len(remaining)} nodes remain")
        self.remaining = tuple(remaining)


class ImpossibleError(ValueError):
    """No strategy has a finite cost."""


@dataclass(frozen=True)
class _Removed:
    """A node taken out: the best of its configurations for every pair of its neighbours'."""

    name: str
    left: str
    right: str
    best: NDArray[np.int64]


def cheapest(
    nodes: Mapping[str, Floats], edges: Sequence[tuple[str, str, Floats]]
) -> tuple[float, dict[str, int]]:
    """(cost, configuration per node) of the cheapest strategy.

    Args:
        nodes: per node (K,) costs; inf marks the impossible.
        edges: (a, b, costs (Ka, Kb)); parallel ones are added.

    Raises:
        IrreducibleError: node and edge elimination leave more than two nodes connected.
        ImpossibleError: nothing is possible.
    """
    weights = {name: np.array(costs, dtype=np.float64) for name, costs in nodes.items()}
    graph = nx.Graph()
    graph.add_nodes_from(weights)
    for a, b, costs in edges:
        _add(graph, a, b, np.asarray(costs, dtype=np.float64))
    removed: list[_Removed] = []
    waiting = sorted(graph.nodes)
    while waiting:
        name = waiting.pop()
        if name not in graph or graph.degree(name) > MOST_IN_FINAL_GRAPH:
            continue
        neighbours = sorted(graph.neighbors(name))
        removed.append(_eliminate(graph, weights, name, neighbours))
        waiting.extend(n for n in neighbours if n not in waiting)
    if graph.number_of_nodes():
        raise IrreducibleError(sorted(graph.nodes))
    return _total(nodes, edges, _unroll(removed))


def _add(graph: nx.Graph, a: str, b: str, costs: Floats) -> None:
    """Edge elimination: parallel edges add up. Tables are stored with the smaller name's rows."""
    first, second, table = (a, b, costs) if a < b else (b, a, costs.T)
    if graph.has_edge(first, second):
        table = table + graph.edges[first, second]["table"]
    graph.add_edge(first, second, table=table)


def _table(graph: nx.Graph, a: str, b: str) -> Floats:
    table: Floats = graph.edges[min(a, b), max(a, b)]["table"]
    return table if a < b else table.T


def _eliminate(graph: nx.Graph, weights: dict[str, Floats], name: str, neighbours: list[str]) -> _Removed:
    own = weights[name]
    if not neighbours:
        best = np.array(int(np.argmin(own)))
        removed = _Removed(name, "", "", best)
    elif len(neighbours) == 1:
        (left,) = neighbours
        costs = _table(graph, left, name) + own[None, :]
        weights[left] = weights[left] + costs.min(axis=1)
        removed = _Removed(name, left, "", costs.argmin(axis=1))
    else:
        left, right = neighbours
        to_left, to_right = _table(graph, left, name) + own[None, :], _table(graph, name, right)
        table = np.empty((len(to_left), to_right.shape[1]))
        best = np.empty(table.shape, dtype=np.int64)
        for row, costs in enumerate(to_left):
            sums = costs[:, None] + to_right
            best[row] = sums.argmin(axis=0)
            table[row] = sums.min(axis=0)
        _add(graph, left, right, table)
        removed = _Removed(name, left, right, best)
    graph.remove_node(name)
    return removed


def _unroll(removed: Sequence[_Removed]) -> dict[str, int]:
    choice: dict[str, int] = {}
    for step in reversed(removed):
        best = step.best
        for neighbour in (step.left, step.right):
            if neighbour:
                best = best[choice[neighbour]]
        choice[step.name] = int(best)
    return choice


def _total(
    nodes: Mapping[str, Floats], edges: Sequence[tuple[str, str, Floats]], choice: dict[str, int]
) -> tuple[float, dict[str, int]]:
    total = sum(float(costs[choice[name]]) for name, costs in nodes.items())
    total += sum(float(costs[choice[a], choice[b]]) for a, b, costs in edges)
    if not np.isfinite(total):
        raise ImpossibleError("no strategy is possible")
    return total, choice
