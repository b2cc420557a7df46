"""Unrolled timesteps: the parts of a graph that repeat one computation.

M. Wang, C. Huang, J. Li, *Supporting Very Large Models using Automatic Dataflow Graph Partitioning* (Tofu),
EuroSys 2019, section 5.1: the operators that different timesteps have in common are coalesced, so that they
are partitioned alike and a recurrent network becomes as simple a graph as one of its steps.

Here timesteps are found from weights: operators that read the same weights, look alike and depend on one
another repeat each other, and so do operators that look alike and read from them, or are read by them, in the
same place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import networkx as nx
import numpy as np

from tensoropt.planners.tables import TableSpace
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.types import Floats

_Edges = Sequence[tuple[str, str, Floats]]


def repeated(space: TableSpace) -> dict[str, str]:
    """Return, for each variable of the search, the first of those that are the same in other timesteps; often
    itself.
    """
    repeats = _Repeats(space).find()
    first: dict[Hashable, str] = {}
    names: dict[str, str] = {}
    for v in space.tables.variables:
        key: Hashable = v.key
        if v.key.kind == "group":
            key = "group", repeats[v.key]
        elif v.key.kind == "hub":
            tensor = v.key.name
            key = "hub", repeats[f"tensor {tensor}"], tuple(map(tuple, space.names.hubs[tensor]))
        # The number of configurations is part of the key, as coalesced costs are added configuration by
        # configuration.
        names[v.key] = first.setdefault((key, len(v.memory)), v.key)
    return names


def coalesced(
    nodes: Mapping[str, Floats], edges: _Edges, first: Mapping[str, str]
) -> tuple[dict[str, Floats], _Edges]:
    """Return the graph in which repeated nodes are one: costs are summed, including those of edges inside a
    node.
    """
    merged: dict[str, Floats] = {}
    for name, costs in nodes.items():
        merged[first[name]] = merged[first[name]] + costs if first[name] in merged else costs
    between = []
    for a, b, table in edges:
        if first[a] == first[b]:
            # Both ends choose the same configuration, so only the diagonal counts.
            merged[first[a]] = merged[first[a]] + np.diagonal(table)
        else:
            between.append((first[a], first[b], table))
    return merged, between


class _Repeats:
    """Classes of groups (by name) and tensors (as ``tensor NAME``), grown until nothing changes."""

    def __init__(self, space: TableSpace):
        self.space = space
        self.graph: GroupGraph = space.tables.graph
        self.tensors = self.graph.atoms.graph.tensors
        self.sets = nx.utils.UnionFind()
        self.looks = {g.name: self._look(g) for g in self.graph.groups}
        self.reads = {g.name: list(_places(g, inputs=True)) for g in self.graph.groups}
        self.writes = {g.name: list(_places(g, inputs=False)) for g in self.graph.groups}
        self.changed = False

    def find(self) -> Mapping[str, str]:
        self._seed()
        # A class that grows lets its neighbours repeat in turn; classes are only ever joined, so that this
        # ends.
        while self.changed:
            self.changed = False
            self._spread()
        return self.sets

    def _look(self, group: Group) -> Hashable:
        """Return a key that is equal for groups that may repeat each other: the same computation, weights and
        configurations."""
        shapes = tuple(self.tensors[name].shape for name in group.anchor.outputs)
        labels = self.space.names.groups[group.name]["configurations"]
        return group.anchor.target, shapes, group.parameters, group.shared, tuple(map(tuple, labels))

    def _seed(self) -> None:
        """Join groups that read the same weights and depend on one another."""
        maker = {name: g.name for g in self.graph.groups for _, name in self.writes[g.name]}
        order = nx.DiGraph()
        order.add_nodes_from(self.looks)
        order.add_edges_from(
            (maker[name], g.name)
            for g in self.graph.groups
            for _, name in self.reads[g.name]
            if name in maker and maker[name] != g.name
        )
        alike: dict[Hashable, list[str]] = defaultdict(list)
        for group in self.graph.groups:
            if group.shared:
                alike[self.looks[group.name]].append(group.name)
        for names in alike.values():
            later = nx.descendants(order, names[0])
            for name in names[1:]:
                # Two towers that share weights look alike as well, but neither follows from the other: those
                # are no timesteps.
                if name in later:
                    self._join(names[0], name)

    def _spread(self) -> None:
        """Extend classes of tensors to the groups that make and read them, and classes of groups to their
        ends."""
        sizes: dict[str, int] = defaultdict(int)
        for member in list(self.sets.parents):
            sizes[self.sets[member]] += 1
        first_with: dict[Hashable, str] = {}
        for group in self.graph.groups:
            for kind, places in (("reads", self.reads), ("writes", self.writes)):
                for place, name in places[group.name]:
                    tensor = f"tensor {name}"
                    if sizes[self.sets[tensor]] > 1:
                        key = kind, place, self.looks[group.name], self.sets[tensor]
                        self._join(first_with.setdefault(key, group.name), group.name)
                    if sizes[self.sets[group.name]] > 1:
                        ends = kind, place, self.sets[group.name], self.tensors[name].shape
                        self._join(first_with.setdefault(ends, tensor), tensor)

    def _join(self, a: str, b: str) -> None:
        if self.sets[a] != self.sets[b]:
            self.sets.union(a, b)
            self.changed = True


def _places(group: Group, *, inputs: bool) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield ((operator, position), tensor) of the group's ends, equal in groups that look alike."""
    ends = set(group.reads if inputs else group.writes)
    for number, op in enumerate(group.operators):
        for position, name in enumerate(op.inputs() if inputs else op.outputs):
            if name in ends:
                yield (number, position), name
