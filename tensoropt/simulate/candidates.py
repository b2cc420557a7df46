"""Candidates: all possible choices, by index. They are the configurations of cost tables, or the single ones
of one strategy.

The simulator receives rows of indices into candidates, so that many strategies share what they have in
common.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tensoropt.costs.tables import CostTables
from tensoropt.costs.variables import Variable, variables
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, workload
from tensoropt.sharding.configurations import AxisSizes, Configuration
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.regions import Region
from tensoropt.sharding.strategy import Strategy
from tensoropt.types import Indices

Value = TypeVar("Value")


class Candidates(Protocol):
    """Configurations, placements of hubs and stored layouts by index."""

    @property
    def graph(self) -> GroupGraph: ...

    @property
    def mesh(self) -> AxisSizes: ...

    @property
    def regions(self) -> tuple[Region, ...]:
        """The blocks that some strategy recomputes."""
        ...

    def again(self, group: Group) -> Sequence[bool]:
        """Whether the group is recomputed in backward, per configuration."""
        ...

    def configurations(self, group: Group) -> Sequence[Configuration]: ...

    def facts(self, group: Group) -> Sequence[Facts]: ...

    def works(self, group: Group) -> Sequence[Workload]: ...

    def stored(self, group: Group, configuration: int, option: int) -> tuple[Layout, ...]:
        """The stored layouts of the group's own parameters."""
        ...

    def hubs(self, name: str) -> Sequence[Layout]: ...

    def shared(self, name: str) -> Sequence[Layout]: ...

    def signature(self, group: Group) -> Hashable:
        """A key that is equal for groups with the same configurations, facts and works."""
        ...


class TableCandidates:
    """The candidates of cost tables."""

    def __init__(self, tables: CostTables):
        self.tables = tables
        self.graph, self.mesh, self.regions = tables.graph, tables.mesh, tables.regions
        self._configurations: dict[str, list[Configuration]] = {}

    def again(self, group: Group) -> Sequence[bool]:
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
        """Repeat a template's values for every configuration: once plain, and once more if recomputed."""
        return [values[i % len(values)] for i in range(len(self.again(group)))]

    def stored(self, group: Group, configuration: int, option: int) -> tuple[Layout, ...]:
        return self.tables.of[group.name].options[configuration][option]

    def hubs(self, name: str) -> Sequence[Layout]:
        return self.tables.of[Variable.of_hub(name)].layouts

    def shared(self, name: str) -> Sequence[Layout]:
        return self.tables.of[Variable.of_parameter(name)].layouts

    def signature(self, group: Group) -> Hashable:
        # Of two groups with one template, possibly only one is in a region and also comes recomputed.
        return id(self.tables.templates[group.name]), len(self.again(group))

    def rows(
        self, chosen: Sequence[tuple[Mapping[str, int], Mapping[Any, int]]]
    ) -> tuple[dict[str, Indices], dict[str, Indices]]:
        """The points of the search, (choice, options) each, as one array per variable: (choices, options)."""
        names = [v.key for v in self.tables.variables]
        groups = [g.name for g in self.graph.groups]
        choices = np.array([[c[n] for n in names] for c, _ in chosen], dtype=np.int64)
        options = np.array([[o.get(n, 0) for n in groups] for _, o in chosen], dtype=np.int64)
        return (
            {n: choices[:, i] for i, n in enumerate(names)},
            {n: options[:, i] for i, n in enumerate(groups)},
        )


class StrategyCandidates:
    """One strategy as the only candidate; it need not be in any table.

    Args:
        works, facts: by group name, those of its configuration; works are created if they are not given.
    """

    def __init__(
        self, strategy: Strategy, facts: Mapping[str, Facts], works: Mapping[str, Workload] | None = None
    ):
        self.strategy = strategy
        self.graph, self.mesh, self.regions = strategy.graph, strategy.mesh, strategy.recomputed
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
        """The strategy as rows."""
        zero = np.zeros(1, dtype=np.int64)
        names = [g.name for g in self.graph.groups]
        every = variables(names, self.graph.hubs, self.graph.shared)
        return dict.fromkeys(every, zero), dict.fromkeys(names, zero)
