"""Builds the cost tables of one mesh from templates and prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import storage_options
from tensoropt.costs.prices import Prices
from tensoropt.costs.tables import CostTables, EdgeTable, Template, Variable, leaves_model
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.local import localise
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.resharding import forward_placements
from tensoropt.sharding.strategy import output_layout


class TableBuilder:
    """Variables and edges of one mesh.

    Args:
        micro: per group its strategy on the micro-batch axis.
        templates: per group what it shares with groups that look alike.
    """

    def __init__(
        self,
        graph: GroupGraph,
        micro: Mapping[str, AxisStrategy],
        templates: Mapping[str, Template],
        prices: Prices,
    ):
        self.graph = graph
        self.mesh = prices.mesh
        self.micro = micro
        self.templates = templates
        self.prices = prices
        self.tensors = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training
        self._variable_cache: dict[int, Variable] = {}
        self._table_cache: dict[object, np.ndarray] = {}

    def build(self) -> CostTables:
        self.configurations = {
            g.name: [
                Configuration(g, (self.micro[g.name], *(g.strategies[i] for i in choice)))
                for choice in self.templates[g.name].choices
            ]
            for g in self.graph.groups
        }
        variables = [self._group(g) for g in self.graph.groups]
        variables += [self._hub(name) for name in self.graph.hubs]
        variables += [self._shared_parameter(name) for name in self.graph.shared]
        self._variables = {v.name: v for v in variables}
        edges = tuple(self._edges())
        return CostTables(self.graph, self.mesh, tuple(variables), edges, self.templates, self.micro)

    # -- variables --------------------------------------------------------------------------------

    def _group(self, group: Group) -> Variable:
        template = self.templates[group.name]
        if id(template) in self._variable_cache:
            known = self._variable_cache[id(template)]
            return Variable(
                group.name, "group", known.memory, known.compute, known.communication, options=known.options
            )
        memory, compute, communication, options = [], [], [], []
        for configuration, work, facts in zip(
            self.configurations[group.name], template.works, template.facts, strict=True
        ):
            forward, backward = self.prices.compute.seconds(work, facts)
            base = (
                float(facts.kept_bytes),
                (forward + backward) * self.mesh[0],
                self._inner_s(group, configuration),
            )
            uses = tuple(configuration.layout(n) for n in group.parameters)
            homes = storage_options(
                tuple(self.tensors[n] for n in group.parameters),
                tuple(self.graph.atoms.atom_sizes(n) for n in group.parameters),
                uses,
                self.mesh,
            )
            rows = []
            kept = self._kept_parameters(group, facts)
            for stored in homes:
                parts = [
                    self.prices.parameter(n, s, u, kept.get(n, 0))
                    for n, s, u in zip(group.parameters, stored, uses, strict=True)
                ]
                rows.append([sum(x) for x in zip(base, *parts, strict=True)])
            table = np.array(rows, dtype=np.float64)
            memory.append(table[:, 0])
            compute.append(table[:, 1])
            communication.append(table[:, 2])
            options.append(homes)
        variable = Variable(
            group.name, "group", tuple(memory), tuple(compute), tuple(communication), options=tuple(options)
        )
        self._variable_cache[id(template)] = variable
        return variable

    def _kept_parameters(self, group: Group, facts: Facts) -> dict[str, int]:
        back = {v: k for k, v in group.short_names.items()}
        return {back[n]: count for n, count in facts.parameters_kept.items()}

    def _inner_s(self, group: Group, configuration: Configuration) -> float:
        """Seconds of what is communicated inside a group: resolved partials and kernels' collectives."""
        total = 0.0
        if configuration.resolved is not None:
            total += sum(self.prices.edge_s(*configuration.resolved)) * self.mesh[0]
        for op in group.operators:
            call = localise(configuration.placed(op.name, self.graph.atoms, self.mesh, None))
            for c in call.collectives:
                if self.training or not c.backward:
                    total += self.prices.collective_s(c.kind, c.axes, c.bytes) * self.mesh[0]
        for name in group.writes:
            if name not in self.graph.hubs and leaves_model(self.graph, name):
                source = configuration.layout(name)
                total += sum(self.prices.edge_s(name, source, output_layout(source))) * self.mesh[0]
        return total

    def _readers(self, name: str, *, parameter: bool = False) -> list[Group]:
        return [g for g in self.graph.groups if name in (g.shared if parameter else g.reads)]

    def _producer(self, name: str) -> Group:
        return self.graph.group_of[self.graph.atoms.graph.producer[name].name]

    def _hub(self, name: str) -> Variable:
        """A home for every placement of its producer and readers; kept where backward may need it so."""
        readers = self._readers(name)
        groups = [self._producer(name), *readers]
        layouts = dict.fromkeys(c.layout(name) for g in groups for c in self.configurations[g.name])
        needed = dict.fromkeys(read for g in readers for read in self._reads(g, name) if read[1])
        pairs = [*((layout, False) for layout in layouts), *((layout, True) for layout, _ in needed)]
        zero = tuple(np.zeros(1) for _ in pairs)
        output = leaves_model(self.graph, name)
        communication = tuple(
            np.array(
                [
                    sum(self.prices.edge_s(name, layout, output_layout(layout))) * self.mesh[0]
                    if output
                    else 0.0
                ]
            )
            for layout, _ in pairs
        )
        return Variable(
            f"hub:{name}",
            "hub",
            zero,
            zero,
            communication,
            tuple(p[0] for p in pairs),
            tuple(p[1] for p in pairs),
        )

    def _shared_parameter(self, name: str) -> Variable:
        """A stored placement for every placement a use can have, and sharded variants of those."""
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        uses = dict.fromkeys(
            c.layout(name) for g in self._readers(name, parameter=True) for c in self.configurations[g.name]
        )
        layouts: dict[Layout, None] = {}
        for use in uses:
            for (home,) in storage_options((tensor,), (atoms,), (use,), self.mesh):
                layouts.setdefault(home)
        costs = [self.prices.parameter(name, layout, None, 0) for layout in layouts]
        memory, compute, communication = (tuple(np.array([c[i]]) for c in costs) for i in range(3))
        return Variable(
            f"parameter:{name}", "parameter", memory, compute, communication, layouts=tuple(layouts)
        )

    # -- edges ------------------------------------------------------------------------------------

    def _edges(self) -> Iterator[EdgeTable]:
        hubs = set(self.graph.hubs)
        for group in self.graph.groups:
            for name in group.reads:
                if name in hubs:
                    yield self._hub_reader(name, group)
                else:
                    yield self._direct(name, self._producer(name), group)
            for name in group.shared:
                yield self._parameter_use(name, group)
        for name in self.graph.hubs:
            yield self._hub_producer(name)

    def _reads(self, group: Group, name: str) -> list[tuple[Layout, int]]:
        """Per configuration of a reader: (layout, whether backward needs the tensor)."""
        template, short = self.templates[group.name], group.short_names[name]
        return [
            (c.layout(name), short in f.reads_kept)
            for c, f in zip(self.configurations[group.name], template.facts, strict=True)
        ]

    def _writes(self, group: Group, name: str) -> list[tuple[Layout, int]]:
        """Per configuration of a producer: (layout, whether the group itself keeps the tensor)."""
        template, short = self.templates[group.name], group.short_names[name]
        return [
            (c.layout(name), short in f.writes_kept)
            for c, f in zip(self.configurations[group.name], template.facts, strict=True)
        ]

    def _table(
        self,
        name: str,
        a: str,
        b: str,
        left: Sequence[tuple[Layout, int]],
        right: Sequence[tuple[Layout, int]],
        cost: Callable[[tuple[Layout, int], tuple[Layout, int]], tuple[float, float]],
    ) -> EdgeTable:
        rows = {key: i for i, key in enumerate(dict.fromkeys(left))}
        cols = {key: i for i, key in enumerate(dict.fromkeys(right))}
        # Layers repeat: the same placements of a tensor like this one cost the same everywhere.
        tensor = self.tensors[name]
        kind = [end.partition(":")[0] if ":" in end else "group" for end in (a, b)]
        like = (self.graph.atoms.atoms[name], tensor.element_bytes, tensor.requires_grad, *kind)
        key = (like, tuple(rows), tuple(cols))
        if key not in self._table_cache:
            self._table_cache[key] = np.array([[cost(r, c) for c in cols] for r in rows], dtype=np.float64)
        table = self._table_cache[key]
        return EdgeTable(
            a,
            b,
            table,
            np.array([rows[k] for k in left], dtype=np.int64),
            np.array([cols[k] for k in right], dtype=np.int64),
        )

    def _direct(self, name: str, producer: Group, reader: Group) -> EdgeTable:
        def cost(write: tuple[Layout, int], read: tuple[Layout, int]) -> tuple[float, float]:
            kept = read[1] and not (write[1] and _shares_storage(write[0], read[0]))
            return (self.prices.local_bytes(name, read[0]) if kept else 0.0), self.prices.move_s(
                name, write[0], read[0]
            )

        return self._table(
            name, producer.name, reader.name, self._writes(producer, name), self._reads(reader, name), cost
        )

    def _hub_producer(self, name: str) -> EdgeTable:
        """Materialising the home costs its communication and, if it is kept, its bytes."""
        hub = self._variables[f"hub:{name}"]

        def cost(write: tuple[Layout, int], home: tuple[Layout, int]) -> tuple[float, float]:
            counted = write[1] and _shares_storage(write[0], home[0])
            return (
                self.prices.local_bytes(name, home[0]) if home[1] and not counted else 0.0
            ), self.prices.move_s(name, write[0], home[0])

        producer = self._producer(name)
        homes = list(zip(hub.layouts, hub.kept, strict=True))
        return self._table(name, producer.name, hub.name, self._writes(producer, name), homes, cost)

    def _hub_reader(self, name: str, reader: Group) -> EdgeTable:
        """A reader that needs the home itself in backward needs a kept home."""
        hub = self._variables[f"hub:{name}"]

        def cost(home: tuple[Layout, int], read: tuple[Layout, int]) -> tuple[float, float]:
            if not _shares_storage(home[0], read[0]):
                return (self.prices.local_bytes(name, read[0]) if read[1] else 0.0), self.prices.move_s(
                    name, home[0], read[0]
                )
            if read[1] and not home[1]:
                return np.inf, np.inf
            return 0.0, self.prices.move_s(name, home[0], read[0])

        homes = list(zip(hub.layouts, hub.kept, strict=True))
        return self._table(name, hub.name, reader.name, homes, self._reads(reader, name), cost)

    def _parameter_use(self, name: str, reader: Group) -> EdgeTable:
        shared = self._variables[f"parameter:{name}"]
        short = reader.short_names[name]
        template = self.templates[reader.name]
        uses = [
            (c.layout(name), f.parameters_kept.get(short, 0))
            for c, f in zip(self.configurations[reader.name], template.facts, strict=True)
        ]

        def cost(stored: tuple[Layout, int], use: tuple[Layout, int]) -> tuple[float, float]:
            return 0.0, self.prices.use_s(name, stored[0], use[0], use[1]) * self.mesh[0]

        homes = [(layout, 0) for layout in shared.layouts]
        return self._table(name, shared.name, reader.name, homes, uses, cost)


def _shares_storage(source: Layout, target: Layout) -> bool:
    """Whether an edge leaves the tensor itself alone: only the gradient's placement differs, if any."""
    return forward_placements(source) == forward_placements(target)
