"""Storages with several users: views and readers, gradients in one storage, new values of buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tensoropt.costs.effects import BACKWARD_END, FORWARD_END, MoveEffects, Reading, When, storage_end
from tensoropt.costs.tables import leaves_model
from tensoropt.ops.families.stages import ARRIVE, DEPART
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.groups import Group
from tensoropt.simulate.candidates import Candidates
from tensoropt.simulate.readings import Column, Readings, distinct
from tensoropt.simulate.step_schedule import Reader, StepSchedule
from tensoropt.simulate.tensor_effects import SOURCE, GradientStorage, StorageUser
from tensoropt.types import Flags, Indices

_Placed = Column[Reading] | Column[Layout]
_Relation = tuple[str, tuple[str, ...]]
"""A result in whose gradient the gradients of these reads lie; "" for a storage of their own."""


class GradientAliases:
    """The shared storages of gradients, for all strategies at once; ends are step positions, -1 for none."""

    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.candidates, self.schedule, self.moves, self.readings = candidates, schedule, moves, readings
        self.graph, self.choices, self.count = candidates.graph, readings.choices, readings.count
        self.writer = {name: group for group in self.graph.groups for name in group.writes}
        self._relations = self._all_relations()
        self._ends: dict[tuple[str, str, int], Indices] = {}
        # The positions at which storages end: those of (group, read) pairs, of results whose gradient is
        # passed on, and of storages that a backward makes for several gradients at once.
        self._end_of: dict[tuple[str, str], Indices] = {}
        self._own_end: dict[str, Indices] = {}
        self._common: dict[str, list[tuple[int, Indices]]] = {}
        self._outlasting: dict[str, Indices] = {}
        self._found = False

    def outlasting(self, group: Group) -> Indices:
        """Return 1 for each strategy in which the gradient of a result outlives the group's backward."""
        self._find()
        return self._outlasting.get(group.name, np.zeros(self.count, dtype=np.int64))

    def storages(self, group: Group, name: str) -> tuple[tuple[int, ...], Column[GradientStorage]]:
        """Return (ends of shared storages of a tensor's gradients; per strategy, its gradients' storage)."""
        self._find()
        readers = self.schedule.readers.get(name, ())
        shared = [self._end_of.get((reader.name, name)) for reader in readers]
        common, own = self._common.get(name, []), self._own_end.get(name)
        outlasting = self._outlasting.get(group.name)
        columns = [
            *((column >= 0).astype(np.int64) for column in shared if column is not None),
            *(column for _, column in common),
            *((own,) if own is not None else ()),
            *((outlasting,) if outlasting is not None else ()),
        ]
        numbering = self.readings.memo.gradients
        if not columns:
            plain = numbering.of(GradientStorage())
            return (), Column(np.full(self.count, plain, dtype=np.int64), numbering.values)
        # Ends may be -1.
        firsts, which = distinct([column + 1 for column in columns])
        ended = [*(column for _, column in common), *((own,) if own is not None else ())]
        ends = sorted({int(end) for column in ended for end in column[firsts] if end >= 0})
        number = {end: i for i, end in enumerate(ends)} | {-1: -1}
        storages = [
            GradientStorage(
                tuple(column is not None and bool(column[row] >= 0) for column in shared),
                tuple((i, number[int(column[row])]) for i, column in common if column[row] >= 0),
                number[int(own[row])] if own is not None else -1,
                bool(outlasting[row]) if outlasting is not None else False,
            )
            for row in firsts
        ]
        numbers = np.array([numbering.of(storage) for storage in storages], dtype=np.int64)
        return tuple(ends), Column(numbers[which], numbering.values)

    # -- moves ------------------------------------------------------------------------------------

    def _sent_back(self, name: str, reader: Group) -> Flags:
        return self._moves_back(name, self._found_at(name), self.readings.read(reader.name, name))

    def _hub_left(self, name: str) -> Flags:
        hub = self.readings.hub(name)
        if hub is None:
            return np.zeros(self.count, dtype=bool)
        return self._moves_back(name, self.readings.written(self.writer[name].name, name), hub)

    def _found_at(self, name: str) -> _Placed:
        return self.readings.hub(name) or self.readings.written(self.writer[name].name, name)

    def _moves_back(self, name: str, sources: _Placed, targets: _Placed) -> Flags:
        firsts, which = distinct([sources.which, targets.which])
        pairs = [(_layout(sources.at(row)), _layout(targets.at(row))) for row in firsts]
        moved = [bool(self.moves.steps(name, source, target)[1]) for source, target in pairs]
        return np.array(moved)[which]

    # -- relations --------------------------------------------------------------------------------

    def _all_relations(self) -> dict[str, dict[_Relation, Flags]]:
        relations_of = self.readings.memo.once("relations", self._of_configurations)
        return {
            name: {relation: flags[self.choices[name]] for relation, flags in relations.items()}
            for name, relations in relations_of.items()
        }

    def _of_configurations(self) -> dict[str, dict[_Relation, Flags]]:
        by_look: dict[Hashable, dict[_Relation, Flags]] = {}
        by_group = {}
        for group in self.graph.groups:
            alike = self.candidates.signature(group)
            if alike not in by_look:
                by_look[alike] = self._by_configuration(group)
            if not by_look[alike]:
                continue
            names = {short: name for name, short in group.short_names.items()} | {"": ""}
            by_group[group.name] = {
                (names[of], tuple(names[member] for member in members)): flags
                for (of, members), flags in by_look[alike].items()
            }
        return by_group

    def _by_configuration(self, group: Group) -> dict[_Relation, Flags]:
        written = {group.short_names[name] for name in group.writes}
        looks = self.candidates.facts(group)
        by_relation: dict[_Relation, Flags] = {}
        for number, facts in enumerate(looks):
            members: dict[str, list[str]] = {}
            for read, of in facts.hands_on.items():
                # If the storage was made for several reads, the first of them represents it (``hands_on``)
                # and is itself a member.
                members.setdefault(of, [] if of in written else [of]).append(read)
            for of, reads in members.items():
                relation = (of if of in written else "", tuple(reads))
                by_relation.setdefault(relation, np.zeros(len(looks), dtype=bool))[number] = True
        return by_relation

    # -- lives ------------------------------------------------------------------------------------

    def _find(self) -> None:
        """Visit the groups in backward order, givers of a gradient first."""
        if self._found or not self._relations:
            return
        self._found = True
        # Backward order is essential: _lies needs the origin of the gradient that a later group has passed
        # on.
        for group in reversed(self.graph.groups):
            incoming = {name: lies for name in group.writes if (lies := self._lies(name)) is not None}
            if group.name in self._relations or incoming:
                self._follow(group, incoming)

    def _lies(self, name: str) -> Indices | None:
        readers = self.schedule.readers.get(name, ())
        # With several readers, or for a result of the model, the gradient is a sum: a new tensor in a
        # separate storage.
        if len(readers) != 1 or (readers[0].name, name) not in self._end_of or leaves_model(self.graph, name):
            return None
        # A gradient that was resharded on the way is in a new storage; the one that was passed on ends at the
        # move.
        moved = self._sent_back(name, readers[0]) | self._hub_left(name)
        return np.where(moved, -1, self._end_of[readers[0].name, name])

    def _follow(self, group: Group, incoming: Mapping[str, Indices]) -> None:
        done = self.schedule.position("backward", "compute", group.name)
        outlasts = np.zeros(self.count, dtype=bool)
        for end in incoming.values():
            outlasts |= end > done
        for (of, members), active in self._relations.get(group.name, {}).items():
            lies = incoming.get(of, np.full(self.count, -1))
            ends = lies
            # If it is passed on to a single tensor, the storage simply becomes that tensor's; only one with
            # several members has a separate end, that of the last of them.
            if len(members) > 1:
                size = self._elements(of) if of else 0
                last = np.maximum.reduce([self._end(group, member, size) for member in members])
                ends = np.where(lies >= 0, lies, last)
                begun = np.where(active & (lies < 0), last, -1)
                if of:
                    self._own_end[of] = np.maximum(self._own_end.get(of, begun), begun)
                    outlasts |= begun >= 0
                else:
                    place = [r.name for r in self.schedule.readers[members[0]]].index(group.name)
                    self._common.setdefault(members[0], []).append((place, begun))
            ends = np.where(active, ends, -1)
            for member in members:
                at = group.name, member
                self._end_of[at] = np.maximum(self._end_of.get(at, ends), ends)
        self._outlasting[group.name] = outlasts.astype(np.int64)

    def _end(self, group: Group, name: str, size: int) -> Indices:
        """Return the position at which a tensor that gets its gradient from a group frees the storage.

        Args:
            size: elements of the tensor for which the storage was made; 0 for several.
        """
        at = group.name, name, size
        if at not in self._ends:
            self._ends[at] = self._find_end(group, name, size)
        return self._ends[at]

    def _find_end(self, group: Group, name: str, size: int) -> Indices:
        readers, at = (
            self.schedule.readers[name],
            self.schedule.position("backward", "read", group.name, name) + 1,
        )
        last, sent_back = at, self._sent_back(name, group)
        if len(readers) > 1 or leaves_model(self.graph, name):
            if len(readers) > 1 and readers[-1].name == group.name:  # the next one's sum is a new tensor
                last = self.schedule.position("backward", "read", readers[-2].name, name) + 1
            return np.where(sent_back, at, last)
        writer = self.writer[name]
        done = np.full(self.count, self.schedule.position("backward", "compute", writer.name))
        if self._elements(name) != size:  # nobody releases a part of it
            done += 1
        for (of, members), active in self._relations.get(writer.name, {}).items():
            if of == name:
                ends = [self._end(writer, member, size) for member in members]
                done = np.where(active, np.maximum.reduce(ends), done)
        left = self.schedule.position("backward", "hub", writer.name, name) + 1
        return np.where(sent_back, at, np.where(self._hub_left(name), left, done))

    def _elements(self, name: str) -> int:
        return prod(self.graph.atoms.graph.tensors[name].shape)


def _layout(placed: Reading | Layout) -> Layout:
    return placed.layout if isinstance(placed, Reading) else placed


@dataclass(frozen=True)
class _Taken:
    """The moment at which a tensor replaces a buffer.

    Attributes:
        ends: the positions of the backwards that may need the old value.
        which: per strategy, the last of these that does; -1 if none.
        always: the moment, if equal in all strategies.
        never: it is not a buffer's new value, or is counted elsewhere.
    """

    ends: tuple[int, ...]
    which: Indices
    always: When | None = None
    never: bool = False

    def until(self, row: int, first: int) -> When | None:
        """Return the moment in one strategy, or None; ``first`` is the number of the first of ``ends``."""
        if self.never or self.always is not None:
            return self.always
        number = int(self.which[row])
        return FORWARD_END if number < 0 else storage_end(first + number)


class NewBuffers:
    """The new values of buffers, and the groups that still need the old ones."""

    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.graph, self.schedule, self.moves, self.readings = candidates.graph, schedule, moves, readings
        self.micro_batches = candidates.mesh[0]
        self._buffers = {new: name for name, new in self.graph.atoms.graph.mutations.items()}

    @cached_property
    def _in_stage(self) -> bool:
        return any(group.anchor.target in (ARRIVE, DEPART) for group in self.graph.groups)

    def taken(self, name: str) -> _Taken:
        none = np.full(self.readings.count, -1, dtype=np.int64)
        if name not in self._buffers or self._in_stage or not self.graph.atoms.graph.training:
            return _Taken((), none, never=True)
        if self.micro_batches > 1:  # all of them read the old value
            return _Taken((), none, BACKWARD_END)
        keeping = list(self._keeping(self._buffers[name]))
        ends = tuple(self.schedule.position("backward", "compute", group.name) for group, _ in keeping)
        for number in sorted(range(len(ends)), key=ends.__getitem__):
            none[keeping[number][1]] = number
        return _Taken(ends, none)

    def _keeping(self, buffer: str) -> Iterator[tuple[Group, Flags]]:
        for group in self.graph.groups:
            if buffer not in group.free:
                continue
            yield group, self.readings.keeps(group.name, buffer)
            for name in group.writes:
                view = self.readings.keeps(group.name, buffer, name)
                for reader in self.schedule.readers.get(name, ()) if view.any() else ():
                    reads = self.readings.read(reader.name, name)
                    kept = np.array([r.kept or r.again for r in reads.values], dtype=bool)[reads.which]
                    yield reader, view & kept & ~self._moved(group.name, name, reads)

    def _moved(self, maker: str, name: str, reads: Column) -> Flags:
        hub, written = self.readings.hub(name), self.readings.written(maker, name)
        rows = range(self.readings.count)
        sources = [hub.at(row) if hub else written.at(row).layout for row in rows]
        moved = [bool(self.moves.steps(name, sources[row], reads.at(row).layout)[0]) for row in rows]
        return np.array(moved, dtype=bool)


@dataclass(frozen=True)
class ViewAlias:
    """A tensor that is a view of another tensor in some configurations.

    Attributes:
        maker: the group that writes it.
        through: the reader that makes it; :data:`SOURCE` if one group writes both.
        of: the other tensor's short name in that group.
        first: its number among the tensor's readers; its own readers follow.
        leaves: whether it leaves the model.
    """

    name: str
    maker: Group
    through: int
    of: str
    first: int
    readers: tuple[Group, ...]
    leaves: bool
    inner: tuple[ViewAlias, ...]

    def with_inner(self) -> Iterator[ViewAlias]:
        """Yield the view and its views, depth first."""
        yield self
        for inner in self.inner:
            yield from inner.with_inner()


class ViewAliases:
    def __init__(
        self, candidates: Candidates, schedule: StepSchedule, moves: MoveEffects, readings: Readings
    ):
        self.candidates, self.schedule, self.moves = candidates, schedule, moves
        self.readings = readings

    @cached_property
    def _views(self) -> Mapping[str, Sequence[tuple[Group, str]]]:
        return self.readings.memo.once("views", self._all_views)

    def _all_views(self) -> dict[str, tuple[tuple[Group, str], ...]]:
        views_of: dict[str, dict[tuple[str, str], tuple[Group, str]]] = {}
        for group in self.candidates.graph.groups:
            names = {short: name for name, short in group.short_names.items()}
            # Over all configurations, because readers must have the same numbers in every strategy, so that
            # one schedule and one set of columns serve all of them; users() leaves out tensors that are not
            # views in a strategy.
            pairs = {pair for facts in self.candidates.facts(group) for pair in facts.lies_in.items()}
            for view, of in sorted(pairs):
                views_of.setdefault(names[of], {})[group.name, view] = group, names[view]
        return {name: tuple(views.values()) for name, views in views_of.items()}

    def of(self, name: str, first: int | None = None) -> tuple[ViewAlias, ...]:
        """Return the views of a tensor; readers are numbered from ``first``, or after its own."""
        readers = [group.name for group in self.schedule.readers.get(name, ())]
        free, aliases = len(readers) if first is None else first, []
        for maker, view in self._views.get(name, ()):
            through = SOURCE if name in maker.writes else readers.index(maker.name)
            own = self.schedule.readers.get(view, ())
            # Numbers go depth first: the view's own (for its hub), its readers, then those of its views.
            # places() and users() count in the same order.
            inner = self.of(view, free + 1 + len(own))
            leaves = self.schedule.position("forward", "output", maker.name, view) >= 0
            made = ViewAlias(view, maker, through, maker.short_names[name], free, own, leaves, inner)
            free += sum(1 + len(one.readers) for one in made.with_inner())
            aliases.append(made)
        return tuple(aliases)

    def columns(self, views: Sequence[ViewAlias]) -> Iterator[Indices]:
        """Yield everything that decides who reads the views, per strategy."""
        for alias in (alias for view in views for alias in view.with_inner()):
            yield self.readings.written(alias.maker.name, alias.name).which
            if (gathered := self.readings.gathered_again(alias.name)) is not None:
                yield gathered
            for group in alias.readers:
                yield self.readings.read(group.name, alias.name).which
            if (hub := self.readings.hub(alias.name)) is not None:
                yield hub.which

    def places(self, views: Sequence[ViewAlias]) -> Iterator[Reader]:
        """Yield the readers of views by number; a view's hub comes first."""
        for alias in (alias for view in views for alias in view.with_inner()):
            yield Reader(alias.maker.name, alias.name, materialises=True)
            for group in alias.readers:
                yield Reader(group.name, alias.name)

    def users(
        self, views: Sequence[ViewAlias], row: int, orders: Sequence[int], through: int | None = None
    ) -> Iterator[StorageUser]:
        """Yield the readers of views that lie in place in a strategy.

        Args:
            orders: reader -> its position in forward.
            through: for the views of a view, the reader of the outermost tensor.
        """
        for alias in views:
            writing = self.readings.written(alias.maker.name, alias.name).at(row)
            if writing.lies_in != alias.of:
                continue
            outer = alias.through if through is None else through
            source, hub = writing.layout, self.readings.hub(alias.name)
            gathered = self.readings.gathered_again(alias.name)
            anew = gathered is not None and bool(gathered[row])
            if hub is not None:
                source = hub.at(row)
            order = orders[alias.first]
            if self.moves.steps(alias.name, writing.layout, source)[0]:  # read once, on its way to its hub
                remade = writing.again
                yield StorageUser(alias.first, False, writing.again, remade, True, order, through=outer)
                for number, group in enumerate(alias.readers) if anew else ():
                    read, own = self.readings.read(group.name, alias.name).at(row), alias.first + 1 + number
                    moved = bool(self.moves.steps(alias.name, source, read.layout)[0])
                    needs = read.again or (read.kept and not moved)
                    yield StorageUser(own, needs, False, False, False, orders[own], through=outer)
                continue
            if alias.leaves:
                yield StorageUser(alias.first, False, False, False, False, order, True, outer)
            for number, group in enumerate(alias.readers):
                read, own = self.readings.read(group.name, alias.name).at(row), alias.first + 1 + number
                moved = bool(self.moves.steps(alias.name, source, read.layout)[0])
                # A view is made again with what it is a view of, or by itself, of what is kept.
                remade = writing.again and self.readings.inside(alias.maker.name, group.name)
                in_place = not moved or (anew and hub is None)
                seen = read.kept, read.again, remade, not in_place, orders[own]
                yield StorageUser(own, *seen, through=outer)
                # A reader with a copy makes views of its copy, in which the outer storage has no part.
                if not moved:
                    inner = [view for view in alias.inner if view.through == number]
                    yield from self.users(inner, row, orders, outer)
