"""Node and edge elimination for one objective: the dynamic program of OptCNN.

Z. Jia, S. Lin, C. R. Qi, A. Aiken, *Exploring Hidden Dimensions in Parallelizing Convolutional Neural
Networks*, ICML 2018, section 5: a node between two others is replaced by an edge that costs the best of its
configurations (node elimination), parallel edges are added up (edge elimination). A node with one neighbour
is folded into it. What then remains, the final graph, is enumerated: algorithm 1 tries all its strategies at
once, which are C^K for K nodes of C configurations; here it is enumerated one node after the other, over the
strategies of its neighbours only, which finds the same optimum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tensoropt.types import Floats

_MOST_NEIGHBOURS = 2
"""The most neighbours of a node that node elimination removes."""
MOST_ENTRIES = 2**23
"""The most entries of one table of the final graph: 64 MiB."""


class Cheapest(NamedTuple):
    """The cheapest strategy of a graph.

    Attributes:
        choice: the configuration of each node.
        final: the nodes of the final graph, which no elimination removes; empty if one node remains.
    """

    cost: float
    choice: dict[str, int]
    final: tuple[str, ...]


class IrreducibleError(Exception):
    """The final graph is too large to be enumerated.

    Attributes:
        remaining: its nodes.
    """

    def __init__(self, remaining: Sequence[str]):
        super().__init__(f"{len(remaining)} nodes remain")
        self.remaining = tuple(remaining)


class ImpossibleError(ValueError):
    """No strategy has a finite cost."""


@dataclass(frozen=True)
class _Removed:
    """A removed node: the best of its configurations for every strategy of its neighbours."""

    name: str
    neighbours: tuple[str, ...]
    best: NDArray[np.int32]


def cheapest(nodes: Mapping[str, Floats], edges: Sequence[tuple[str, str, Floats]]) -> Cheapest:
    """Return the cheapest strategy of a graph.

    Args:
        nodes: (K,) costs of each node; inf marks the impossible.
        edges: (a, b, costs (Ka, Kb)); parallel edges are summed.

    Raises:
        IrreducibleError: node and edge elimination leave a graph of which some table of best configurations
            would have more than ``MOST_ENTRIES``.
        ImpossibleError: nothing is possible.
        ValueError: a cost is NaN, which is neither a cost nor a mark of the impossible.
    """
    _check(nodes, edges)
    weights = {name: np.array(costs, dtype=np.float64) for name, costs in nodes.items()}
    graph = nx.Graph()
    graph.add_nodes_from(weights)
    for a, b, costs in edges:
        _add(graph, a, b, np.asarray(costs, dtype=np.float64))
    removed: list[_Removed] = []
    waiting = sorted(graph.nodes)
    while waiting:
        name = waiting.pop()
        if name not in graph or graph.degree(name) > _MOST_NEIGHBOURS:
            continue
        neighbours = sorted(graph.neighbors(name))
        removed.append(_eliminate(graph, weights, name, neighbours))
        # A removal can leave its neighbours with only two neighbours of their own.
        waiting.extend(n for n in neighbours if n not in waiting)
    final = tuple(sorted(graph.nodes))
    removed += _FinalGraph(graph, weights).enumerate()
    return _total(nodes, edges, _unroll(removed), final)


def _check(nodes: Mapping[str, Floats], edges: Sequence[tuple[str, str, Floats]]) -> None:
    tables = [(f"node {name}", costs) for name, costs in nodes.items()]
    tables += [(f"edge {a} - {b}", costs) for a, b, costs in edges]
    for label, costs in tables:
        if np.isnan(costs).any():
            raise ValueError(f"{label}: a cost is NaN; use inf for what is impossible")


def _add(graph: nx.Graph, a: str, b: str, costs: Floats) -> None:
    """Add an edge (edge elimination): parallel edges are summed. Tables are stored with the smaller name's
    rows.
    """
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
        best = np.array(np.argmin(own))
    elif len(neighbours) == 1:
        (left,) = neighbours
        costs = _table(graph, left, name) + own[None, :]
        weights[left] = weights[left] + costs.min(axis=1)
        best = costs.argmin(axis=1)
    else:
        left, right = neighbours
        to_left, to_right = _table(graph, left, name) + own[None, :], _table(graph, name, right)
        table = np.empty((len(to_left), to_right.shape[1]))
        best = np.empty(table.shape, dtype=np.int32)
        # Row by row, as all sums at once would be a table of three operators.
        for row, costs in enumerate(to_left):
            sums = costs[:, None] + to_right
            best[row] = sums.argmin(axis=0)
            table[row] = sums.min(axis=0)
        _add(graph, left, right, table)
    graph.remove_node(name)
    return _Removed(name, tuple(neighbours), best.astype(np.int32))


@dataclass(frozen=True)
class _Term:
    """The joint costs of some nodes: an array with a dimension for each."""

    names: tuple[str, ...]
    costs: Floats


class _FinalGraph:
    """The final graph, enumerated node by node."""

    def __init__(self, graph: nx.Graph, weights: Mapping[str, Floats]):
        self.graph = graph.copy()
        self.nodes = tuple(sorted(graph.nodes))
        self.sizes = {name: len(weights[name]) for name in graph}
        self.terms = [_Term((name,), weights[name]) for name in self.nodes]
        self.terms += [_Term((a, b), _table(graph, a, b)) for a, b in graph.edges]

    def enumerate(self) -> list[_Removed]:
        """Return the nodes in the order in which they were removed.

        Raises:
            IrreducibleError: a table would have more than ``MOST_ENTRIES``.
        """
        order = self._order()
        return [self._take(name) for name in order]

    def _entries(self, name: str) -> int:
        return prod(self.sizes[neighbour] for neighbour in self.graph[name])

    def _order(self) -> list[str]:
        """Return the nodes in order: next is always the node with the smallest table, whose size is known
        before it is computed.
        """
        order: list[str] = []
        while self.graph:
            name = min(self.graph, key=lambda n: (self._entries(n) * self.sizes[n], n))
            if self._entries(name) > MOST_ENTRIES:
                raise IrreducibleError(self.nodes)
            neighbours = sorted(self.graph[name])
            self.graph.remove_node(name)
            self.graph.add_edges_from((a, b) for i, a in enumerate(neighbours) for b in neighbours[:i])
            order.append(name)
        return order

    def _take(self, name: str) -> _Removed:
        own_terms = [term for term in self.terms if name in term.names]
        self.terms = [term for term in self.terms if name not in term.names]
        names = tuple(sorted({n for term in own_terms for n in term.names} - {name}))
        least = np.full([self.sizes[n] for n in names], np.inf)
        best = np.zeros(least.shape, dtype=np.int32)
        # One configuration at a time: the table needs an entry per strategy of the neighbours, and none per
        # configuration.
        for index in range(self.sizes[name]):
            costs = sum((self._slice(term, name, index, names) for term in own_terms), np.zeros(()))
            better = costs < least
            np.copyto(best, index, where=better)
            np.copyto(least, np.broadcast_to(costs, least.shape), where=better)
        self.terms.append(_Term(names, least))
        return _Removed(name, names, best)

    @staticmethod
    def _slice(term: _Term, name: str, index: int, names: tuple[str, ...]) -> Floats:
        """Return a term where ``name`` has configuration ``index``, with a dimension for each of
        ``names``."""
        remaining = tuple(n for n in term.names if n != name)
        costs: Floats = np.asarray(term.costs.take(index, axis=term.names.index(name)))
        costs = costs.transpose([remaining.index(n) for n in names if n in remaining])
        return costs.reshape(
            [costs.shape[sorted(remaining).index(n)] if n in remaining else 1 for n in names]
        )


def _unroll(removed: Sequence[_Removed]) -> dict[str, int]:
    choice: dict[str, int] = {}
    for step in reversed(removed):
        choice[step.name] = int(step.best[tuple(choice[n] for n in step.neighbours)])
    return choice


def _total(
    nodes: Mapping[str, Floats],
    edges: Sequence[tuple[str, str, Floats]],
    choice: dict[str, int],
    final: tuple[str, ...],
) -> Cheapest:
    # Added up afresh from the given tables: sums along the eliminations are rounded in another order, and
    # this one shows an inf that no choice could avoid.
    total = sum(float(costs[choice[name]]) for name, costs in nodes.items())
    total += sum(float(costs[choice[a], choice[b]]) for a, b, costs in edges)
    if not np.isfinite(total):
        raise ImpossibleError("no strategy is possible")
    return Cheapest(total, choice, final)
