"""Build the cost tables of one device mesh, from which the search sums a strategy's memory and time. Costs of
single choices (variables) are computed here, those of pairs in :mod:`tensoropt.costs.edges`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tensoropt.costs.cost_graph import VariableTable
from tensoropt.costs.edges import EdgeBuilder, TableArrays
from tensoropt.costs.effects import NOTHING, Cost, Effects, additive
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.parameter_effects import StoredUse, Use
from tensoropt.costs.prices import Prices
from tensoropt.costs.restrictions import FREE, Restriction, ahead_options, storage_options, unsharded_options
from tensoropt.costs.tables import CostTables, Template, leaves_model
from tensoropt.costs.variables import Variable
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.regions import Region, region_of

_Column = tuple[np.ndarray, ...]
_Beside = tuple[tuple[bool, bool, float], ...]


class _Stored(NamedTuple):
    costs: tuple[Cost, ...]
    beside: _Beside


@dataclass(eq=False, repr=False)
class TableBuilder:
    """The builder of one mesh's cost tables: one per variable (choice of the search) and per related pair.

    Args:
        micro: operator group -> its strategy on the micro-batch axis.
        templates: group -> its configurations and workloads, shared by isomorphic groups.
        regions: recomputable blocks, whose groups have each configuration twice: run once, and recomputed.
        restriction: the configurations that the user's constraints allow.
        arrays: cached cost arrays of this mesh and cost model.
    """

    graph: GroupGraph
    micro: Mapping[str, AxisStrategy]
    templates: Mapping[str, Template]
    prices: Prices
    regions: Sequence[Region] = ()
    restriction: Restriction = FREE
    arrays: TableArrays | None = None

    def __post_init__(self) -> None:
        self.mesh = self.prices.mesh
        self.effects = GroupEffects(self.prices)
        self.region_of = region_of(self.regions)
        self._arrays = self.arrays or TableArrays()
        self._variable_cache: dict[object, VariableTable] = {}
        self._uses: dict[tuple[str, Layout, Use], _Stored] = {}

    def build(self) -> CostTables:
        self.configurations = {
            g.name: [
                Configuration(g, (self.micro[g.name], *(g.strategies[i] for i in choice)))
                for choice in self.templates[g.name].choices
            ]
            for g in self.graph.groups
        }
        # Edges come after the variables' configurations and before the hubs' variables: the states that a hub
        # can have follow from its neighbours' readings, which EdgeBuilder derives from these configurations.
        self.edges = EdgeBuilder(
            self.effects,
            self.templates,
            self.configurations,
            self.region_of,
            self._arrays,
            self.restriction.gathered_again,
        )
        variables = [self._group(g) for g in self.graph.groups]
        variables += [self._hub(name) for name in self.graph.hubs]
        variables += [self._shared_parameter(name) for name in self.graph.shared]
        tables: dict[str, VariableTable] = {v.key: v for v in variables}
        edges = [*self.edges.build(tables), *self.edges.build_together(self.restriction)]
        return CostTables(
            variables,
            edges,
            graph=self.graph,
            mesh=self.mesh,
            templates=self.templates,
            micro=self.micro,
            prices=self.prices,
            regions=tuple(self.regions),
            moves=self.edges.optional(edges),
        )

    # -- variables --------------------------------------------------------------------------------

    def _group(self, group: Group) -> VariableTable:
        template = self.templates[group.name]
        # Plain first, then recomputed: CostTables.position, TableCandidates and EdgeBuilder._passes all rely
        # on this order, because they look up a configuration's facts by its index modulo the template's
        # length.
        passes = (False, True) if group.name in self.region_of else (False,)
        # Layers that look alike share the arrays themselves.
        pinned = self.restriction.again.get(group.name)
        key = (id(template), passes, pinned, self.effects.parameters.blocks.neighbours(group.name))
        if key not in self._variable_cache:
            self._variable_cache[key] = self._group_variable(group, template, passes)
        return replace(self._variable_cache[key], key=Variable.of_group(group.name))

    def _group_variable(self, group: Group, template: Template, passes: Sequence[bool]) -> VariableTable:
        each = list(zip(self.configurations[group.name], template.works, template.facts, strict=True))
        choices = [
            Choice(configuration, work, facts, {}, recomputed)
            for recomputed in passes
            for configuration, work, facts in each
        ]
        ahead, neighbours = self._offers_ahead(group), self.effects.parameters.blocks.neighbours(group.name)
        options = [self._stored_options(group.parameters, c.configuration, ahead=ahead) for c in choices]
        counts = [len(stored) for stored in options]

        def rows() -> np.ndarray:
            return np.concatenate([self._options(*one) for one in zip(choices, options, strict=True)])

        # The facts are part of the key, because a GPU's own kernels may have provided others.
        table = self._arrays.once(
            lambda: repr((template.look, passes, ahead, neighbours, [self._priced(c) for c in choices])), rows
        )
        pinned = self.restriction.again.get(group.name)
        if pinned is not None and len(passes) > 1:
            against = np.repeat([choice.again is not pinned for choice in choices], counts)
            table = np.where(against[:, None], np.inf, table)
        tables = np.split(table, np.cumsum(counts)[:-1])
        memory, compute, communication = (tuple(t[:, i] for t in tables) for i in range(3))
        return VariableTable(
            Variable.of_group(group.name),
            memory,
            compute,
            communication,
            again=tuple(choice.again for choice in choices),
            options=tuple(options),
        )

    def _priced(self, choice: Choice) -> tuple[object, ...]:
        compute = self.prices.compute
        seconds = compute.seconds(choice.work, choice.facts), compute.host_seconds(choice.work)
        return choice.work.key, choice.facts, *seconds

    def _offers_ahead(self, group: Group) -> bool:
        return self.prices.beside and self.effects.parameters.blocks.neighbours(group.name) is not None

    def _stored_options(
        self, names: tuple[str, ...], configuration: Configuration, *, ahead: bool
    ) -> tuple[tuple[Layout, ...], ...]:
        tensors = tuple(self.graph.atoms.graph.tensors[n] for n in names)
        sizes = tuple(self.graph.atoms.atom_sizes(n) for n in names)
        uses = tuple(configuration.layout(n) for n in names)
        stored_options = storage_options(tensors, sizes, uses, self.mesh)
        # In inference nothing is gathered a second time for backward, so a copy that stays gathered saves
        # nothing over storing the parameter whole.
        if self.prices.training:
            early = ahead_options(stored_options) if ahead else ()
            stored_options += (*early, *unsharded_options(tensors, stored_options, self.mesh))
        stores = self.restriction.stores
        return tuple(
            h for h in stored_options if all(stores(n, one) for n, one in zip(names, h, strict=True))
        )

    def _options(self, choice: Choice, stored_options: Sequence[Sequence[Layout]]) -> np.ndarray:
        group, effects = choice.configuration.group, self.effects
        # A result that is also a hub is gathered from the hub's placement, so the hub's variable pays for it.
        outputs = (
            effects.moves.output(name, choice.configuration.layout(name))
            for name in group.writes
            if name not in self.graph.hubs and leaves_model(self.graph, name)
        )
        # The order of the sums is part of the result: floating-point addition is not associative, and tables
        # must be the same to the last bit.
        computed = effects.computed(choice)
        base = self._sum(effects.kept(choice)).plus(
            self._sum(computed),
            *(self._sum(part) for part in effects.inside(choice)),
            *(self._sum(Effects(output)) for output in outputs),
        )
        rows = []
        # An option stores only the group's own parameters, so shared ones are left out: their own variable,
        # and the edges to it, price them.
        first = dict(zip(group.parameters, stored_options[0], strict=True)) if stored_options else {}
        uses = effects.uses(choice._replace(stored=first))
        for stored in stored_options:
            where = dict(zip(group.parameters, stored, strict=True))
            parts = [self._stored(name, where[name], use) for name, use in uses.items()]
            row = base.plus(*(cost for part in parts for cost in part.costs))
            hidden_s = effects.hidden_s(computed, (each for part in parts for each in part.beside))
            rows.append(row._replace(communication=row.communication - hidden_s))
        return np.array(rows, dtype=np.float64)

    def _stored(self, name: str, stored: Layout, use: Use) -> _Stored:
        key = name, stored, use
        if key not in self._uses:
            parameters = self.effects.parameters
            there = parameters.stored_use(name, stored, use)
            own = self._sum(parameters.stored(name, stored, complete=there.complete(self.mesh[0])))
            used, beside = self._sent(there, parameters.used(there))
            copy, copy_beside = self._sent(there, parameters.unsharded(there))
            ahead = Cost(parameters.ahead_bytes(there), 0.0, 0.0)
            self._uses[key] = _Stored((own, used, copy, ahead), (*beside, *copy_beside))
        return self._uses[key]

    def _sent(self, use: StoredUse, effects: Effects) -> tuple[Cost, _Beside]:
        beside = self.effects.sent_beside(use, effects) if self.prices.beside else ()
        return self._sum(effects), beside

    def _sum(self, effects: Effects) -> Cost:
        return additive(effects, self.prices)

    def _hub(self, name: str) -> VariableTable:
        ends = self.edges.hub_ends(name)
        costs = [
            self._sum(Effects(self.effects.moves.output(name, end.layout)))
            if leaves_model(self.graph, name)
            else NOTHING
            for end in ends
        ]
        return VariableTable(
            Variable.of_hub(name),
            *_columns(costs),
            layouts=tuple(e.layout for e in ends),
            kept=tuple(e.kept for e in ends),
            again=tuple(e.again for e in ends),
        )

    def _shared_parameter(self, name: str) -> VariableTable:
        users = [g for g in self.graph.groups if name in g.shared]
        uses = {c.layout(name): c for g in users for c in self.configurations[g.name]}
        ahead = any(map(self._offers_ahead, users))
        layouts = dict.fromkeys(
            stored for use in uses.values() for (stored,) in self._stored_options((name,), use, ahead=ahead)
        )
        # A tied parameter's copy has one layout for all its users, and is made for the first of them.
        neighbours = self.effects.parameters.blocks.neighbours(users[0].name)
        any_use = Use(next(iter(uses)), 0, neighbours=neighbours)

        def cost(layout: Layout) -> Cost:
            own, _, copy, _ = self._stored(name, layout, any_use).costs
            return own.plus(copy)

        costs = _columns([cost(layout) for layout in layouts])
        return VariableTable(Variable.of_parameter(name), *costs, layouts=tuple(layouts))


def _columns(costs: Sequence[Cost]) -> tuple[_Column, _Column, _Column]:
    memory, compute, communication = (tuple(np.array([cost[i]]) for cost in costs) for i in range(3))
    return memory, compute, communication
