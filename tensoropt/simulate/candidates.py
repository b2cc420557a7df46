"""Candidates: the configurations and layouts, by index, of cost tables or of a single strategy."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, TypeVar

import numpy as np

from tensoropt.cluster import Cluster, Mesh, slower_beside
from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable, variables
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import Indices


def _axis_links(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"axis {axis}" for axis in axes)


@dataclass(frozen=True)
class Overlap:
    """How communication overlaps computation on one kind of device.

    Attributes:
        beside: whether asynchronous collectives overlap with computation (NCCL, not gloo).
        words: a description of the assumption.
        by_axes: mesh axes -> the link levels that collectives over them use.
        slower: the share by which collectives slow down computation.
    """

    beside: bool
    words: str
    by_axes: Mapping[tuple[int, ...], tuple[str, ...]] = field(default_factory=dict)
    slower: float = 0.0

    def links(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        # Without a cluster nothing is known about levels: each axis then has its own links.
        return self.by_axes.get(axes) or _axis_links(axes)


BLOCKING = Overlap(False, "nothing overlaps")


def overlap_of(cluster: Cluster, mesh: Mesh, *, beside: bool) -> Overlap:
    """Return how communication overlaps computation on a cluster; without ``beside``, it never does."""
    by_axes = {
        # Queues are per level, not per axis: two axes inside one node send over the same wires.
        axes: link_levels(cluster, mesh, axes)
        for count in range(1, len(mesh.shape) + 1)
        for axes in combinations(range(len(mesh.shape)), count)
    }
    if cluster.device_type == "cpu":
        words = "collectives run on the ranks' own cores: no communication is hidden, as measured"
        return Overlap(False, words, by_axes)
    if not beside:
        return Overlap(False, "all communication is waited for, as requested", by_axes)
    slower = slower_beside(cluster)
    words = (
        "gradient buckets, gathers and scatters of prefetched parameters, and reductions of activations' "
        "gradients during weight-gradient products overlap with computation and make "
        f"it {slower:.0%} slower; all other collectives are waited for"
    )
    return Overlap(True, words, by_axes, slower)


def link_levels(cluster: Cluster, mesh: Mesh, axes: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the link levels that collectives along ``axes`` cross, outermost first."""
    # Neighbours are sufficient: the ranks of a group ascend, so any level between two of them lies between
    # neighbours.
    crossed = {cluster.crossing_level(a, b).name for group in mesh.groups(axes) for a, b in pairwise(group)}
    return tuple(level.name for level in cluster.levels if level.name in crossed)


Value = TypeVar("Value")


class TableCandidates:
    """The configurations and layouts of cost tables, by index.

    Attributes:
        regions: the blocks that some strategy recomputes.
        moves: the tensors that some strategy gathers again in backward.
    """

    def __init__(self, tables: CostTables):
        self.tables = tables
        self.graph, self.mesh, self.regions = tables.graph, tables.mesh, tables.regions
        self.moves: Collection[str] = tables.moves
        self._configurations: dict[str, list[Configuration]] = {}

    def again(self, group: Group) -> Sequence[bool]:
        """Return whether a group is recomputed, for each of its configurations."""
        return self.tables.of[group.name].again

    def configurations(self, group: Group) -> Sequence[Configuration]:
        if group.name not in self._configurations:
            count = len(self.again(group))
            self._configurations[group.name] = [self.tables.configuration(group, i) for i in range(count)]
        return self._configurations[group.name]

    def facts(self, group: Group) -> Sequence[Facts]:
        return self._per_configuration(group, self.tables.templates[group.name].facts)

    def works(self, group: Group) -> Sequence[Workload]:
        return self._per_configuration(group, self.tables.templates[group.name].works)

    def _per_configuration(self, group: Group, values: Sequence[Value]) -> Sequence[Value]:
        return [values[i % len(values)] for i in range(len(self.again(group)))]

    def stored(self, group: Group, configuration: int, option: int) -> tuple[Layout, ...]:
        """Return the stored layouts of a group's own parameters in an option of a configuration."""
        return self.tables.of[group.name].options[configuration][option]

    def hubs(self, name: str) -> Sequence[Layout]:
        return self.tables.of[Variable.of_hub(name)].layouts

    def shared(self, name: str) -> Sequence[Layout]:
        return self.tables.of[Variable.of_parameter(name)].layouts

    def signature(self, group: Group) -> Hashable:
        """Return a key that is equal for groups with equal configurations and costs."""
        # Of two groups with one template, possibly only one is in a block that may be recomputed.
        return id(self.tables.templates[group.name]), len(self.again(group))

    def rows(
        self, chosen: Sequence[tuple[Mapping[str, int], Mapping[Any, int]]]
    ) -> tuple[dict[str, Indices], dict[str, Indices]]:
        """Return the (choice, options) of strategies as two mappings: variable -> (strategies,) indices."""
        names = [v.key for v in self.tables.variables]
        groups = [g.name for g in self.graph.groups]
        choices = np.array([[c[n] for n in names] for c, _ in chosen], dtype=np.int64)
        options = np.array([[o.get(n, 0) for n in groups] for _, o in chosen], dtype=np.int64)
        gathered: dict[str, Indices] = {
            Variable.of_move(n): np.array([self.tables.gathered_again(n, o) for _, o in chosen], np.int64)
            for n in self.moves
        }
        return (
            {n: choices[:, i] for i, n in enumerate(names)},
            {n: options[:, i] for i, n in enumerate(groups)} | gathered,
        )


class StrategyCandidates:
    """One strategy as the only candidate, so that a batch can simulate it without cost tables."""

    def __init__(
        self, strategy: Strategy, facts: Mapping[str, Facts], works: Mapping[str, Workload] | None = None
    ):
        self.strategy = strategy
        self.graph, self.mesh, self.regions = strategy.graph, strategy.mesh, strategy.recomputed
        self.moves: Collection[str] = strategy.gathered_again
        self._facts, self._works = facts, dict(works or {})

    def again(self, group: Group) -> Sequence[bool]:
        return (self.strategy.forwards(group.name) > 1,)

    def configurations(self, group: Group) -> Sequence[Configuration]:
        return (self.strategy.configurations[group.name],)

    def facts(self, group: Group) -> Sequence[Facts]:
        return (self._facts[group.name],)

    def works(self, group: Group) -> Sequence[Workload]:
        if group.name not in self._works:
            made = workload(self.graph, self.strategy.configurations[group.name], self.mesh)
            self._works[group.name] = made
        return (self._works[group.name],)

    def stored(self, group: Group, configuration: int, option: int) -> tuple[Layout, ...]:
        return tuple(self.strategy.stored[name] for name in group.parameters)

    def hubs(self, name: str) -> Sequence[Layout]:
        return (self.strategy.hubs[name],)

    def shared(self, name: str) -> Sequence[Layout]:
        return (self.strategy.stored[name],)

    def signature(self, group: Group) -> Hashable:
        # No two groups count as alike: in one strategy, layers that look alike may have different
        # configurations.
        return group.name

    def row(self) -> tuple[dict[str, Indices], dict[str, Indices]]:
        zero = np.zeros(1, dtype=np.int64)
        names = [g.name for g in self.graph.groups]
        every = variables(names, self.graph.hubs, self.graph.shared)
        again = dict.fromkeys(map(Variable.of_move, self.moves), zero + 1)
        return dict.fromkeys(every, zero), dict.fromkeys(names, zero) | again


Candidates = TableCandidates | StrategyCandidates
"""The configurations and layouts from which a batch of strategies chooses, by index."""
