"""Cost tables: for every variable of the search its configurations and options with their costs.

Variables are groups, hubs (tensors with several readers: where they are materialised) and shared
parameters (tied weights: how they are stored). Costs are additive: a step's memory is the sum of what
is kept, its time the sum of compute and communication of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol

import numpy as np

from tensoropt.costs.facts import Facts
from tensoropt.costs.parameters import storage_options, stored_bytes
from tensoropt.costs.workload import Workload, workload
from tensoropt.sharding.buckets import BUCKET_BYTES
from tensoropt.sharding.configurations import Configuration, Mesh, enumerate_configurations
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.local import localise
from tensoropt.sharding.placement import PARTIAL_GRAD, Layout, local_shape
from tensoropt.sharding.resharding import COLLECTIVES, Step, edge_steps, forward_placements
from tensoropt.sharding.strategy import Strategy, output_layout


class ComputeCosts(Protocol):
    """Seconds of workloads and of the optimizer."""

    def seconds(self, work: Workload, facts: Facts) -> tuple[float, float]:
        """(forward, backward) of one micro-batch."""
        ...

    @property
    def optimizer_s_per_element(self) -> float: ...


class CommunicationCosts(Protocol):
    """Seconds of collectives; axes are the mesh's own (without the micro-batch axis)."""

    def time_s(self, kind: str, axes: Sequence[int], num_bytes: float) -> float: ...


@dataclass(frozen=True)
class Template:
    """What groups that look alike share: configurations (as strategy indices), workloads and facts."""

    choices: tuple[tuple[int, ...], ...]
    works: tuple[Workload, ...]
    facts: tuple[Facts, ...]


@dataclass(frozen=True)
class Variable:
    """One variable of the search.

    Attributes:
        name: group name, ``hub:TENSOR`` or ``parameter:TENSOR``.
        kind: ``group``, ``hub`` or ``parameter``.
        layouts: of a hub or a shared parameter, one per configuration.
        kept: of a hub: whether the home is kept for backward, per configuration.
        options: per configuration the stored layouts of each option (groups).
        memory, compute, communication: per configuration an array over its options; bytes and seconds.
    """

    name: str
    kind: str
    memory: tuple[np.ndarray, ...]
    compute: tuple[np.ndarray, ...]
    communication: tuple[np.ndarray, ...]
    layouts: tuple[Layout, ...] = ()
    kept: tuple[bool, ...] = ()
    options: tuple[tuple[tuple[Layout, ...], ...], ...] = ()

    @property
    def costs(self) -> list[np.ndarray]:
        """Per configuration an array (options, 2) of memory and time."""
        return [
            np.stack([m, c + n], axis=1)
            for m, c, n in zip(self.memory, self.compute, self.communication, strict=True)
        ]


@dataclass(frozen=True)
class EdgeTable:
    """Costs between two variables: configuration ``i`` of ``a`` and ``j`` of ``b`` cost
    ``table[rows[i], cols[j]] = (memory, time)``; all time is communication."""

    a: str
    b: str
    table: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


@dataclass
class CostTables:
    """All tables of one mesh and micro-batch count."""

    graph: GroupGraph
    mesh: Mesh
    variables: tuple[Variable, ...]
    edges: tuple[EdgeTable, ...]
    templates: Mapping[str, Template] = field(repr=False)
    micro: Mapping[str, AxisStrategy] = field(repr=False)

    @cached_property
    def by_name(self) -> dict[str, Variable]:
        return {v.name: v for v in self.variables}

    def configuration(self, group: Group, index: int) -> Configuration:
        choice = self.templates[group.name].choices[index]
        return Configuration(group, (self.micro[group.name], *(group.strategies[i] for i in choice)))

    def strategy(self, choice: Mapping[str, int], options: Mapping[object, int]) -> Strategy:
        """The strategy that a point of the search stands for."""
        configurations, stored, hubs = {}, {}, {}
        for group in self.graph.groups:
            index = choice[group.name]
            configurations[group.name] = self.configuration(group, index)
            homes = self.by_name[group.name].options[index][options.get(group.name, 0)]
            stored.update(zip(group.parameters, homes, strict=True))
        for name in self.graph.hubs:
            hubs[name] = self.by_name[f"hub:{name}"].layouts[choice[f"hub:{name}"]]
        for name in self.graph.shared:
            stored[name] = self.by_name[f"parameter:{name}"].layouts[choice[f"parameter:{name}"]]
        return Strategy(self.graph, self.mesh, configurations, hubs, stored)

    def breakdown(self, choice: Mapping[str, int], options: Mapping[object, int]) -> tuple[float, float, float]:
        """(memory, compute seconds, communication seconds) of a point."""
        memory = compute = communication = 0.0
        for v in self.variables:
            i, o = choice[v.name], options.get(v.name, 0)
            memory += float(v.memory[i][o])
            compute += float(v.compute[i][o])
            communication += float(v.communication[i][o])
        for e in self.edges:
            cost = e.table[e.rows[choice[e.a]], e.cols[choice[e.b]]]
            memory += float(cost[0])
            communication += float(cost[1])
        return memory, compute, communication


def group_key(graph: GroupGraph, group: Group, micro: AxisStrategy) -> str:
    """Equal for groups that look alike: same calls, shapes, atoms and strategies, other names.

    What leaves the model is part of the look: it is gathered, which a layer in the middle is not.
    """
    tensors = graph.atoms.graph.tensors
    names: dict[str, int] = {}
    parts: list[object] = []
    for op in group.operators:
        for name in (*op.inputs(), *op.outputs):
            names.setdefault(name, len(names))
        shapes = repr([op.args, sorted(op.kwargs.items())])
        for name in sorted(set(op.inputs()), key=len, reverse=True):
            shapes = shapes.replace(f"Ref(name='{name}')", f"t{names[name]}")
        parts.append((op.target, shapes, [names[n] for n in op.outputs]))
    for name in names:
        t = tensors[name]
        parts.append((t.shape, t.dtype, t.kind, t.requires_grad, graph.atoms.atoms[name]))
    roles = [[names[n] for n in part] for part in (group.reads, group.parameters, group.shared, group.writes)]
    roles.append([names[n] for n in group.writes if n not in graph.hubs and _leaves(graph, n)])
    labels = [s.label for s in group.strategies]
    return repr((parts, roles, labels, group.strategies.index(micro) if micro in group.strategies else micro.label))


def make_templates(
    graph: GroupGraph, mesh: Mesh, micro: Mapping[str, AxisStrategy], facts_of: Callable[[Workload], Facts]
) -> dict[str, Template]:
    """Templates of all groups; groups that look alike share one."""
    shared: dict[str, Template] = {}
    result = {}
    for group in graph.groups:
        key = group_key(graph, group, micro[group.name])
        if key not in shared:
            configurations = enumerate_configurations(graph.atoms, group, mesh, micro[group.name])
            index = {id(s): i for i, s in enumerate(group.strategies)}
            choices = tuple(tuple(index[id(s)] for s in c.strategies[1:]) for c in configurations)
            works = tuple(workload(graph, c, mesh) for c in configurations)
            shared[key] = Template(choices, works, tuple(facts_of(w) for w in works))
        result[group.name] = shared[key]
    return result


class TableBuilder:
    """Builds the tables of one mesh from templates and prices.

    Args:
        compute, communication: prices.
        optimizer: ``sgd``, ``momentum`` or ``adam``.
        copy_bytes_per_s: bandwidth of local copies around collectives.
    """

    def __init__(
        self,
        graph: GroupGraph,
        mesh: Mesh,
        micro: Mapping[str, AxisStrategy],
        templates: Mapping[str, Template],
        compute: ComputeCosts,
        communication: CommunicationCosts,
        optimizer: str,
        copy_bytes_per_s: float = float("inf"),
    ):
        self.graph = graph
        self.mesh = mesh
        self.micro = micro
        self.templates = templates
        self.compute = compute
        self.communication = communication
        self.optimizer = optimizer
        self.copy_bytes_per_s = copy_bytes_per_s
        self.tensors = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training
        self._edge_cache: dict[object, tuple[float, float]] = {}
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

    # -- prices -----------------------------------------------------------------------------------

    def _collective(self, kind: str, axes: Sequence[int], num_bytes: float) -> float:
        real = tuple(a - 1 for a in axes if a > 0 and self.mesh[a] > 1)
        return self.communication.time_s(kind, real, num_bytes) if real else 0.0

    def steps_s(self, steps: Sequence[Step], element_bytes: int) -> float:
        """Seconds of a resharding: its collectives and the copies around them."""
        total = 0.0
        for step in steps:
            payload = step.payload(self.mesh) * element_bytes
            if step.kind in COLLECTIVES:
                total += self._collective(step.kind, step.axes, payload)
            total += payload / self.copy_bytes_per_s
        return total

    def _edge_s(self, name: str, source: Layout, target: Layout) -> tuple[float, float]:
        """(forward, backward) seconds of an edge, one micro-batch."""
        if source == target:
            return 0.0, 0.0
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        key = (atoms, tensor.element_bytes, tensor.requires_grad, source, target)
        if key not in self._edge_cache:
            forward, backward = edge_steps(atoms, self.mesh, source, target)
            size = tensor.element_bytes
            self._edge_cache[key] = (
                self.steps_s(forward, size),
                self.steps_s(backward, size) if tensor.requires_grad else 0.0,
            )
        return self._edge_cache[key]

    def _bytes(self, name: str, layout: Layout) -> int:
        shape = local_shape(self.graph.atoms.atoms[name], layout, self.mesh)
        return prod(shape) * self.tensors[name].element_bytes

    def _parameter(self, name: str, stored: Layout, use: Layout | None, kept: int) -> tuple[float, float, float]:
        """(memory, compute, communication) of a parameter stored so and used so."""
        tensor = self.tensors[name]
        elements = prod(local_shape(self.graph.atoms.atoms[name], stored, self.mesh))
        memory = stored_bytes(tensor, elements, self.optimizer) if self.training else elements * tensor.element_bytes
        compute = elements * self.compute.optimizer_s_per_element if tensor.requires_grad else 0.0
        communication = 0.0
        axes = [a for a, code in enumerate(stored) if a > 0 and code == PARTIAL_GRAD]
        if axes and tensor.requires_grad:
            share = elements * tensor.element_bytes / BUCKET_BYTES
            communication += share * self._collective("all_reduce", axes, BUCKET_BYTES)
        if use is not None:
            communication += self._use_s(name, stored, use, kept) * self.mesh[0]
        return memory, compute, communication

    def _use_s(self, name: str, stored: Layout, use: Layout, kept: int) -> float:
        """Seconds of bringing a stored parameter to its use and its gradient back, per micro-batch."""
        forward, backward = self._edge_s(name, stored, use)
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        regathers = 0
        if stored != use and self.training:
            steps = edge_steps(atoms, self.mesh, stored, use)[0]
            regathers = kept if any(s.kind == "all_gather" for s in steps) else 0
        return forward * (1 + regathers) + (backward if tensor.requires_grad else 0.0)

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
            forward, backward = self.compute.seconds(work, facts)
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
                    self._parameter(n, s, u, kept.get(n, 0))
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
            total += sum(self._edge_s(*configuration.resolved)) * self.mesh[0]
        for op in group.operators:
            call = localise(configuration.placed(op.name, self.graph.atoms, self.mesh, None))
            for c in call.collectives:
                times = 1 if c.per_step else self.mesh[0]
                if self.training or not c.backward:
                    total += self._collective(c.kind, c.axes, c.bytes) * times
        for name in group.writes:
            if name not in self.graph.hubs and _leaves(self.graph, name):
                source = configuration.layout(name)
                total += sum(self._edge_s(name, source, output_layout(source))) * self.mesh[0]
        return total

    def _readers(self, name: str, *, parameter: bool = False) -> list[Group]:
        return [g for g in self.graph.groups if name in (g.shared if parameter else g.reads)]

    def _producer(self, name: str) -> Group:
        return self.graph.group_of[self.graph.atoms.graph.producer[name].name]

    def _hub(self, name: str) -> Variable:
        """A home for every placement its producer or a reader can have, kept or not."""
        groups = [self._producer(name), *self._readers(name)]
        layouts = dict.fromkeys(c.layout(name) for g in groups for c in self.configurations[g.name])
        keeps = [False, True] if self.training else [False]
        pairs = [(layout, kept) for layout in layouts for kept in keeps]
        zero = tuple(np.zeros(1) for _ in pairs)
        output = _leaves(self.graph, name)
        communication = tuple(
            np.array([sum(self._edge_s(name, layout, output_layout(layout))) * self.mesh[0] if output else 0.0])
            for layout, _ in pairs
        )
        return Variable(
            f"hub:{name}", "hub", zero, zero, communication, tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
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
        costs = [self._parameter(name, layout, None, 0) for layout in layouts]
        columns = [tuple(np.array([c[i]]) for c in costs) for i in range(3)]
        return Variable(f"parameter:{name}", "parameter", *columns, layouts=tuple(layouts))

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

    def _reads(self, group: Group, name: str) -> list[tuple[Layout, bool]]:
        """Per configuration of a reader: (layout, whether backward needs the tensor)."""
        template, short = self.templates[group.name], group.short_names[name]
        return [
            (c.layout(name), short in f.reads_kept)
            for c, f in zip(self.configurations[group.name], template.facts, strict=True)
        ]

    def _writes(self, group: Group, name: str) -> list[tuple[Layout, bool]]:
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
        left: Sequence[tuple[Layout, bool]],
        right: Sequence[tuple[Layout, bool]],
        cost: Callable[[tuple[Layout, bool], tuple[Layout, bool]], tuple[float, float]],
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

    def _move(self, name: str, source: Layout, target: Layout) -> float:
        return sum(self._edge_s(name, source, target)) * self.mesh[0]

    def _direct(self, name: str, producer: Group, reader: Group) -> EdgeTable:
        def cost(write: tuple[Layout, bool], read: tuple[Layout, bool]) -> tuple[float, float]:
            kept = read[1] and not (write[1] and _shares_storage(write[0], read[0]))
            return (self._bytes(name, read[0]) if kept else 0.0), self._move(name, write[0], read[0])

        return self._table(
            name, producer.name, reader.name, self._writes(producer, name), self._reads(reader, name), cost
        )

    def _hub_producer(self, name: str) -> EdgeTable:
        """Materialising the home costs its communication and, if it is kept, its bytes."""
        hub = self._variables[f"hub:{name}"]

        def cost(write: tuple[Layout, bool], home: tuple[Layout, bool]) -> tuple[float, float]:
            counted = write[1] and _shares_storage(write[0], home[0])
            return (self._bytes(name, home[0]) if home[1] and not counted else 0.0), self._move(
                name, write[0], home[0]
            )

        producer = self._producer(name)
        homes = list(zip(hub.layouts, hub.kept, strict=True))
        return self._table(name, producer.name, hub.name, self._writes(producer, name), homes, cost)

    def _hub_reader(self, name: str, reader: Group) -> EdgeTable:
        """A reader that needs the home itself in backward needs a kept home."""
        hub = self._variables[f"hub:{name}"]

        def cost(home: tuple[Layout, bool], read: tuple[Layout, bool]) -> tuple[float, float]:
            if not _shares_storage(home[0], read[0]):
                return (self._bytes(name, read[0]) if read[1] else 0.0), self._move(name, home[0], read[0])
            if read[1] and not home[1]:
                return np.inf, np.inf
            return 0.0, self._move(name, home[0], read[0])

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
            return 0.0, self._use_s(name, stored[0], use[0], use[1]) * self.mesh[0]

        homes = [(layout, 0) for layout in shared.layouts]
        return self._table(name, shared.name, reader.name, homes, uses, cost)


def _shares_storage(source: Layout, target: Layout) -> bool:
    """Whether an edge leaves the tensor itself alone: only the gradient's placement differs, if any."""
    return forward_placements(source) == forward_placements(target)


def _leaves(graph: GroupGraph, name: str) -> bool:
    """Whether a tensor is a result of the model or a buffer's new value."""
    return name in graph.atoms.graph.outputs or name in graph.atoms.graph.mutations.values()
