"""Many strategies of one menu, taken apart into pieces: what the judge's walk goes through.

Every strategy runs the same course of moments (:mod:`tensoropt.simulate.step_schedule`); what a group, a
tensor or a parameter does there is worked out once per distinct choice (:mod:`tensoropt.simulate.effects`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tensoropt.costs.prices import Prices, Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.sharding.buckets import arrival_order, fill_buckets, reduction_axes
from tensoropt.sharding.groups import Group
from tensoropt.sharding.placement import Layout
from tensoropt.sharding.regions import region_of
from tensoropt.simulate.candidates import Indices, Menu
from tensoropt.simulate.effects import USED, Piece, Reading, reader_slot
from tensoropt.simulate.gradient_aliases import Flags, Heirs
from tensoropt.simulate.group_effects import GroupPieces
from tensoropt.simulate.overlap import BLOCKING, Overlap
from tensoropt.simulate.step_schedule import Course, Moment, course_of
from tensoropt.simulate.tensor_effects import TensorPieces
from tensoropt.simulate.view_aliases import Column, Lodgers, Lodging

_GROUP_KINDS = ("gather", "compute", "inner")


@dataclass(frozen=True)
class Owner:
    """A group, tensor or parameter with its pieces and, per strategy, which one it is."""

    slots: tuple[int, ...]
    pieces: tuple[Piece, ...]
    which: Indices


@dataclass(frozen=True)
class Issue:
    """Reductions of gradients issued at one moment.

    Attributes:
        moment: after which; the one after backward when several micro-batches have to be over.
        rows: the strategies that issue one here.
        sends: the distinct ones.
        which: per row its number in ``sends``.
    """

    moment: int
    rows: Indices
    sends: tuple[Send, ...]
    which: Indices


class Play:
    """Strategies of one menu, ready to be walked through.

    Args:
        choices, options: per variable and per group the index of every strategy.
        prices: None to follow bytes only.
    """

    def __init__(
        self,
        menu: Menu,
        choices: Mapping[str, Indices],
        options: Mapping[str, Indices],
        optimizer: str,
        prices: Prices | None,
        overlap: Overlap = BLOCKING,
        known: dict[Hashable, Piece] | None = None,
        course: Course | None = None,
    ):
        self.menu, self.choices, self.options = menu, choices, options
        self.graph, self.mesh = menu.graph, menu.mesh
        self.training = menu.graph.atoms.graph.training
        self.course = course or course_of(menu.graph, menu.regions)
        self.region_of = region_of(menu.regions)
        self.group_pieces = GroupPieces(menu.graph, menu.mesh, optimizer, prices)
        self.tensor_pieces = TensorPieces(menu.graph, menu.mesh, optimizer, prices)
        self.prices, self.overlap = prices, overlap
        self.count = len(next(iter(choices.values()))) if choices else 1
        self._known: dict[Hashable, Piece] = {} if known is None else known
        self.stored: dict[str, tuple[Indices, list[Layout]]] = {}
        self._seen: dict[tuple[str, str, bool], Column] = {}
        self.lodgers = Lodgers(
            menu,
            self.course,
            self.tensor_pieces,
            lambda group, name, writes: self._readings(group, name, writes=writes),
            self._homes,
            self._inside,
        )
        self.heirs = Heirs(menu, self.course, choices, self._sent_back, self._home_left)
        self._store_parameters()
        self.owners = [*self._groups(), *self._tensors(), *self._parameters()]

    # -- owners -----------------------------------------------------------------------------------

    def _slot(self, *moment: Any) -> int:
        return self.course.index.get(Moment(*moment), -1)

    def _piece(self, key: Hashable, make: Callable[[], Piece]) -> Piece:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _store_parameters(self) -> None:
        """Per parameter which of its stored layouts each strategy has."""
        for group in self.graph.groups:
            firsts, which = distinct([self.choices[group.name], self.options[group.name]])
            for position, name in enumerate(group.parameters):
                layouts = [
                    self.menu.homes(
                        group, int(self.choices[group.name][r]), int(self.options[group.name][r])
                    )[position]
                    for r in firsts
                ]
                self.stored[name] = _merged(layouts, which)
        for name in self.graph.shared:
            layouts = list(self.menu.shared(name))
            self.stored[name] = _merged(layouts, self.choices[f"parameter:{name}"])

    def _groups(self) -> list[Owner]:
        owners = []
        for group in self.graph.groups:
            names = (*group.parameters, *group.shared)
            chosen, handed = self.choices[group.name], self.heirs.handed(group)
            joins = tuple(self.course.users[name][1] != group.name for name in group.shared)
            firsts, which = distinct([chosen, handed, *(self.stored[n][0] for n in names)])
            configurations, facts = self.menu.configurations(group), self.menu.facts(group)
            works, again, pieces = self.menu.works(group), self.menu.again(group), []
            for r in firsts:
                i = int(chosen[r])
                stored = {n: self.stored[n][1][self.stored[n][0][r]] for n in names}
                given = bool(handed[r])
                key = ("group", self.menu.look(group), i, tuple(stored.values()), given, joins)
                told = configurations[i], works[i], facts[i], stored, again[i], given, joins
                make = partial(self.group_pieces.group, *told)
                pieces.append(self._piece(key, make))
            slots = [self._slot(p, k, group.name) for p in ("forward", "backward") for k in _GROUP_KINDS]
            slots.append(self._slot("backward", "parameters", group.name))
            slots += [self._slot("again", kind, group.name) for kind in _GROUP_KINDS]
            slots += [self._slot("optimizer", kind, group.name) for kind in ("waited", "held")]
            for part in range(1, len(self.course.parts[group.name].starts)):
                slots += [self._slot(p, "compute", group.name, "", part) for p in ("forward", "again")]
            owners.append(Owner(tuple(slots), tuple(pieces), which))
        return owners

    def _sent_back(self, name: str, reader: Group) -> Flags:
        """Per strategy whether a reader's gradient moves to where the tensor was found."""
        read, wanted = self._readings(reader.name, name, writes=False)
        found = self._homes(name)
        if found is not None:
            at, homes = found
        else:
            at, written = self._readings(self.heirs.writer[name].name, name, writes=True)
            homes = [writing.layout for writing in written]
        return self._move_back(name, at, homes, read, [reading.layout for reading in wanted])

    def _home_left(self, name: str) -> Flags:
        """Per strategy whether a gradient moves from where the tensor was found to its writer."""
        found = self._homes(name)
        if found is None:
            return np.zeros(self.count, dtype=bool)
        at, written = self._readings(self.heirs.writer[name].name, name, writes=True)
        return self._move_back(name, at, [writing.layout for writing in written], *found)

    def _move_back(
        self, name: str, to: Indices, sources: Sequence[Layout], by: Indices, targets: Sequence[Layout]
    ) -> Flags:
        firsts, which = distinct([to, by])
        moved = [bool(self.tensor_pieces.steps(name, sources[to[r]], targets[by[r]])[1]) for r in firsts]
        return np.array(moved)[which]

    def _tensors(self) -> list[Owner]:
        return [self._tensor(group, name) for group in self.graph.groups for name in group.writes]

    def _tensor(self, group: Group, name: str) -> Owner:
        readers, views = self.course.readers.get(name, ()), self.lodgers.of(name)
        columns = [self._readings(group.name, name, writes=True)]
        columns += [self._readings(reader.name, name, writes=False) for reader in readers]
        homes = self._homes(name)
        slots = self._tensor_slots(group.name, name, views)
        ends, estates = self.heirs.estates(group, name, len(slots))
        ids = [which for which, _ in columns] + ([homes[0]] if homes else []) + [*self.lodgers.columns(views)]
        firsts, which = distinct([*ids, estates[0]])
        tensor, order = self.graph.atoms.graph.tensors[name], self.tensor_pieces.orders.get(name)
        like = (self.graph.atoms.atoms[name], order, tensor.dtype, tensor.requires_grad)
        inside = tuple(self._inside(group.name, reader.name) for reader in readers)
        final = self.course.slot("forward", "output", group.name, name)
        mutated, pieces = name in self.graph.atoms.graph.mutations.values(), []
        used = slots[reader_slot(0, USED) :: reader_slot(1, 0) - reader_slot(0, 0)]
        turns = tuple(sorted(range(len(used)), key=used.__getitem__).index(i) for i in range(len(used)))
        for r in firsts:
            write, *reads = [found[number[r]] for number, found in columns]
            home = homes[1][homes[0][r]] if homes else None
            estate = estates[1][estates[0][r]]
            told = inside, estate, tuple(self.lodgers.users(views, int(r), turns)), turns[: len(reads)]
            key = ("tensor", *like, final >= 0, mutated, write, home, tuple(reads), *told)
            make = partial(self.tensor_pieces.tensor, name, write, home, reads, *told)
            pieces.append(self._piece(key, make))
        return Owner((*slots, *ends), tuple(pieces), which)

    def _homes(self, name: str) -> tuple[Indices, list[Layout]] | None:
        """Where a tensor with several readers is put."""
        if f"hub:{name}" not in self.choices:
            return None
        return _merged(list(self.menu.hubs(name)), self.choices[f"hub:{name}"])

    def _inside(self, producer: str, reader: str) -> bool:
        """Whether a tensor is made and read in one region."""
        region = self.region_of.get(reader)
        return region is not None and region is self.region_of.get(producer)

    def _tensor_slots(self, producer: str, name: str, views: Sequence[Lodging]) -> tuple[int, ...]:
        course = self.course
        slots = [
            course.computed("forward", producer),
            self._slot("forward", "home", producer, name),
            self._slot("forward", "output", producer, name),
            self.course.forward_end,
            self._slot("backward", "output", producer, name),
            self._slot("backward", "home", producer, name),
            self._slot("backward", "compute", producer),
            course.computed("again", producer),
            self._slot("again", "home", producer, name),
        ]
        for reader in self.course.readers.get(name, ()):
            slots += self._reader_slots(reader.name, name)
        for group, view, puts in self.lodgers.slots(views):
            slots += self._put_slots(group.name, view) if puts else self._reader_slots(group.name, view)
        return tuple(slots)

    def _reader_slots(self, reader: str, name: str) -> list[int]:
        return [
            self._slot("forward", "read", reader, name),
            self.course.computed("forward", reader, name),
            self._slot("backward", "compute", reader),
            self._slot("backward", "read", reader, name),
            self._slot("again", "read", reader, name),
            self.course.computed("again", reader, name),
        ]

    def _put_slots(self, maker: str, view: str) -> list[int]:
        """Those of a view on its way home, which nothing needs in backward."""
        home, again = self._slot("forward", "home", maker, view), self._slot("again", "home", maker, view)
        return [home, home, -1, -1, again, again]

    def _readings(self, group_name: str, name: str, *, writes: bool) -> tuple[Indices, list[Reading]]:
        asked = group_name, name, writes
        if asked not in self._seen:
            group = self.graph.group_of[group_name]
            short = group.short_names[name]
            looks = zip(
                self.menu.configurations(group), self.menu.facts(group), self.menu.again(group), strict=True
            )
            if writes:
                found = [
                    Reading(
                        c.layout(name),
                        short in f.writes_kept,
                        again,
                        f.lies_in.get(short, ""),
                        f.extents.get(short),
                    )
                    for c, f, again in looks
                ]
            else:
                found = [
                    Reading(
                        c.layout(name),
                        short in f.reads_kept,
                        again,
                        extent=f.gradient_extents.get(short),
                    )
                    for c, f, again in looks
                ]
            self._seen[asked] = _merged(found, self.choices[group_name])
        return self._seen[asked]

    def _parameters(self) -> list[Owner]:
        owners = []
        step = self._slot("optimizer", "step", "")
        for name, (which, layouts) in self.stored.items():
            tensor = self.graph.atoms.graph.tensors[name]
            dtypes = tensor.dtype, tensor.stored_dtype
            like = (self.graph.atoms.atoms[name], *dtypes, tensor.requires_grad)
            first, last = self.course.users[name]

            def make(x: Layout, name: str = name, shared: bool = first != last) -> Piece:
                return self.group_pieces.parameter(name, x, shared=shared)

            pieces = tuple(
                self._piece(("parameter", *like, first != last, x), partial(make, x)) for x in layouts
            )
            slots = [self._slot("backward", "parameters", group) for group in (first, last)]
            slots += [self._slot("optimizer", "waited", first), step, self._slot("optimizer", "held", first)]
            owners.append(Owner(tuple(slots), pieces, which))
        return owners

    def piece_of(self, name: str) -> Piece:
        """The piece of a group or a parameter in the first strategy."""
        groups = [group.name for group in self.graph.groups]
        if name in groups:
            owner = self.owners[groups.index(name)]
        else:
            names = list(self.stored)
            owner = self.owners[names.index(name) - len(names)]
        return owner.pieces[owner.which[0]]

    # -- buckets ----------------------------------------------------------------------------------

    def issues(self) -> list[Issue]:
        """Reductions of gradients in the order in which they are issued."""
        if not self.training or self.prices is None:
            return []
        names = [n for n in arrival_order(self.graph) if n in self.stored]
        if not names:
            return []
        firsts, which = distinct([self.stored[n][0] for n in names])
        rows: dict[tuple[int, int], dict[int, Send]] = {}
        for number, row in enumerate(firsts):
            places: dict[int, int] = {}
            for moment, send in self._buckets_of(int(row), names):
                place = places[moment] = places.get(moment, -1) + 1
                rows.setdefault((moment, place), {})[number] = send
        result = []
        for (moment, _), sends in sorted(rows.items(), key=lambda item: item[0]):
            table = np.full(len(firsts), -1, dtype=np.int64)
            table[list(sends)] = np.arange(len(sends))
            chosen = table[which]
            concerned = np.flatnonzero(chosen >= 0)
            result.append(Issue(moment, concerned, tuple(sends.values()), chosen[concerned]))
        return result

    def reductions(self, row: int) -> list[Send]:
        """Reductions of gradients of one strategy, in the order in which they are issued."""
        names = [n for n in arrival_order(self.graph) if n in self.stored]
        if not self.training or self.prices is None:
            return []
        return [send for _, send in self._buckets_of(row, names)]

    def _buckets_of(self, row: int, names: Sequence[str]) -> list[tuple[int, Send]]:
        gradients, tensors = [], self.graph.atoms.graph.tensors
        for name in names:
            which, layouts = self.stored[name]
            layout, tensor = layouts[which[row]], tensors[name]
            elements = self.group_pieces.elements(name, layout)
            gradients.append((name, reduction_axes(layout, self.mesh), tensor.stored_dtype, elements))
        found = []
        assert self.prices is not None
        for bucket in fill_buckets(gradients):
            size = bucket.elements * DTYPE_BYTES[bucket.dtype]
            send = self.prices.send("all_reduce", bucket.axes, size)
            if send is None:
                continue
            arrived = max(
                self._slot("backward", "parameters", self.course.users[n][0]) for n in bucket.parameters
            )
            found.append((arrived if self.mesh[0] == 1 else self.course.last, send))
        return sorted(found, key=lambda item: item[0])


def distinct(columns: Sequence[Indices]) -> tuple[Indices, Indices]:
    """(a row of each distinct combination, per row the number of its combination)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    firsts = np.zeros(1, dtype=np.int64)
    for column in columns:
        _, firsts, code = np.unique(
            code * (int(column.max(initial=0)) + 1) + column, return_index=True, return_inverse=True
        )
    return firsts, code


def _merged(values: Sequence[Any], which: Indices) -> tuple[Indices, list[Any]]:
    """Equal values become one."""
    found: dict[Any, int] = {}
    number = np.array([found.setdefault(v, len(found)) for v in values], dtype=np.int64)
    return number[which], list(found)
