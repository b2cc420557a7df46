"""Builds the cost tables of one mesh from templates and prices: variables here, edges in ``edges``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tensoropt.costs.edges import EdgeBuilder
from tensoropt.costs.parameters import held_options, storage_options
from tensoropt.costs.prices import Prices
from tensoropt.costs.restrictions import FREE, Restriction
from tensoropt.costs.tables import CostTables, Template, Variable, leaves_model
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.regions import Region, region_of
from tensoropt.sharding.strategy import output_layout


class TableBuilder:
    """Variables and edges of one mesh.

    Args:
        micro: per group its strategy on the micro-batch axis.
        templates: per group what it shares with groups that look alike.
        regions: blocks that may be recomputed; a group of one has every configuration twice.
        restriction: how parameters may be stored, and which groups belong together.
    """

    def __init__(
        self,
        graph: GroupGraph,
        micro: Mapping[str, AxisStrategy],
        templates: Mapping[str, Template],
        prices: Prices,
        regions: Sequence[Region] = (),
        restriction: Restriction = FREE,
    ):
        self.graph = graph
        self.mesh = prices.mesh
        self.micro = micro
        self.templates = templates
        self.prices = prices
        self.tensors = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training
        self.regions = tuple(regions)
        self.restriction = restriction
        self.region_of = region_of(regions)
        self._variable_cache: dict[object, Variable] = {}

    def build(self) -> CostTables:
        self.configurations = {
            g.name: [
                Configuration(g, (self.micro[g.name], *(g.strategies[i] for i in choice)))
                for choice in self.templates[g.name].choices
            ]
            for g in self.graph.groups
        }
        self.edges = EdgeBuilder(self.graph, self.prices, self.templates, self.configurations, self.region_of)
        variables = [self._group(g) for g in self.graph.groups]
        variables += [self._hub(name) for name in self.graph.hubs]
        variables += [self._shared_parameter(name) for name in self.graph.shared]
        by_name = {v.name: v for v in variables}
        edges = (
            *self.edges.build(by_name, self.regions),
            *self.edges.build_together(self.restriction),
        )
        return CostTables(
            self.graph,
            self.mesh,
            tuple(variables),
            edges,
            self.templates,
            self.micro,
            self.prices,
            self.regions,
        )

    # -- variables --------------------------------------------------------------------------------

    def _group(self, group: Group) -> Variable:
        """A group's configurations; in a region all of them once plain, then once recomputed."""
        template = self.templates[group.name]
        passes = (1, 2) if group.name in self.region_of else (1,)
        key = (id(template), passes)
        if key not in self._variable_cache:
            self._variable_cache[key] = self._group_variable(group, template, passes)
        return replace(self._variable_cache[key], name=group.name)

    def _group_variable(self, group: Group, template: Template, passes: Sequence[int]) -> Variable:
        tables, options, again = [], [], []
        for forwards in passes:
            for configuration, work, facts in zip(
                self.configurations[group.name], template.works, template.facts, strict=True
            ):
                homes = self._homes(group.parameters, configuration)
                tables.append(self._options(configuration, work, facts, homes, forwards))
                options.append(homes)
                again.append(forwards > 1)
        memory, compute, communication = (tuple(t[:, i] for t in tables) for i in range(3))
        return Variable(
            group.name,
            "group",
            memory,
            compute,
            communication,
            again=tuple(again),
            options=tuple(options),
        )

    def _homes(self, names: tuple[str, ...], configuration: Configuration) -> tuple[tuple[Layout, ...], ...]:
        """The ways to store parameters of a group that are not restricted away."""
        tensors = tuple(self.tensors[n] for n in names)
        sizes = tuple(self.graph.atoms.atom_sizes(n) for n in names)
        uses = tuple(configuration.layout(n) for n in names)
        homes = storage_options(tensors, sizes, uses, self.mesh)
        if self.training:
            homes += held_options(tensors, homes, self.mesh)
        stores = self.restriction.stores
        return tuple(h for h in homes if all(stores(n, one) for n, one in zip(names, h, strict=True)))

    def _options(
        self,
        configuration: Configuration,
        work: Workload,
        facts: Facts,
        homes: Sequence[Sequence[Layout]],
        forwards: int,
    ) -> np.ndarray:
        """(memory, compute, communication) of a configuration, a row per way to store its parameters."""
        group = configuration.group
        forward, backward = self.prices.compute.seconds(work, facts)
        again = self.prices.again_s(work, forward) if forwards > 1 else 0.0
        base = (
            float(facts.kept_bytes) if forwards == 1 else 0.0,
            (forward + again + backward) * self.mesh[0],
            self._inner_s(group, configuration, forwards),
        )
        kept = self._kept_parameters(group, facts)
        rows = []
        for stored in homes:
            parts = [
                part
                for n, s in zip(group.parameters, stored, strict=True)
                for part in (
                    self.prices.parameter(n, s),
                    self.prices.use(n, s, configuration.layout(n), kept.get(n, 0), forwards),
                    self.prices.held(n, s, configuration.layout(n)),
                )
            ]
            rows.append([sum(x) for x in zip(base, *parts, strict=True)])
        return np.array(rows, dtype=np.float64)

    def _kept_parameters(self, group: Group, facts: Facts) -> dict[str, int]:
        back = {v: k for k, v in group.short_names.items()}
        return {back[n]: count for n, count in facts.parameters_kept.items()}

    def _inner_s(self, group: Group, configuration: Configuration, forwards: int) -> float:
        """Seconds of what is communicated inside a group: resolved partials and kernels' collectives."""
        total = 0.0
        if configuration.resolved is not None:
            total += self.prices.move_s(*configuration.resolved, forwards)
        for op in group.operators:
            total += self.prices.inside_s(
                configuration.placed(op.name, self.graph.atoms, self.mesh, None), forwards
            )
        for name in group.writes:
            if name not in self.graph.hubs and leaves_model(self.graph, name):
                source = configuration.layout(name)
                total += self.prices.move_s(name, source, output_layout(source))
        return total

    def _hub(self, name: str) -> Variable:
        """A home for every placement of its producer and readers."""
        homes = self.edges.homes(name)
        output = leaves_model(self.graph, name)
        communication = tuple(
            np.array([self.prices.move_s(name, e.layout, output_layout(e.layout)) if output else 0.0])
            for e in homes
        )
        zero = tuple(np.zeros(1) for _ in homes)
        return Variable(
            f"hub:{name}",
            "hub",
            zero,
            zero,
            communication,
            layouts=tuple(e.layout for e in homes),
            kept=tuple(bool(e.kept) for e in homes),
            again=tuple(e.again for e in homes),
        )

    def _shared_parameter(self, name: str) -> Variable:
        """A stored placement for every placement a use can have, and sharded variants of those."""
        uses = {
            c.layout(name): c
            for g in self.graph.groups
            if name in g.shared
            for c in self.configurations[g.name]
        }
        layouts = dict.fromkeys(home for use in uses.values() for (home,) in self._homes((name,), use))
        any_use = next(iter(uses))  # a shared copy lies alike for all of them
        parts = [(self.prices.parameter(name, x), self.prices.held(name, x, any_use)) for x in layouts]
        costs = [[sum(x) for x in zip(*both, strict=True)] for both in parts]
        memory, compute, communication = (tuple(np.array([c[i]]) for c in costs) for i in range(3))
        return Variable(
            f"parameter:{name}", "parameter", memory, compute, communication, layouts=tuple(layouts)
        )
