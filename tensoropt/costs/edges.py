"""Pairwise costs: memory and time of resharding a tensor between the configurations of two variables."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from tensoropt.costs.cost_graph import EdgeTable, VariableTable, edge_keys
from tensoropt.costs.effects import Keeps, Reading, additive, kept_for
from tensoropt.costs.group_effects import GroupEffects
from tensoropt.costs.parameter_effects import Use
from tensoropt.costs.restrictions import Labels, Restriction, labels_of
from tensoropt.costs.tables import Template
from tensoropt.costs.variables import Variable
from tensoropt.errors import TensorOptError
from tensoropt.ops.layouts import PARTIAL, Layout
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.configurations import Configuration
from tensoropt.sharding.gathered_again import gatherable
from tensoropt.sharding.groups import Group, products_beside, takes_over_hub
from tensoropt.sharding.regions import Region, left_as_views
from tensoropt.sharding.reshard.steps import forward_placements

_MOST_BYTES = 1 << 28
"""The most bytes stored per mesh, beyond which reading takes as long as building; an assumption."""


class TableArrays:
    """A cache of the cost arrays of one mesh with one cost model, each built once.

    Args:
        store: the store that keeps arrays between runs, or None.
        key: a text that names everything on which all arrays depend, such as the mesh and the cost model.
        in_memory: whether to cache arrays without a store.
    """

    def __init__(self, store: ProfileStore | None = None, key: str = "", *, in_memory: bool = False):
        self.store, self.key = store, _hash(key)
        self.in_memory = in_memory or store is not None
        self._arrays: dict[str, np.ndarray] = {}
        self._made = 0
        if store is not None:
            self._arrays = store.get(self.key, "tables") or {}

    def once(self, depends_on: Callable[[], str], make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return a cached array, or build it by ``make``; ``depends_on`` gives its part of the cache key."""
        if not self.in_memory:
            return make()
        key = _hash(depends_on())
        if key not in self._arrays:
            self._arrays[key] = make()
            self._made += 1
        return self._arrays[key]

    def save(self) -> None:
        """Write the arrays to the store, unless none is new or all together are too large."""
        size = sum(array.nbytes for array in self._arrays.values())
        if self.store is None or not self._made or size > _MOST_BYTES:
            return
        with contextlib.suppress(TensorOptError):
            self.store.put(self.key, self._arrays, "tables")


class _Within(NamedTuple):
    """Where a tensor and its reader lie in recomputable blocks, and how backward may get the tensor.

    Attributes:
        inside: whether the tensor is made in the reader's block.
        viewed: whether the reader's results may be views of the tensor.
        gatherable: whether backward may gather the tensor again instead of having it saved.
        pinned: whether constraints demand or forbid gathering again; None if neither.
    """

    inside: bool = False
    viewed: bool = False
    gatherable: bool = False
    pinned: bool | None = None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# The two variables' views of an edge's tensor.
_A = TypeVar("_A")
_B = TypeVar("_B")


@dataclass(eq=False, repr=False)
class EdgeBuilder:
    """The builder of one mesh's edge tables: pairwise costs of variables that share a tensor.

    Args:
        configurations: group name -> its configurations, in the order of the group's :class:`Template`.
        region_of: group name -> its region (block that may be recomputed).
        arrays: cached arrays of this mesh.
        gathered_again: name of a group with such a constraint -> whether backward gathers its inputs again.
    """

    effects: GroupEffects
    templates: Mapping[str, Template]
    configurations: Mapping[str, Sequence[Configuration]]
    region_of: Mapping[str, Region]
    arrays: TableArrays
    gathered_again: Mapping[str, bool]

    def __post_init__(self) -> None:
        self.graph, self.moves = self.effects.graph, self.effects.moves
        self.parameters, self.prices = self.effects.parameters, self.effects.prices
        self._tables: dict[object, np.ndarray] = {}
        self._with_options: dict[str, EdgeTable] = {}
        self._gatherable = gatherable(self.graph)
        # If nothing overlaps, a reduction costs its full time, whatever product it is issued with.
        self.products = products_beside(self.graph) if self.prices.beside else {}

    def build(self, variables: Mapping[str, VariableTable]) -> Iterator[EdgeTable]:
        self.variables = variables
        hubs = set(self.graph.hubs)
        for group in self.graph.groups:
            for name in group.reads:
                # A table of pairs needs two ends, but a tensor with several readers has more: the hub's
                # variable stands between them, so that every edge still joins exactly two variables.
                yield self._hub_reader(name, group) if name in hubs else self._direct(name, group)
            for name in group.shared:
                yield self._parameter_use(name, group)
        for name in self.graph.hubs:
            yield self._hub_producer(name)

    def optional(self, edges: Sequence[EdgeTable]) -> dict[str, tuple[Variable, Variable, int]]:
        """Return tensor -> its edge's key, for tensors that backward may gather again instead of saving a
        copy."""
        keys = {id(edge): key for edge, key in zip(edges, edge_keys(edges), strict=True)}
        return {name: keys[id(edge)] for name, edge in self._with_options.items()}

    # -- ends -------------------------------------------------------------------------------------

    def _producer(self, name: str) -> Group:
        return self.graph.group_of[self.graph.atoms.graph.producer[name].name]

    def _readers(self, name: str) -> list[Group]:
        return [g for g in self.graph.groups if name in g.reads]

    def _inside(self, name: str, reader: Group) -> bool:
        region = self.region_of.get(reader.name)
        return region is not None and region is self.region_of.get(self._producer(name).name)

    def _within(self, name: str, reader: Group) -> _Within:
        within = self._from_maker(name) if name not in self.graph.hubs else _Within()
        return within._replace(inside=self._inside(name, reader), viewed=name in left_as_views(reader))

    def _from_maker(self, name: str) -> _Within:
        readers = self._readers(name) if self.gathered_again else ()
        pins = (self.gathered_again[g.name] for g in readers if g.name in self.gathered_again)
        return _Within(gatherable=name in self._gatherable, pinned=next(pins, None))

    def _passes(self, group: Group) -> tuple[bool, ...]:
        return (False, True) if group.name in self.region_of else (False,)

    def _reads(self, group: Group, name: str) -> list[Reading]:
        facts, short = self.templates[group.name].facts, group.short_names[name]
        # The hub returns its own gradient, and its table counts what hides it.
        reduces = name in self.products and name not in self.graph.hubs
        products = self._product_seconds(name) if reduces else itertools.repeat(None)
        return [
            Reading(c.layout(name), short in facts[i].reads_kept, again, product_s=product_s)
            for again in self._passes(group)
            for (i, c), product_s in zip(enumerate(self.configurations[group.name]), products, strict=False)
        ]

    def _product_seconds(self, name: str) -> list[float | None]:
        group = self.graph.group_of[self.products[name].operator]
        of = self.templates[group.name]
        return [self.moves.product_s(group, name, *each) for each in zip(of.works, of.facts, strict=True)]

    def _hub_products(self, name: str, hub: VariableTable) -> list[float | None]:
        """Return, for each state of a hub (tensor with several readers), the seconds of computation that can
        hide the reduction of its gradient; None if none can.

        This computation is the product for the weight's gradient in the hub's first reader: the shortest one
        of all configurations that read the hub without resharding. Each of them must be able to return the
        sum of all readers' gradients. Only the simulator sees the reduction of a reader that
        reshards the hub.
        """
        if name not in self.products:
            return [None] * len(hub.layouts)
        group = self.graph.group_of[self.products[name].operator]
        inside, seconds = self._inside(name, group), self._product_seconds(name)
        reads = list(zip(self._reads(group, name), itertools.cycle(seconds), strict=False))
        found: list[float | None] = []
        for end in _hub_ends(hub):
            takes = [
                (takes_over_hub(((), ()), again=read.again, inside=inside), product)
                for read, product in reads
                if not any(self.moves.steps(name, end.layout, read.layout))
            ]
            all_take = all(takes_over for takes_over, _ in takes)
            products = [product for _, product in takes if product is not None]
            found.append(min(products, default=None) if all_take else None)
        return found

    def _writes(self, group: Group, name: str) -> list[Reading]:
        facts, short = self.templates[group.name].facts, group.short_names[name]
        return [
            Reading(c.layout(name), short in facts[i].writes_kept and not again, again)
            for again in self._passes(group)
            for i, c in enumerate(self.configurations[group.name])
        ]

    def _uses(self, group: Group, name: str) -> list[Use]:
        facts, short = self.templates[group.name].facts, group.short_names[name]
        neighbours, last = self.parameters.blocks.neighbours(group.name), self.effects.last_part(group)
        return [
            Use(c.layout(name), facts[i].parameters_kept.get(short, 0), again, neighbours, last)
            for again in self._passes(group)
            for i, c in enumerate(self.configurations[group.name])
        ]

    def hub_ends(self, name: str) -> list[Reading]:
        """Return the possible states of a hub (tensor with several readers): layout, saved, recomputed."""
        producer, readers = self._producer(name), self._readers(name)
        layouts = dict.fromkeys(
            c.layout(name) for g in (producer, *readers) for c in self.configurations[g.name]
        )
        # A hub is offered as kept only at placements in which some reader's backward may need it: every
        # further pair would add a state to the variable, and the search pays for states.
        needed = dict.fromkeys(e.layout for g in readers for e in self._reads(g, name) if e.kept)
        inside = [self._inside(name, g) for g in readers if g.name in self.region_of]
        states: list[Reading] = []
        for again in (False, True) if any(inside) else (False,):
            # A reader that runs again finds the hub kept, except in the region that makes it again.
            found_kept = any(not (again and same) for same in inside)
            states += (Reading(layout, False, again) for layout in layouts)
            states += (Reading(layout, True, again) for layout in (layouts if found_kept else needed))
        return states

    # -- tables -----------------------------------------------------------------------------------

    def _table(
        self,
        name: str,
        ends: tuple[tuple[VariableTable, Sequence[_A]], tuple[VariableTable, Sequence[_B]]],
        within: _Within,
        costs: Callable[[Sequence[_A], Sequence[_B]], np.ndarray],
    ) -> EdgeTable:
        """Return the table of two variables. ``ends``: each variable, and for each of its configurations how
        it uses the tensor. ``costs``: maps the distinct uses on both sides to an array (uses, uses, 2), or
        (uses, uses, options, 2), of bytes and seconds, infinite if incompatible."""
        (a, left), (b, right) = ends
        # Many configurations view the tensor in the same way, so the table has one row per distinct end and
        # the index arrays expand it.
        rows = {key: i for i, key in enumerate(dict.fromkeys(left))}
        cols = {key: i for i, key in enumerate(dict.fromkeys(right))}
        # Layers repeat: the same placements of a similar tensor cost the same everywhere.
        tensor = self.moves.tensors[name]
        like = (
            self.graph.atoms.atoms[name],
            tensor.dtype,
            tensor.stored_dtype,
            tensor.requires_grad,
            within,
            a.key.kind,
            b.key.kind,
        )
        key = (like, tuple(rows), tuple(cols))
        shared = name in self.graph.shared
        if key not in self._tables:
            self._tables[key] = self.arrays.once(
                lambda: repr((shared, key)), lambda: costs(tuple(rows), tuple(cols))
            )
        table = EdgeTable(
            a.key,
            b.key,
            self._tables[key],
            np.array([rows[k] for k in left], dtype=np.int64),
            np.array([cols[k] for k in right], dtype=np.int64),
        )
        if table.table.ndim > 3:
            self._with_options[name] = table
        return table

    def _moving_s(
        self, name: str, sources: Sequence[Reading], targets: Sequence[Reading], again: np.ndarray
    ) -> np.ndarray:
        """Return (sources, targets) seconds of resharding per step; forward's count twice where ``again``."""
        rows, cols = ([end.layout for end in ends] for ends in (sources, targets))
        products_s = [end.product_s or 0.0 for end in targets]
        forward_s, back_s = self.moves.moving_s(name, rows, cols, products_s if any(products_s) else None)
        times = self.moves.mesh[0]
        # One after another, as additive() adds up effects: the order of the sums is part of the result.
        there_s = forward_s * times
        return np.where(again, there_s + there_s, there_s) + back_s * times

    def _bytes(self, name: str, ends: Sequence[Reading]) -> np.ndarray:
        return np.array([self.moves.bytes(name, end.layout) for end in ends], dtype=np.float64)

    def _with_option(
        self,
        name: str,
        writes: Sequence[Reading],
        targets: Sequence[Reading],
        cells: np.ndarray,
        may: np.ndarray,
        within: _Within,
    ) -> np.ndarray:
        """Return (sources, targets, options, 2) bytes and seconds, or ``cells`` if there is no second option.
        This option gathers the tensor again in backward; it costs infinity where this saves no memory.

        Args:
            cells: (sources, targets, 2) bytes and seconds of the first option, to save the gathered copy.
            may: (sources, targets) whether the copy is saved, and its producer not recomputed.
        """
        if not within.gatherable or within.pinned is False:
            return cells
        made, copied = self._bytes(name, writes)[:, None], self._bytes(name, targets)
        sums = np.array([PARTIAL in end.layout for end in writes], dtype=bool)[:, None]
        left = np.where(_flags(writes, "kept")[:, None], 0.0, made) * self.prices.in_flight
        memory = np.broadcast_to(left, may.shape)
        may = may & (copied > made) & ~sums & (memory < cells[..., 0]) & np.isfinite(cells[..., 0])
        if not may.any():
            return cells
        time_s = self._moving_s(name, writes, targets, np.ones_like(may))
        again = np.where(may[..., None], np.stack([memory, time_s], axis=-1), np.inf)
        if within.pinned:
            cells = np.where(may[..., None], np.inf, cells)
        return np.stack([cells, again], axis=2)

    def _direct(self, name: str, reader: Group) -> EdgeTable:
        within = self._within(name, reader)

        def costs(writes: Sequence[Reading], reads: Sequence[Reading]) -> np.ndarray:
            keeps = _keeps(writes, reads, within)
            # If the producer keeps the tensor anyway, it is counted with the producer's group: once per
            # storage.
            source = (keeps == Keeps.SOURCE.value) & ~_flags(writes, "kept")[:, None]
            memory = np.where(keeps == Keeps.COPY.value, self._bytes(name, reads), 0.0)
            memory = np.where(source, self._bytes(name, writes)[:, None], memory)
            again = _taken_again(writes, reads, within)
            apart = _apart(writes, reads, within)
            once_s = self._moving_s(name, writes, reads, again)
            cells = _cells(memory * self.prices.in_flight, once_s, apart)
            may = (keeps == Keeps.COPY.value) & ~_flags(writes, "again")[:, None]
            return self._with_option(name, writes, reads, cells, may, within)

        producer = self.variables[self._producer(name).name]
        ends = (
            (producer, self._writes(self._producer(name), name)),
            (self.variables[reader.name], self._reads(reader, name)),
        )
        return self._table(name, ends, within, costs)

    def _hub_producer(self, name: str) -> EdgeTable:
        hub, producer = self.variables[Variable.of_hub(name)], self._producer(name)
        inside, within = any(hub.again), self._from_maker(name)

        def costs(writes: Sequence[Reading], hubs: Sequence[Reading]) -> np.ndarray:
            # From R to R/P nothing moves forward, so the hub is the storage that its producer keeps.
            counted = _flags(writes, "kept")[:, None] & ~_moved(writes, hubs)
            memory = np.where(_flags(hubs, "kept") & ~counted, self._bytes(name, hubs), 0.0)
            again = _flags(writes, "again")[:, None]
            # The hub is made again with its producer, whoever reads it.
            apart = again != _flags(hubs, "again") if inside else False
            once_s = self._moving_s(name, writes, hubs, again)
            cells = _cells(memory * self.prices.in_flight, once_s, apart)
            return self._with_option(name, writes, hubs, cells, _flags(hubs, "kept") & ~again, within)

        hubs = [
            replace(end, product_s=product_s)
            for end, product_s in zip(_hub_ends(hub), self._hub_products(name, hub), strict=True)
        ]
        ends = ((self.variables[producer.name], self._writes(producer, name)), (hub, hubs))
        return self._table(name, ends, within._replace(inside=inside), costs)

    def _hub_reader(self, name: str, reader: Group) -> EdgeTable:
        hub, within = self.variables[Variable.of_hub(name)], self._within(name, reader)

        def costs(hubs: Sequence[Reading], reads: Sequence[Reading]) -> np.ndarray:
            keeps, again = _keeps(hubs, reads, within), _taken_again(hubs, reads, within)
            # Whether the hub is kept is the hub's own choice, and its bytes count once however many readers
            # need it; a reader that needs it forbids the states in which it is not kept.
            missing = (keeps == Keeps.SOURCE.value) & ~_flags(hubs, "kept")[:, None]
            missing |= _apart(hubs, reads, within)
            memory = np.where(keeps == Keeps.COPY.value, self._bytes(name, reads), 0.0)
            return _cells(memory * self.prices.in_flight, self._moving_s(name, hubs, reads, again), missing)

        ends = ((hub, _hub_ends(hub)), (self.variables[reader.name], self._reads(reader, name)))
        return self._table(name, ends, within, costs)

    def _parameter_use(self, name: str, reader: Group) -> EdgeTable:
        shared, parameters = self.variables[Variable.of_parameter(name)], self.parameters

        def costs(stored: Sequence[Layout], uses: Sequence[Use]) -> np.ndarray:
            cells = []
            for layout in stored:
                there = [parameters.stored_use(name, layout, use) for use in uses]
                used = (additive(parameters.used(use), self.prices) for use in there)
                ahead = map(parameters.ahead_bytes, there)
                cells.append(
                    [(c.memory + a, c.compute + c.communication) for c, a in zip(used, ahead, strict=True)]
                )
            return np.array(cells, dtype=np.float64)

        ends = ((shared, shared.layouts), (self.variables[reader.name], self._uses(reader, name)))
        return self._table(name, ends, _Within(), costs)

    # -- constraints ------------------------------------------------------------------------------

    def build_together(self, restriction: Restriction) -> Iterator[EdgeTable]:
        """Yield edge tables in which groups that must split alike cost infinity if they split differently."""
        for first, *others in restriction.together:
            for other in others:
                ends = [self._labels(name, restriction.words) for name in (first, other)]
                # _Narrowing._agree has left the same set of labels to all members, so the diagonal is never
                # empty.
                known = {labels: i for i, labels in enumerate(dict.fromkeys(ends[0] + ends[1]))}
                table = np.where(np.eye(len(known), dtype=bool)[:, :, None], 0.0, np.inf) * np.ones(2)
                rows, cols = (np.array([known[labels] for labels in end], dtype=np.int64) for end in ends)
                yield EdgeTable(Variable.of_group(first), Variable.of_group(other), table, rows, cols)

    def _labels(self, name: str, words: Mapping[str, str]) -> list[Labels]:
        group = self.graph.group_of[name]
        return [labels_of(c, words) for _ in self._passes(group) for c in self.configurations[name]]


def _flags(ends: Sequence[Reading], name: Literal["kept", "again"]) -> np.ndarray:
    return np.array([getattr(end, name) for end in ends], dtype=bool)


def _moved(sources: Sequence[Reading], targets: Sequence[Reading]) -> np.ndarray:
    numbers: dict[Layout, int] = {}
    source, target = (
        np.array([numbers.setdefault(forward_placements(end.layout), len(numbers)) for end in ends])
        for ends in (sources, targets)
    )
    return source[:, None] != target


def _remade(sources: Sequence[Reading], within: _Within) -> np.ndarray:
    return (_flags(sources, "again") & within.inside)[:, None]


def _taken_again(sources: Sequence[Reading], reads: Sequence[Reading], within: _Within) -> np.ndarray:
    """Return (sources, reads) whether recomputation reshards the tensor a second time."""
    return _flags(reads, "again") | (_remade(sources, within) & _flags(reads, "kept"))


def _apart(sources: Sequence[Reading], reads: Sequence[Reading], within: _Within) -> np.ndarray:
    return _remade(sources, within) & ~_flags(reads, "again") & within.viewed


def _keeps(sources: Sequence[Reading], reads: Sequence[Reading], within: _Within) -> np.ndarray:
    in_place, copied = (
        np.array([kept_for(kept=r.kept, again=r.again, remade=False, moved=moved).value for r in reads])
        for moved in (False, True)
    )
    keeps = np.where(_moved(sources, reads), copied, in_place)
    return np.where(_remade(sources, within), Keeps.NOTHING.value, keeps)


def _cells(memory: np.ndarray, time_s: np.ndarray, forbidden: np.ndarray | bool) -> np.ndarray:
    # The search reads rows of pairs, so the two values of a pair are contiguous.
    return np.where(np.asarray(forbidden)[..., None], np.inf, np.stack([memory, time_s], axis=-1))


def _hub_ends(hub: VariableTable) -> list[Reading]:
    return [Reading(*parts) for parts in zip(hub.layouts, hub.kept, hub.again, strict=True)]
