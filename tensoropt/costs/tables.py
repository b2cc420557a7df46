"""Cost tables: the configurations and options of every variable of the search, with their costs.

Variables are groups, hubs (tensors with several readers) and tied parameters. Memory is the sum of what is
saved and stored. Time is the sum of computing and communication over all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tensoropt.costs.cost_graph import CostGraph, edge_keys
from tensoropt.costs.prices import Prices
from tensoropt.costs.restrictions import FREE, Restriction
from tensoropt.costs.variables import Variable
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, memory_orders, workload
from tensoropt.sharding.configurations import AxisSizes, Configuration, enumerate_configurations
from tensoropt.sharding.groups import AxisStrategy, Group, GroupGraph
from tensoropt.sharding.regions import Region
from tensoropt.sharding.strategy import Strategy


@dataclass(frozen=True)
class Template:
    """Configurations (as strategy indices), workloads and facts (memory, FLOP) of groups of one structure."""

    choices: tuple[tuple[int, ...], ...]
    works: tuple[Workload, ...]
    facts: tuple[Facts, ...]
    look: str = field(default="", repr=False, compare=False)


@dataclass(kw_only=True, eq=False, repr=False)
class CostTables(CostGraph):
    """The cost graph of one mesh and micro-batch count, with what is needed to turn its choices into a
    strategy.

    Attributes:
        moves: tensor -> the key of the edge whose option says whether backward gathers the tensor again (1)
            or its gathered copy is saved (0).
    """

    graph: GroupGraph
    mesh: AxisSizes
    templates: Mapping[str, Template]
    micro: Mapping[str, AxisStrategy]
    prices: Prices
    regions: tuple[Region, ...] = ()
    moves: Mapping[str, tuple[Variable, Variable, int]] = field(default_factory=dict)

    def position(self, group: str, index: int) -> int:
        """Convert ``index`` in a group's cost table, which in a recomputable block lists all configurations
        again as recomputed, to the index in the group's :class:`Template`."""
        # In a region the variable has every configuration twice, plain ones first (TableBuilder._group).
        return index % len(self.templates[group].choices)

    def labels(self, group: str, index: int) -> tuple[str, ...]:
        """Return the labels of a group's configuration ``index``: the loop that each mesh axis splits."""
        return self.configuration(self.graph.group_of[group], index).labels

    def facts(self, choice: Mapping[str, int]) -> dict[str, Facts]:
        return {
            g.name: self.templates[g.name].facts[self.position(g.name, choice[g.name])]
            for g in self.graph.groups
        }

    def configuration(self, group: Group, index: int) -> Configuration:
        choice = self.templates[group.name].choices[self.position(group.name, index)]
        return Configuration(group, (self.micro[group.name], *(group.strategies[i] for i in choice)))

    def strategy(self, choice: Mapping[str, int], options: Mapping[object, int]) -> Strategy:
        configurations: dict[str, Configuration] = {}
        stored: dict[str, Layout] = {}
        hubs: dict[str, Layout] = {}
        for group in self.graph.groups:
            index = choice[group.name]
            configurations[group.name] = self.configuration(group, index)
            # A missing option is the first one, which stores parameters as they are used.
            stored_so = self.of[group.name].options[index][options.get(group.name, 0)]
            stored.update(zip(group.parameters, stored_so, strict=True))
        for name in self.graph.hubs:
            hub = Variable.of_hub(name)
            hubs[name] = self.of[hub].layouts[choice[hub]]
        for name in self.graph.shared:
            parameter = Variable.of_parameter(name)
            stored[name] = self.of[parameter].layouts[choice[parameter]]
        again = {name for r in self.regions for name in r.groups if self.of[name].again[choice[name]]}
        recomputed = tuple(r for r in self.regions if not again.isdisjoint(r.groups))
        once = frozenset(name for r in recomputed for name in r.groups if name not in again)
        gathered = frozenset(name for name in self.moves if self.gathered_again(name, options))
        return Strategy(self.graph, self.mesh, configurations, hubs, stored, recomputed, once, gathered)

    def gathered_again(self, name: str, options: Mapping[object, int]) -> int:
        """Return 1 if these options let backward gather a tensor again, 0 if its copy is saved."""
        # A search names the edge's option by the edge, everything else by the tensor.
        return options.get(Variable.of_move(name), options.get(self.moves[name], 0))

    @cached_property
    def without_moves(self) -> CostTables:
        """The same tables without the options by which backward gathers tensors again."""
        edges = [replace(e, table=e.table[:, :, 0]) if e.table.ndim > 3 else e for e in self.edges]
        return replace(self, edges=edges, moves={})

    def breakdown(
        self, choice: Mapping[str, int], options: Mapping[object, int]
    ) -> tuple[float, float, float]:
        memory = compute = communication = 0.0
        for v in self.variables:
            i, o = choice[v.key], options.get(v.key, 0)
            memory += float(v.memory[i][o])
            compute += float(v.compute[i][o])
            communication += float(v.communication[i][o])
        tensor_of = {edge: name for name, edge in self.moves.items()}
        for e, key in zip(self.edges, edge_keys(self.edges), strict=True):
            cost = e.table[e.rows[choice[e.a]], e.cols[choice[e.b]]]
            if e.table.ndim > 3:
                cost = cost[self.gathered_again(tensor_of[key], options)]
            memory += float(cost[0])
            communication += float(cost[1])
        return memory, compute, communication


def _group_key(graph: GroupGraph, group: Group, micro: AxisStrategy) -> str:
    """Return a key that is equal for isomorphic groups, whose configurations and workloads are equal."""
    tensors = graph.atoms.graph.tensors
    names: dict[str, int] = {}
    parts: list[object] = []
    for op in group.operators:
        for name in (*op.inputs(), *op.outputs):
            names.setdefault(name, len(names))
        shapes = repr([op.args, sorted(op.kwargs.items())])
        # The longest names first, because a name may be a prefix of another one.
        for name in sorted(set(op.inputs()), key=len, reverse=True):
            shapes = shapes.replace(f"Ref(name='{name}')", f"t{names[name]}")
        parts.append((op.target, shapes, [names[n] for n in op.outputs]))
        # How loops may be cut can follow from other operators over the same atoms.
        loops = graph.atoms.spaces[op.name].dims
        parts.append([(d.splittable, d.uneven, d.growing, d.along, d.small_parts) for d in loops])
    # A tensor with another memory layout costs other copies, so the order is part of the look.
    orders = memory_orders(graph)
    for name in names:
        t = tensors[name]
        parts.append((t.shape, t.dtype, t.stored_dtype, t.kind, t.requires_grad, graph.atoms.atoms[name]))
        parts.append(orders.get(name))
        count = len(graph.atoms.atom_sizes(name)) if graph.atoms.zigzag else 0
        parts.append([atom for atom in range(count) if (name, atom) in graph.atoms.zigzag])
    roles = [[names[n] for n in part] for part in (group.reads, group.parameters, group.shared, group.writes)]
    roles.append([names[n] for n in group.writes if n not in graph.hubs and leaves_model(graph, n)])
    labels = [str(s.label) for s in group.strategies]
    return repr(
        (
            parts,
            roles,
            labels,
            group.strategies.index(micro) if micro in group.strategies else str(micro.label),
        )
    )


def make_templates(
    graph: GroupGraph,
    mesh: AxisSizes,
    micro: Mapping[str, AxisStrategy],
    facts_of: Callable[[Workload], Facts],
    restriction: Restriction = FREE,
) -> dict[str, Template]:
    """Return group -> its template of configurations and workloads; isomorphic groups share one object."""
    return with_facts(outline_templates(graph, mesh, micro, restriction), facts_of)


def group_keys(graph: GroupGraph, micro: Mapping[str, AxisStrategy]) -> dict[str, str]:
    """Return group name -> a key that isomorphic groups share, on any mesh."""
    return {group.name: _group_key(graph, group, micro[group.name]) for group in graph.groups}


def outline_templates(
    graph: GroupGraph,
    mesh: AxisSizes,
    micro: Mapping[str, AxisStrategy],
    restriction: Restriction = FREE,
    keys: Mapping[str, str] | None = None,
) -> dict[str, Template]:
    """Return group -> its template, without facts (memory, FLOP), which take longest; ``keys``: the
    :func:`group_keys`, computed if None."""
    keys = group_keys(graph, micro) if keys is None else keys
    shared: dict[str, Template] = {}
    result = {}
    for group in graph.groups:
        key = f"{keys[group.name]} {restriction.about(group)!r}"
        if key not in shared:
            configurations = enumerate_configurations(graph.atoms, group, mesh, micro[group.name])
            if group.name in restriction.kept:
                configurations = tuple(configurations[i] for i in restriction.kept[group.name])
            # By identity: configurations have the group's own strategy objects, and a template keeps only
            # their positions, because groups that look alike have other objects.
            index = {id(s): i for i, s in enumerate(group.strategies)}
            combined = set(restriction.combined.get(group.name, index.values()))
            outer = set(restriction.outer.get(group.name, combined))
            left = [
                c
                for c in configurations
                if all(index[id(s)] in combined for s in c.strategies[1:][-1:])
                and all(index[id(s)] in outer for s in c.strategies[1:-1])
            ]
            # Sizes that are divisible by the axes of other meshes need not be divisible by this one's.
            configurations = tuple(left) or configurations
            choices = tuple(tuple(index[id(s)] for s in c.strategies[1:]) for c in configurations)
            works = tuple(workload(graph, c, mesh) for c in configurations)
            shared[key] = Template(choices, works, (), key)
        result[group.name] = shared[key]
    return result


def with_facts(
    templates: Mapping[str, Template], facts_of: Callable[[Workload], Facts]
) -> dict[str, Template]:
    """Return the templates with the facts of their workloads; groups still share templates."""
    distinct = {id(template): template for template in templates.values()}
    made = {
        key: replace(template, facts=tuple(map(facts_of, template.works)))
        for key, template in distinct.items()
    }
    return {name: made[id(template)] for name, template in templates.items()}


def leaves_model(graph: GroupGraph, name: str) -> bool:
    """Return whether a tensor is a result of the model or a buffer's new value."""
    return name in graph.atoms.graph.outputs or name in graph.atoms.graph.mutations.values()
