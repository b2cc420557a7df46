"""Cost tables of edges: what it costs that two variables' choices meet.

An edge runs in the region of the group that reads. What enters a recomputed region is kept as it comes,
at its source's placement, and goes its way into the region again in backward; what passes between two
groups of one recomputed region is not kept at all. All groups of a region are recomputed, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np

from tensoropt.costs.prices import Prices
from tensoropt.costs.restrictions import Labels, Restriction, labels_of
from tensoropt.costs.tables import EdgeTable, Template, Variable
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.groups import Group, GroupGraph
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.regions import Region
from tensoropt.sharding.reshard.steps import forward_placements


class End(NamedTuple):
    """One end of an edge under one choice.

    Attributes:
        layout: of the tensor at this end.
        kept: writer: it keeps the tensor itself; reader: how often backward needs it; hub: the home is
            kept for backward.
        again: this end lies in a recomputed region.
    """

    layout: Layout
    kept: int
    again: bool = False


Cost = tuple[float, float]
IMPOSSIBLE: Cost = (np.inf, np.inf)


class EdgeBuilder:
    """Edge tables of one mesh.

    Args:
        configurations: per group name, in the order of its template.
        region_of: per group name the region that offers to recompute it.
    """

    def __init__(
        self,
        graph: GroupGraph,
        prices: Prices,
        templates: Mapping[str, Template],
        configurations: Mapping[str, Sequence[Configuration]],
        region_of: Mapping[str, Region],
    ):
        self.graph = graph
        self.prices = prices
        self.templates = templates
        self.configurations = configurations
        self.region_of = region_of
        self.tensors = graph.atoms.graph.tensors
        self._tables: dict[object, np.ndarray] = {}

    def build(self, variables: Mapping[str, Variable], regions: Sequence[Region]) -> Iterator[EdgeTable]:
        self.variables = variables
        hubs = set(self.graph.hubs)
        for group in self.graph.groups:
            for name in group.reads:
                yield self._hub_reader(name, group) if name in hubs else self._direct(name, group)
            for name in group.shared:
                yield self._parameter_use(name, group)
        for name in self.graph.hubs:
            yield self._hub_producer(name)
        for region in regions:
            yield from self._agreement(region)

    # -- ends -------------------------------------------------------------------------------------

    def _producer(self, name: str) -> Group:
        return self.graph.group_of[self.graph.atoms.graph.producer[name].name]

    def _readers(self, name: str) -> list[Group]:
        return [g for g in self.graph.groups if name in g.reads]

    def _inside(self, name: str, reader: Group) -> bool:
        """Whether a tensor is made and read in one region."""
        region = self.region_of.get(reader.name)
        return region is not None and region is self.region_of.get(self._producer(name).name)

    def _passes(self, group: Group) -> tuple[bool, ...]:
        return (False, True) if group.name in self.region_of else (False,)

    def _ends(self, group: Group, name: str, kept: Callable[[int, str], int]) -> list[End]:
        short = group.short_names[name]
        return [
            End(c.layout(name), kept(i, short), again)
            for again in self._passes(group)
            for i, c in enumerate(self.configurations[group.name])
        ]

    def _reads(self, group: Group, name: str) -> list[End]:
        """Per configuration of a reader: whether backward needs the tensor."""
        facts = self.templates[group.name].facts
        return self._ends(group, name, lambda i, short: int(short in facts[i].reads_kept))

    def _writes(self, group: Group, name: str) -> list[End]:
        """Per configuration of a producer: whether the group itself keeps the tensor."""
        facts = self.templates[group.name].facts
        ends = self._ends(group, name, lambda i, short: int(short in facts[i].writes_kept))
        return [e._replace(kept=0) if e.again else e for e in ends]

    def _uses(self, group: Group, name: str) -> list[End]:
        """Per configuration of a group: how often backward needs a shared parameter."""
        facts = self.templates[group.name].facts
        return self._ends(group, name, lambda i, short: facts[i].parameters_kept.get(short, 0))

    def homes(self, name: str) -> list[End]:
        """What a hub can be: at a placement of its producer or a reader; kept, where a reader's backward
        may need it so or a recomputed region may begin with it; made once or, in a region, again."""
        producer, readers = self._producer(name), self._readers(name)
        layouts = dict.fromkeys(
            c.layout(name) for g in (producer, *readers) for c in self.configurations[g.name]
        )
        needed = dict.fromkeys(e.layout for g in readers for e in self._reads(g, name) if e.kept)
        enters = any(g.name in self.region_of and not self._inside(name, g) for g in readers)
        pairs = [
            *((layout, 0) for layout in layouts),
            *((layout, 1) for layout in (layouts if enters else needed)),
        ]
        stays = any(self._inside(name, g) for g in readers)
        return [
            End(layout, kept, again)
            for again in ((False, True) if stays else (False,))
            for layout, kept in pairs
        ]

    # -- tables -----------------------------------------------------------------------------------

    def _table(
        self,
        name: str,
        ends: tuple[tuple[str, Sequence[End]], tuple[str, Sequence[End]]],
        inside: bool,
        cost: Callable[[End, End], Cost],
    ) -> EdgeTable:
        """The table of two variables, by their distinct ends."""
        (a, left), (b, right) = ends
        rows = {key: i for i, key in enumerate(dict.fromkeys(left))}
        cols = {key: i for i, key in enumerate(dict.fromkeys(right))}
        # Layers repeat: the same placements of a tensor like this one cost the same everywhere.
        tensor = self.tensors[name]
        kind = [end.partition(":")[0] if ":" in end else "group" for end in (a, b)]
        like = (
            self.graph.atoms.atoms[name],
            tensor.dtype,
            tensor.stored_dtype,
            tensor.requires_grad,
            inside,
            *kind,
        )
        key = (like, tuple(rows), tuple(cols))
        if key not in self._tables:
            self._tables[key] = np.array([[cost(r, c) for c in cols] for r in rows], dtype=np.float64)
        return EdgeTable(
            a,
            b,
            self._tables[key],
            np.array([rows[k] for k in left], dtype=np.int64),
            np.array([cols[k] for k in right], dtype=np.int64),
        )

    def _move(self, name: str, source: End, target: End, *, again: bool) -> float:
        return self.prices.move_s(name, source.layout, target.layout, 2 if again else 1)

    def _direct(self, name: str, reader: Group) -> EdgeTable:
        inside = self._inside(name, reader)

        def cost(write: End, read: End) -> Cost:
            if inside and write.again != read.again:
                return IMPOSSIBLE
            if read.again:
                kept = None if inside or write.kept else write.layout
            else:
                shared = write.kept and _shares_storage(write.layout, read.layout)
                kept = read.layout if read.kept and not shared else None
            size = self.prices.local_bytes(name, kept) if kept is not None else 0.0
            return size, self._move(name, write, read, again=read.again)

        producer = self._producer(name)
        ends = (producer.name, self._writes(producer, name)), (reader.name, self._reads(reader, name))
        return self._table(name, ends, inside, cost)

    def _hub_producer(self, name: str) -> EdgeTable:
        """Materialising the home costs its communication and, if it is kept, its bytes."""
        hub, producer = self.variables[f"hub:{name}"], self._producer(name)
        inside = any(hub.again)

        def cost(write: End, home: End) -> Cost:
            if inside and write.again != home.again:
                return IMPOSSIBLE
            counted = write.kept and _shares_storage(write.layout, home.layout)
            size = self.prices.local_bytes(name, home.layout) if home.kept and not counted else 0.0
            return size, self._move(name, write, home, again=write.again)

        ends = (producer.name, self._writes(producer, name)), (hub.name, self._hub_ends(hub))
        return self._table(name, ends, inside, cost)

    def _hub_reader(self, name: str, reader: Group) -> EdgeTable:
        """A reader whose backward needs the home itself, or a region it enters, needs a kept home."""
        hub, inside = self.variables[f"hub:{name}"], self._inside(name, reader)

        def cost(home: End, read: End) -> Cost:
            size, shared = 0.0, _shares_storage(home.layout, read.layout)
            if inside and home.again != read.again:
                return IMPOSSIBLE
            if read.again:
                if not inside and not home.kept:
                    return IMPOSSIBLE
            elif read.kept:
                if shared and not home.kept:
                    return IMPOSSIBLE
                size = 0.0 if shared else self.prices.local_bytes(name, read.layout)
            return size, self._move(name, home, read, again=read.again)

        ends = (hub.name, self._hub_ends(hub)), (reader.name, self._reads(reader, name))
        return self._table(name, ends, inside, cost)

    def _hub_ends(self, hub: Variable) -> list[End]:
        return [End(*parts) for parts in zip(hub.layouts, map(int, hub.kept), hub.again, strict=True)]

    def _parameter_use(self, name: str, reader: Group) -> EdgeTable:
        shared = self.variables[f"parameter:{name}"]

        def cost(stored: End, use: End) -> Cost:
            forwards = 2 if use.again else 1
            copied, _, seconds = self.prices.use(name, stored.layout, use.layout, use.kept, forwards)
            return copied, seconds

        homes = [End(layout, 0) for layout in shared.layouts]
        return self._table(name, ((shared.name, homes), (reader.name, self._uses(reader, name))), False, cost)

    # -- regions ----------------------------------------------------------------------------------

    def _agreement(self, region: Region) -> Iterator[EdgeTable]:
        """Ties parts of a region that share no tensor, which would otherwise decide each for itself."""
        parts = nx.Graph()
        parts.add_nodes_from(region.groups)
        for name in region.groups:
            group = self.graph.group_of[name]
            for tensor in group.reads:
                if self._inside(tensor, group):
                    parts.add_edge(self._producer(tensor).name, name)
        first, *others = (min(c, key=region.groups.index) for c in nx.connected_components(parts))
        table = np.where(np.eye(2, dtype=bool)[:, :, None], 0.0, np.inf) * np.ones(2)
        for other in others:
            rows, cols = (np.array(self.variables[n].again, dtype=np.int64) for n in (first, other))
            yield EdgeTable(first, other, table, rows, cols)

    # -- constraints ------------------------------------------------------------------------------

    def build_together(self, restriction: Restriction) -> Iterator[EdgeTable]:
        """Ties the groups of each class, which have the same labels to choose from, to equal ones."""
        for first, *others in restriction.together:
            for other in others:
                ends = [self._labels(name, restriction.words) for name in (first, other)]
                known = {labels: i for i, labels in enumerate(dict.fromkeys(ends[0] + ends[1]))}
                table = np.where(np.eye(len(known), dtype=bool)[:, :, None], 0.0, np.inf) * np.ones(2)
                rows, cols = (np.array([known[labels] for labels in end], dtype=np.int64) for end in ends)
                yield EdgeTable(first, other, table, rows, cols)

    def _labels(self, name: str, words: Mapping[str, str]) -> list[Labels]:
        group = self.graph.group_of[name]
        return [labels_of(c, words) for _ in self._passes(group) for c in self.configurations[name]]


def _shares_storage(source: Layout, target: Layout) -> bool:
    """Whether an edge leaves the tensor itself alone: only the gradient's placement differs, if any."""
    return forward_placements(source) == forward_placements(target)
