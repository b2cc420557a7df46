"""Strategies: configurations of all groups, storage of all parameters, and the reshardings that follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from tensoropt.errors import PlanError, closest
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import (
    PARTIAL_GRAD,
    REPLICATE,
    Atoms,
    Layout,
    layout_names,
    local_shape,
    placement_code,
)
from tensoropt.sharding.configurations import AxisSizes, Configuration, fits
from tensoropt.sharding.gathered_again import ends_of, gatherable, is_gathered
from tensoropt.sharding.groups import (
    Group,
    GroupGraph,
    LinearProduct,
    is_one_reduction,
    products_beside,
    takes_over_hub,
)
from tensoropt.sharding.regions import Blocks, Region, find_blocks, find_regions, fitting_once, region_of
from tensoropt.sharding.reshard.steps import ReshardingStep, edge_steps
from tensoropt.sharding.storage import Gather, Storage, Way, way


class ParallelStrategy(Protocol):
    """The interface of strategies of every kind: pipeline stages, and their schedule of micro-batches.

    A place is an equal part of the devices, which runs the stages that the schedule assigns to it.

    Attributes:
        kind: the name of the kind of strategy, as in plans.
    """

    kind: ClassVar[str]

    @property
    def graph(self) -> GroupGraph: ...

    @property
    def stages(self) -> Sequence[Any]: ...

    @property
    def schedule(self) -> str:
        """The name of the pipeline schedule; "" if it follows from the stages."""

    @property
    def places(self) -> int: ...

    @property
    def devices(self) -> int:
        """The number of ranks."""

    @property
    def micro_batches(self) -> int: ...

    @property
    def mesh_text(self) -> str:
        """The shape of the device mesh as text, such as ``2x4``."""

    @property
    def sent_buffers(self) -> Mapping[str, int]:
        """Changed buffer -> the place (device group) that computes it and broadcasts it to others."""

    def place_of(self, stage: int) -> int: ...

    def maker(self, name: str) -> int | None:
        """Return the stage that makes a result or a buffer's new value; None if no stage makes all of it."""

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the stages that store a parameter."""

    def to_data(self) -> dict[str, Any]:
        """Return the strategy as plain data for :meth:`from_data`."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any], graph: GroupGraph) -> Self:
        """Return the strategy of this model that :meth:`to_data` wrote.

        Raises:
            PlanError: the data do not fit this graph; the message names the first difference.
        """

    @property
    def representatives(self) -> tuple[int, ...]:
        """Ranks that together have every program, and the first and the last shard of every split dim."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One resharding of a tensor between two layouts.

    Attributes:
        source, target: the layouts before and after; equal if nothing is resharded.
        reader: the group that reads the result; "" for a hub (tensor with several readers) or an output.
        kind: ``activation``, ``parameter``, ``resolve`` (in a group), ``output``, ``unsharded`` (once per
            step).
        back: the layout to which an unsharded parameter's gradient goes, if not ``source``.
        block: the block of the reader (of an unsharded copy, the first reader), if the parameter is
            prefetched or its gradient scattered later.
        behind: the first block that reads the parameter in this layout, after whose backward the gradients of
            all readers are scattered as one sum.
    """

    tensor: str
    source: Layout
    target: Layout
    reader: str
    kind: str
    back: Layout | None = None
    block: int | None = None
    behind: int | None = None

    @property
    def moves(self) -> bool:
        """Whether the resharding sends, cuts or masks anything."""
        return self.source != self.target or self.back is not None


class Scattered(NamedTuple):
    """How a parameter's gradient reaches its stored shard in backward.

    Attributes:
        sums: the number of gradient sums scattered one block later, one per layout in which groups read it.
        others: whether further uses return their gradients separately.
    """

    sums: int
    others: bool = False


@dataclass(frozen=True)
class Strategy:
    """The choices of a sharded plan: configurations, layouts of hubs and stored parameters, recomputation.

    Attributes:
        mesh: (micro-batches, axis sizes...).
        configurations: by group name.
        hubs: tensor with several readers -> the layout in which it is materialised.
        stored: parameter -> its layout between steps.
        recomputed: the regions recomputed wholly or in part.
        once: the groups of these regions that run once; their results are saved if backward needs them.
        gathered_again: activations gathered again in backward (:mod:`tensoropt.sharding.gathered_again`).
        zigzag_beside: whether another stage of the pipeline cuts sequences in zig-zag order.
        leaving: output -> its layout, for outputs that are not whole on every rank.
    """

    kind: ClassVar[str] = "sharded"

    graph: GroupGraph
    mesh: AxisSizes
    configurations: Mapping[str, Configuration]
    hubs: Mapping[str, Layout]
    stored: Mapping[str, Layout]
    recomputed: tuple[Region, ...] = ()
    once: frozenset[str] = frozenset()
    gathered_again: frozenset[str] = frozenset()
    zigzag_beside: bool = False
    leaving: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def stages(self) -> tuple[Strategy, ...]:
        return (self,)

    schedule = ""
    places = 1

    @property
    def sent_buffers(self) -> Mapping[str, int]:
        return {}

    @property
    def devices(self) -> int:
        return prod(self.mesh[1:])

    @property
    def micro_batches(self) -> int:
        return self.mesh[0]

    @property
    def mesh_text(self) -> str:
        return "x".join(map(str, self.mesh[1:])) or "1"

    def place_of(self, stage: int) -> int:
        return 0

    def maker(self, name: str) -> int:
        return 0

    def holders(self, name: str) -> tuple[int, ...]:
        return (0,)

    def tensor(self, name: str) -> Tensor:
        return self.graph.atoms.graph.tensors[name]

    def atom_sizes(self, name: str) -> tuple[int, ...]:
        """Return the sizes of all atoms (factors of dims) of a tensor, outermost first."""
        return self.graph.atoms.atom_sizes(name)

    def atoms(self, name: str) -> Atoms:
        """Return the sizes of the atoms (factors) of each dim of a tensor."""
        return self.graph.atoms.atoms[name]

    @cached_property
    def zigzag(self) -> bool:
        """Whether sequences are in zig-zag order, as causal attention is split along its queries."""
        atoms = self.graph.atoms
        if not atoms.may_zigzag(self.mesh):
            return False
        return self.zigzag_beside or any(
            choice >= 0 and size > 1 and atoms.spaces[op.name].dims[choice].growing
            for configuration in self.configurations.values()
            for op in configuration.group.operators
            for choice, size in zip(configuration.choices(op.name), self.mesh, strict=True)
        )

    def zigzag_atoms(self, name: str) -> frozenset[int]:
        """Return the numbers of a tensor's atoms (factors of dims) that are in zig-zag order."""
        if not self.zigzag:
            return frozenset()
        return frozenset(position for tensor, position in self.graph.atoms.zigzag if tensor == name)

    @cached_property
    def made(self) -> Mapping[str, Layout]:
        """The layout of every activation as its group produces it."""
        return {
            name: self.configurations[group.name].layout(name)
            for group in self.graph.groups
            for op in group.operators
            for name in op.outputs
        }

    def source_layout(self, name: str) -> Layout:
        """Return the layout from which readers reshard a tensor: the hub's, or as its group makes it."""
        return self.hubs.get(name, self.made[name])

    def edges(self) -> Iterator[Edge]:
        """Yield every resharding of forward in no particular order, also those that move nothing."""
        for name, materialised in self.hubs.items():
            yield Edge(name, self.made[name], materialised, "", "activation")
        for group in self.graph.groups:
            configuration = self.configurations[group.name]
            if configuration.resolved is not None:
                name, before, after = configuration.resolved
                yield Edge(name, before, after, group.name, "resolve")
            for name in group.reads:
                source = self.source_layout(name)
                yield Edge(name, source, configuration.layout(name), group.name, "activation")
            for name in (*group.parameters, *group.shared):
                yield self.use(name, group)
        yield from self.unsharded.values()
        source_graph = self.graph.atoms.graph
        for name in dict.fromkeys((*source_graph.outputs, *source_graph.mutations.values())):
            if name in self.made:
                yield self.output_edge(name)

    def output_edge(self, name: str) -> Edge:
        """Return the resharding of a result of the model, or of a buffer's new value."""
        source = self.source_layout(name)
        return Edge(name, source, self.leaving.get(name) or output_layout(source), "", "output")

    @cached_property
    def reduced_beside(self) -> Mapping[str, tuple[LinearProduct, Edge]]:
        """Activation -> (linear operator that hides the reduction of its gradient, its resharding)."""
        products = products_beside(self.graph)
        pairs = ((product, self._edge_beside(name, product)) for name, product in products.items())
        return {edge.tensor: (product, edge) for product, edge in pairs if edge is not None}

    def _edge_beside(self, name: str, product: LinearProduct) -> Edge | None:
        read = self.configurations[product.group].layout(name)
        if name in self.hubs:
            own = self.steps(Edge(name, self.hubs[name], read, product.group, "activation"))
            region, twice = self.region_of.get(product.group), self.forwards(product.group) > 1
            maker = self.graph.group_of[self.graph.atoms.graph.producer[name].name].name
            inside = region is not None and region is self.region_of.get(maker)
            if not takes_over_hub(own, again=twice, inside=inside):
                return None
            edge = Edge(name, self.made[name], self.hubs[name], "", "activation")
        else:
            edge = Edge(name, self.made[name], read, product.group, "activation")
        return edge if is_one_reduction(self.steps(edge)[1], self.mesh) else None

    def way(self, name: str, group: Group) -> Way:
        use = self.configurations[group.name].layout(name)
        shared, atoms = name in self.graph.shared, self.atom_sizes(name)
        return way(self.tensor(name), self.stored[name], use, atoms, self.mesh, shared=shared)

    def use(self, name: str, group: Group) -> Edge:
        """Return the resharding that brings a parameter to a group."""
        route = self.way(name, group)
        back = route.back if route.back != route.source else None
        behind = self._behind.get((name, route.use)) if self._goes_behind(name, group, route) else None
        overlaps = behind is not None or self._goes_ahead(name, group, route)
        block = self.blocks.of[group.name] if overlaps else None
        return Edge(name, route.source, route.use, group.name, "parameter", back, block, behind)

    @cached_property
    def _behind(self) -> Mapping[tuple[str, Layout], int]:
        first_blocks: dict[tuple[str, Layout], int] = {}
        for name, group in self.graph.uses:
            route = self.way(name, group)
            if self._goes_behind(name, group, route):
                first_blocks.setdefault((name, route.use), self.blocks.of[group.name])
        return first_blocks

    @cached_property
    def scattered(self) -> Mapping[str, Scattered]:
        """Parameter whose gradient is scattered one block later -> how the gradient reaches its shard."""
        arrivals: dict[str, Scattered] = {}
        for name, _ in self._behind:
            arrivals[name] = Scattered(arrivals[name].sums + 1 if name in arrivals else 1)
        for name, group in self.graph.uses:
            learns = self.graph.learns(name, group.name)
            if name in arrivals and learns and not self._goes_behind(name, group, self.way(name, group)):
                arrivals[name] = arrivals[name]._replace(others=True)
        last = (edge for edge in self.unsharded.values() if edge.block is not None)
        return arrivals | {edge.tensor: Scattered(1) for edge in last if self.reduced_last(edge.tensor)}

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks (repeated layers) whose parameters are prefetched together."""
        return find_blocks(self.graph)

    def _goes_ahead(self, name: str, group: Group, way: Way) -> bool:
        learns = self.graph.learns(name, group.name)
        return self._has_neighbours(group, way) and way.goes_ahead(learns=learns)

    def _goes_behind(self, name: str, group: Group, way: Way) -> bool:
        learns = self.graph.learns(name, group.name)
        return self._has_neighbours(group, way) and way.goes_behind(learns=learns)

    def _has_neighbours(self, group: Group, way: Way) -> bool:
        return way.ahead and self.blocks.neighbours(group.name) is not None

    def reduced_last(self, name: str) -> bool:
        """Return whether a parameter's gradient stays with its unsharded copy until the last micro-batch."""
        last = Storage.of(self.stored[name]).reduced_last
        return last and self.tensor(name).requires_grad and name in self.unsharded

    @cached_property
    def unsharded(self) -> Mapping[str, Edge]:
        """Parameter -> the resharding that gathers its unsharded copy for the whole step."""
        return {edge.tensor: edge for edge in self._unsharded()}

    def _unsharded(self) -> Iterator[Edge]:
        # A shared parameter has several ways, all from the same copy (`whole_layout`), so any of them will
        # do.
        ways: dict[str, tuple[Group, Way]] = {}
        for name, group in self.graph.uses:
            ways.setdefault(name, (group, self.way(name, group)))
        for name, (group, route) in ways.items():
            if route.unsharded:
                learns = self.tensor(name).requires_grad
                ahead = self._has_neighbours(group, route) and route.copy_goes_ahead(learns=learns)
                block = self.blocks.of[group.name] if ahead else None
                yield Edge(name, route.shard, route.source, "", "unsharded", block=block)

    @cached_property
    def region_of(self) -> Mapping[str, Region]:
        return region_of(self.recomputed)

    def forwards(self, group: str) -> int:
        """Return how often a group's forward runs in one micro-batch of training."""
        return 2 if group in self.region_of and group not in self.once else 1

    def gathers_again(self, edge: Edge) -> bool:
        """Return whether backward repeats a forward resharding, as its gathered result is not saved."""
        to_hub = edge.reader == "" or edge.tensor not in self.hubs
        return edge.kind == "activation" and to_hub and edge.tensor in self.gathered_again

    def steps(self, edge: Edge) -> tuple[tuple[ReshardingStep, ...], tuple[ReshardingStep, ...]]:
        """Return the (forward, backward) steps of a resharding; no backward steps without a gradient."""
        if not edge.moves:
            return (), ()
        sizes, learns = self.atom_sizes(edge.tensor), self.tensor(edge.tensor).requires_grad
        forward, backward = edge_steps(sizes, self.mesh, edge.source, edge.target)
        if edge.back is not None:
            # The value came from the unsharded copy, but the gradient goes to where the shard is.
            backward = edge_steps(sizes, self.mesh, edge.back, edge.target)[1]
        if edge.kind == "parameter" and edge.reader:
            learns = self.graph.learns(edge.tensor, edge.reader)
        # If not reduced last, the gradient was reduced in every micro-batch, on the edges of the uses.
        if edge.kind == "unsharded":
            learns = learns and Storage.of(self.stored[edge.tensor]).reduced_last
        return forward, backward if learns else ()

    def local_shape(
        self, name: str, layout: Layout, coordinate: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """Return the shape of a tensor's shard in a layout: at ``coordinate``, or None for the largest."""
        return local_shape(self.atoms(name), layout, self.mesh, coordinate)

    def to_data(self) -> dict[str, Any]:
        """Return the strategy as plain data: mesh, labels, placements, recomputed regions."""
        return {
            "mesh": list(self.mesh),
            "groups": {
                name: [str(s.label) for s in configuration.strategies]
                for name, configuration in self.configurations.items()
            },
            "hubs": {name: list(layout_names(layout)) for name, layout in self.hubs.items()},
            "stored": {name: list(layout_names(layout)) for name, layout in self.stored.items()},
            "recomputed": [region.name for region in self.recomputed],
            "once": sorted(self.once),
            "gathered_again": sorted(self.gathered_again),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], graph: GroupGraph) -> Strategy:
        """Return the strategy of this model that :meth:`to_data` wrote; PlanError if the data do not fit."""
        mesh = _mesh(data.get("mesh"))
        groups = _section(data, "groups", (g.name for g in graph.groups))
        hubs = _section(data, "hubs", graph.hubs)
        recomputed = _regions(graph, data.get("recomputed", ()))
        parameters = [t.name for t in graph.atoms.graph.parameters]
        stored = _section(data, "stored", parameters)
        strategy = cls(
            graph=graph,
            mesh=mesh,
            configurations={g.name: _configuration(graph, g, groups[g.name], mesh) for g in graph.groups},
            hubs={name: _layout(graph, "hub", name, hubs[name], mesh) for name in graph.hubs},
            stored={name: _layout(graph, "parameter", name, stored[name], mesh) for name in parameters},
            recomputed=recomputed,
            once=_once(graph, recomputed, data.get("once", ())),
            gathered_again=frozenset(data.get("gathered_again", ())),
        )
        strategy._check_gathered_again()
        return strategy

    def _check_gathered_again(self) -> None:
        for name in sorted(self.gathered_again):
            if name in self.gatherable:
                continue
            what = f"the plan gathers {name} again in backward"
            if name not in self.made:
                near = "".join(f" (nearest: {near})" for near in closest(name, self.made, most=1))
                raise PlanError(f"{what}, which this model does not make{near}")
            if name not in gatherable(self.graph):
                raise PlanError(
                    f"{what}; this is possible only for an activation of a training step that stays in one "
                    "pipeline stage and of which no reader returns a view; take it out of 'gathered_again'"
                )
            raise PlanError(f"{what}, {self._not_gathered(name)}")

    @cached_property
    def gatherable(self) -> frozenset[str]:
        return frozenset(name for name in gatherable(self.graph) if not self._not_gathered(name))

    def _not_gathered(self, name: str) -> str:
        again, (maker, *readers) = self.region_of.keys() - self.once, ends_of(self.graph, name)
        if maker in again:
            return f"and also recomputes {maker}, which makes that tensor; leave out one of the two"
        if name not in self.hubs and readers[0] in again:
            return f"and also recomputes {readers[0]}, its only reader; leave out one of the two"
        target = self.hubs.get(name) or self.configurations[readers[0]].layout(name)
        gathered = is_gathered(self.atoms(name), self.mesh, self.made[name], target)
        return "" if gathered else "but no reader gathers it in forward; take it out of 'gathered_again'"

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first rank, then the last one along the first mesh axis, along the first two, and so on."""
        ranks, stride = [0], prod(self.mesh[1:])
        for size in self.mesh[1:]:
            stride //= size
            ranks.append(ranks[-1] + (size - 1) * stride)
        return tuple(dict.fromkeys(ranks))


def output_layout(source: Layout) -> Layout:
    """Return the layout of a tensor that leaves the model: whole, with the micro-batch axis unchanged."""
    # The engine combines the micro-batches' results after the last one.
    return (source[0], *(REPLICATE for _ in source[1:]))


def replicated_axes(layout: Layout) -> tuple[int, ...]:
    """Return the mesh axes, micro-batches excluded, along which a parameter is stored whole."""
    return tuple(a for a, code in enumerate(layout) if a > 0 and code in (REPLICATE, PARTIAL_GRAD))


def _regions(graph: GroupGraph, names: Sequence[str]) -> tuple[Region, ...]:
    available = {r.name: r for r in find_regions(graph)} if names else {}
    for name in names:
        if name not in available:
            raise PlanError(
                f"the plan recomputes {name}, which is not a repeated block of this model; "
                f"the model has: {', '.join(available) or 'none'}"
            )
    return tuple(r for r in available.values() if r.name in names)


def _once(graph: GroupGraph, recomputed: Sequence[Region], names: Sequence[str]) -> frozenset[str]:
    inside = region_of(recomputed)
    for name in names:
        if name not in inside:
            raise PlanError(
                f"the plan lists {name} to run once in a recomputed block, but it is in no such block; the "
                f"plan recomputes {', '.join(region.name for region in recomputed) or 'nothing'}"
            )
    once = frozenset(names)
    for region in recomputed:
        if once.issuperset(region.groups):
            raise PlanError(
                f"the plan recomputes {region.name}, but runs all of its groups once; leave the block out"
            )
        if differs := once.intersection(region.groups) - fitting_once(graph, region, once):
            raise PlanError(
                f"{min(differs)} is not recomputed, but may return a view of a recomputed tensor; recompute "
                "this group as well"
            )
    return once


def _mesh(value: Any) -> AxisSizes:
    whole = isinstance(value, Sequence) and all(isinstance(n, int) and n >= 1 for n in value)
    if not whole or not value:
        raise PlanError(f"the plan's mesh {value!r} must be a number of micro-batches, then axis sizes")
    return tuple(value)


def _section(data: Mapping[str, Any], section: str, expected: Iterable[str]) -> Mapping[str, Any]:
    entries = data.get(section)
    if not isinstance(entries, Mapping):
        raise PlanError(f"the plan has no section '{section}', so it is not a strategy")
    # A dict for its order: the first difference in the graph's order is the one that is reported.
    names = dict.fromkeys(expected)
    for name in names:
        if name not in entries:
            raise PlanError(f"the plan says nothing about {name} ({section}); it is for another model")
    for name in entries:
        if name not in names:
            hint = "".join(f" (nearest: {near})" for near in closest(name, names, most=1))
            raise PlanError(f"the plan names {name} ({section}), which this model does not have{hint}")
    return entries


def _per_axis(entry: str, value: Any, mesh: AxisSizes) -> Sequence[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(mesh):
        raise PlanError(f"{entry}: expected {len(mesh)} names, one per mesh axis, but the plan has {value!r}")
    return value


def _configuration(graph: GroupGraph, group: Group, labels: Any, mesh: AxisSizes) -> Configuration:
    available = {str(s.label): s for s in group.strategies}
    chosen = []
    for label in _per_axis(group.name, labels, mesh):
        if label not in available:
            raise PlanError(f"{group.name} cannot be split as '{label}'; possible: {', '.join(available)}")
        chosen.append(available[label])
    configuration = Configuration(group, tuple(chosen))
    # Labels alone can be valid although they do not divide the model's own sizes, for example after an edit
    # of the plan or the mesh.
    if not fits(graph.atoms, group, configuration.strategies, mesh):
        raise PlanError(
            f"{group.name} does not divide as {'/'.join(labels)} over the mesh {'x'.join(map(str, mesh))}"
        )
    return configuration


def _layout(graph: GroupGraph, entry: str, name: str, names: Any, mesh: AxisSizes) -> Layout:
    sizes = graph.atoms.atom_sizes(name)
    try:
        layout = tuple(placement_code(n) for n in _per_axis(f"{entry} {name}", names, mesh))
    except (ValueError, AttributeError) as error:
        raise PlanError(f"{entry} {name}: {error}") from None
    if entry != "parameter" and Storage.of(layout).gather is not Gather.EACH_USE:
        raise PlanError(f"{entry} {name}: only the layout of a parameter may have {names[0]!r}")
    if any(Storage.of((code,)).gather is not Gather.EACH_USE for code in layout[1:]):
        raise PlanError(
            f"{entry} {name}: held, held/P and ahead belong on the micro-batch axis, the first of {names}"
        )
    for code in layout:
        # Negative codes pass, because a replicated or partial placement needs no atom.
        if code >= len(sizes):
            raise PlanError(
                f"{entry} {name}: the tensor's dims have {len(sizes)} factors to split, counted from S(0), "
                f"so there is no S({code})"
            )
        parts = prod(mesh[axis] for axis, c in enumerate(layout) if c == code)
        if code >= 0 and parts > sizes[code]:
            raise PlanError(
                f"{entry} {name} is split {parts} ways as S({code}), which has only {sizes[code]} elements"
            )
    return layout
