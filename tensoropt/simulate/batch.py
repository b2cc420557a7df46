"""Batches of strategies that are simulated together: the effects of their groups, tensors and parameters.

An effect is what a choice does at a moment of the step: computation, collectives, allocations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numba import njit

from tensoropt.costs.effects import (
    BACKWARD_END,
    COMPLETE,
    FORWARD_END,
    USED,
    Effect,
    Effects,
    When,
    joined,
    reader,
)
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.parameter_effects import Use
from tensoropt.costs.prices import Prices
from tensoropt.costs.tables import leaves_model
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.groups import Group
from tensoropt.sharding.storage import Storage, whole_layout
from tensoropt.simulate.aliases import ViewAlias, ViewAliases
from tensoropt.simulate.candidates import BLOCKING, Candidates, Overlap
from tensoropt.simulate.readings import Column, Kind, Memo, MomentPlace, Readings, distinct, tied_parameter
from tensoropt.simulate.step_schedule import Reader, Resolver, StepSchedule, step_schedule
from tensoropt.simulate.tensor_effects import TensorEffects
from tensoropt.types import Floats, Indices


@njit(cache=True, nogil=True)
def sum_up(rows: Floats) -> None:
    """Replace ``rows`` (moments, strategies) by their cumulative sums over moments, in place."""
    for moment in range(1, rows.shape[0]):
        for n in range(rows.shape[1]):
            rows[moment, n] += rows[moment - 1, n]


@njit(cache=True, nogil=True)
def peaks(kept: Floats, transient: Floats, workspace: Floats) -> Floats:
    """Return (strategies, 2) bytes at the first peak of memory: those saved for backward, and all others. All
    arguments are (moments, strategies) bytes."""
    totals = np.zeros((kept.shape[1], 2))
    if kept.shape[0] == 0:
        return totals
    for n in range(totals.shape[0]):
        totals[n, 0], totals[n, 1] = kept[0, n], kept[0, n] + transient[0, n] + workspace[0, n]
    for moment in range(1, kept.shape[0]):
        for n in range(totals.shape[0]):
            total = kept[moment, n] + transient[moment, n] + workspace[moment, n]
            if total > totals[n, 1]:
                totals[n, 0], totals[n, 1] = kept[moment, n], total
    for n in range(totals.shape[0]):
        totals[n, 1] -= totals[n, 0]
    return totals


@njit(cache=True, nogil=True)
def add_rows(target: Floats, positions: Indices, table: Floats, which: Indices) -> None:
    """Add figures of groups, tensors or parameters (owners) to rows of ``target`` (rows, strategies).

    Args:
        positions: (owners,) each owner's row; -1, the last row, stands for no such effect.
        table: (choices,) the figure of each choice.
        which: (owners, strategies) the index in ``table`` of each owner's choice in each strategy.
    """
    for owner in range(which.shape[0]):
        position = positions[owner]
        for n in range(which.shape[1]):
            target[position, n] += table[which[owner, n]]


@njit(cache=True, nogil=True)
def add_all(target: Floats, table: Floats, which: Indices) -> None:
    """Add figures of groups, tensors or parameters (owners) to ``target`` (strategies, figures).

    Args:
        table: (choices, figures) the figures of each choice.
        which: (owners, strategies) the index in ``table`` of each owner's choice in each strategy.
    """
    for owner in range(which.shape[0]):
        for n in range(which.shape[1]):
            for i in range(table.shape[1]):
                target[n, i] += table[which[owner, n], i]


_Where = tuple[str, str]


@dataclass(frozen=True)
class Owner:
    """An operator group, a tensor or a parameter, with its effects and their positions in a step.

    Attributes:
        kind: ``group``, ``tensor`` or ``parameter``.
        position: a function from the moment of an effect to its position in the step schedule.
        effects: for each strategy, the effects of its choice.
    """

    kind: str
    name: str
    position: Resolver
    effects: Column[Effects]

    def of(self, row: int) -> Iterator[tuple[int, Effect]]:
        """Yield (position in the step schedule, effect) for each effect in the strategy number ``row``."""
        for effect in self.effects.at(row).effects:
            yield self.position(effect.when), effect


@dataclass(frozen=True)
class _Chosen:
    """An operator group, tensor or parameter, and the choices of each strategy that decide its effects."""

    where: _Where
    columns: Sequence[Indices]
    make: Callable[[int], Effects]
    position: Resolver


@dataclass(frozen=True)
class Stack:
    """Isomorphic owners of effects (groups, tensors or parameters), such as one tensor in every layer.

    Attributes:
        used: (k,) the indices in ``kind.effects`` of the effects that occur in this batch.
        which: (owners, strategies) indices into ``used``.
        positions_of: moment -> its position for each of these owners, cached.
    """

    kind: Kind
    owners: Sequence[_Chosen]
    used: Indices
    which: Indices
    positions_of: dict[When, Indices]

    def positions(self, place: MomentPlace) -> Indices:
        """Return the position of a moment in the step schedule for each owner, (owners,); -1 for owners whose
        step lacks the moment."""
        when, after = place
        # An effect after a moment takes place when the next one begins, and belongs to that one's peak.
        if when not in self.positions_of:
            self.positions_of[when] = np.array([o.position(when) for o in self.owners], dtype=np.int64)
        return self.positions_of[when] + after


@dataclass(frozen=True)
class _TensorPlan:
    """The properties of a tensor that do not depend on any choice.

    Attributes:
        places: the readers of the tensor and of its views, by number.
        orders: for each of ``places``, its index from 0 in forward's order of reads; equal at one moment.
        inside: for each reader of the tensor, whether it is in the producer's recomputable block.
        replaced: the position at which a buffer's new value replaces the old one; -1 for the end of forward.
        same: a tensor that may have the same gradient tensor, and whose producer uses it first; "" for none.
        kind: a key; tensors with equal keys have equal effects if groups use them alike.
    """

    group: Group
    name: str
    readers: tuple[Group, ...]
    views: tuple[ViewAlias, ...]
    places: tuple[Reader, ...]
    orders: tuple[int, ...]
    inside: tuple[bool, ...]
    replaced: int
    same: str
    kind: Hashable


class Batch:
    """Strategies to be simulated together.

    Args:
        choices, options: variable of the search or group -> (strategies,) indices of the chosen values.
        prices: the cost model; :func:`~tensoropt.costs.prices.free_prices` has only bytes and collectives.
        memo: the cached results of the same candidates and cost model.

    Attributes:
        tied: tied parameter -> how its uses share gathering and sums of gradients; None if they do not.
    """

    def __init__(
        self,
        candidates: Candidates,
        choices: Mapping[str, Indices],
        options: Mapping[str, Indices],
        prices: Prices,
        overlap: Overlap = BLOCKING,
        memo: Memo | None = None,
        schedule: StepSchedule | None = None,
    ):
        self.candidates, self.prices, self.overlap = candidates, prices, overlap
        self.graph, self.mesh = candidates.graph, candidates.mesh
        self.schedule = schedule or step_schedule(candidates.graph, candidates.regions)
        self._memo = Memo() if memo is None else memo
        memo = self._memo
        self._of_groups: GroupEffects = memo.once("group effects", lambda: GroupEffects(prices))
        moves = self._of_groups.moves
        self._of_tensors: TensorEffects = memo.once("tensor effects", lambda: TensorEffects(moves))
        self.readings = Readings(candidates, choices, options, moves.product_s, self._memo)
        self.count = self.readings.count
        self.stored: dict[str, Column[Layout]] = self.readings.stored()
        self._choices = choices
        how = choices, self._choice, self._of_groups, memo
        self.tied = {name: tied_parameter(name, self.stored[name], *how) for name in self.graph.shared}
        # Created before the owners: the lifetime of a tensor's storage depends on who reads its views.
        self._views = ViewAliases(candidates, self.schedule, moves, self.readings)
        by_kind: dict[Hashable, list[_Chosen]] = {}
        self._order: list[_Where] = []
        for kind, chosen in self._chosen():
            by_kind.setdefault(kind, []).append(chosen)
            self._order.append(chosen.where)
        self.stacks = tuple(self._stack(kind, owners) for kind, owners in by_kind.items())

    def _chosen(self) -> Iterator[tuple[Hashable, _Chosen]]:
        for group in self.graph.groups:
            yield self._group(group)
        for plan in self._memo.once("tensors", self._plans):
            yield plan.kind, self._tensor(plan)
        for name in self.stored:
            yield self._parameter(name)

    def _stack(self, key: Hashable, owners: Sequence[_Chosen]) -> Stack:
        kind: Kind = self._memo.once(("kind", key), lambda: Kind(self.mesh[0]))
        columns = [np.concatenate(each) for each in zip(*(o.columns for o in owners), strict=True)]
        firsts, which = distinct(columns)
        keys = np.stack(columns)[:, firsts].T.tolist()
        numbers = []
        for first, numbered in zip(firsts.tolist(), keys, strict=True):
            owner, row = divmod(first, self.count)
            numbers.append(kind.number(tuple(numbered), partial(owners[owner].make, row)))
        which = which.reshape(len(owners), self.count)
        return Stack(kind, owners, np.array(numbers), which, kind.positions(tuple(o.where for o in owners)))

    def part(self, rows: slice) -> Batch:
        """Return the strategies with the numbers ``rows`` as a batch."""
        part = copy(self)
        for name in ("owners", "_owner_of"):  # cached ones of all strategies
            part.__dict__.pop(name, None)
        part.stacks = tuple(
            replace(stack, which=np.ascontiguousarray(stack.which[:, rows])) for stack in self.stacks
        )
        part.count = len(range(self.count)[rows])
        return part

    @cached_property
    def _owner_of(self) -> dict[_Where, Owner]:
        return {
            owner.where: Owner(*owner.where, owner.position, Column(stack.used[which], stack.kind.effects))
            for stack in self.stacks
            for owner, which in zip(stack.owners, stack.which, strict=True)
        }

    @cached_property
    def owners(self) -> tuple[Owner, ...]:
        """All operator groups, then all tensors, then all parameters, each with its effects."""
        return tuple(self._owner_of[where] for where in self._order)

    def owner(self, kind: str, name: str) -> Owner:
        return self._owner_of[kind, name]

    def _group(self, group: Group) -> tuple[Hashable, _Chosen]:
        names = (*group.parameters, *group.shared)
        # The last user's gradient comes first in backward and waits; those of all earlier users are added to
        # it.
        joins = tuple(self.schedule.users[name][1] != group.name for name in group.shared)
        chosen = self._choices[group.name]

        turns = [(name, tied.turns[group.name]) for name in group.shared if (tied := self.tied[name])]

        def make(row: int) -> Effects:
            stored = {name: self.stored[name].at(row) for name in names}
            choice = self._choice(group, int(chosen[row]), stored)
            choice = choice._replace(turns={name: column.at(row) for name, column in turns})
            return self._of_groups.group(choice, joins=joins)

        columns = [chosen, *(self.stored[name].which for name in names)]
        columns += [column.which for _, column in turns]
        # Without the group's name, so that equal layers share one kind. Less is sent ahead for the blocks at
        # either end.
        neighbours = self.schedule.blocks.neighbours(group.name)
        is_tied = tuple(self.tied[name] is not None for name in group.shared)
        kind = ("group", self.candidates.signature(group), joins, neighbours, is_tied)
        return kind, _Chosen(("group", group.name), columns, make, self.schedule.of_group(group.name))

    def _choice(self, group: Group, number: int, stored: Mapping[str, Layout]) -> Choice:
        of = self.candidates
        return Choice(
            of.configurations(group)[number],
            of.works(group)[number],
            of.facts(group)[number],
            stored,
            of.again(group)[number],
        )

    def _plans(self) -> tuple[_TensorPlan, ...]:
        return tuple(self._plan(group, name) for group in self.graph.groups for name in group.writes)

    def _plan(self, group: Group, name: str) -> _TensorPlan:
        readers, views = self.schedule.readers.get(name, ()), self._views.of(name)
        places = (*(Reader(part.name, name) for part in readers), *self._views.places(views))
        resolve = self.schedule.of_tensor(group.name, name, places)
        used = [resolve(reader(number, USED)) for number in range(len(places))]
        orders = tuple(np.unique(used, return_inverse=True)[1].tolist())
        inside = tuple(self.readings.inside(group.name, part.name) for part in readers)
        of_views = tuple(
            (
                *(part.through, part.of, part.first, len(part.inner), part.leaves),
                tuple(self.readings.inside(part.maker.name, group.name) for group in part.readers),
                self._look(part.maker, part.name),
            )
            for view in views
            for part in view.with_inner()
        )
        replaced = self._replaced(name)
        same = self._same_gradient(group, name)
        kind = ("tensor", self._look(group, name), inside, orders, of_views, replaced >= 0, bool(same))
        return _TensorPlan(group, name, readers, views, places, orders, inside, replaced, same, kind)

    def _writer(self, name: str) -> Group:
        return self.graph.group_of[self.graph.atoms.graph.producer[name].name]

    def _same_gradient(self, group: Group, name: str) -> str:
        """Return a tensor that may have the same gradient tensor as ``name``, and whose producer's backward
        uses it first; "" for none. For ``x`` in the residual sum ``x + block(x)``, it is ``block(x)``."""
        readers, position = self.schedule.readers.get(name, ()), self.schedule.position
        if not readers:
            return ""
        last, done = readers[-1], position("backward", "compute", group.name)
        next_at = position("backward", "read", readers[-2].name, name) if len(readers) > 1 else done
        found: dict[int, str] = {}
        for other in last.reads:
            if other == name or len(self.schedule.readers[other]) > 1 or leaves_model(self.graph, other):
                continue
            used_up = position("backward", "compute", self._writer(other).name)
            if used_up < next_at and self.readings.same_gradients(last.name, name, other).any():
                found[used_up] = other
        return found[max(found)] if found else ""

    def _same(self, plan: _TensorPlan) -> Indices:
        reader, steps = plan.readers[-1].name, self._of_groups.moves.steps
        made = self.readings.written(self._writer(plan.same).name, plan.same)
        read = self.readings.read(reader, plan.same)
        firsts, which = distinct([made.which, read.which])
        moved = [
            bool(steps(plan.same, made.at(row).layout, read.at(row).layout)[1]) for row in firsts.tolist()
        ]
        same = self.readings.same_gradients(reader, plan.name, plan.same)[self._choices[reader]]
        return (same & ~np.array(moved)[which]).astype(np.int64)

    def _replaced(self, name: str) -> int:
        """Return the position at which a buffer's new value replaces the old one; -1 for the end of forward.

        From this position on, no strategy needs the old value.
        """
        graph, at = self.graph.atoms.graph, -1
        for buffer in (old for old, new in graph.mutations.items() if new == name and graph.training):
            if self.mesh[0] > 1:  # all micro-batches read the old value
                return self.schedule.last - 1
            for group in (group for group in self.graph.groups if buffer in group.free):
                short, found = group.short_names[buffer], self.candidates.facts(group)
                views = {view for of in found for view, free in of.lies_in_free.items() if free == short}
                users = [group] if any(short in of.free_kept for of in found) else []
                for result in (each for each in group.writes if group.short_names[each] in views):
                    users += [
                        each for each in self.schedule.readers.get(result, ()) if self._keeps(each, result)
                    ]
                at = max([at, *(self.schedule.computed("backward", user.name) + 1 for user in users)])
        return at

    def _keeps(self, reader: Group, name: str) -> bool:
        """Return whether a reader may save a tensor for backward without resharding it."""
        of, maker = self.candidates, self._writer(name)
        made = [configuration.layout(name) for configuration in of.configurations(maker)]
        found = of.hubs(name) if name in self.graph.hubs else made
        read = [configuration.layout(name) for configuration in of.configurations(reader)]
        kept = any(reader.short_names[name] in facts.reads_kept for facts in of.facts(reader))
        return kept and not set(found).isdisjoint(read)

    def _look(self, group: Group, name: str) -> Hashable:
        tensor = self.graph.atoms.graph.tensors[name]
        return (
            self.graph.atoms.atoms[name],
            self._of_groups.moves.orders.get(name),
            tensor.dtype,
            tensor.requires_grad,
            self.schedule.position("forward", "output", group.name, name) >= 0,
            name in self.graph.atoms.graph.mutations.values(),
            name in self.graph.hubs,
            name in self._of_tensors.products,
            name in self.candidates.moves,
        )

    def _tensor(self, plan: _TensorPlan) -> _Chosen:
        group, name = plan.group, plan.name
        written, hub = self.readings.written(group.name, name), self.readings.hub(name)
        read = [self.readings.read(reader.name, name) for reader in plan.readers]
        gathered = self.readings.gathered_again(name)
        same = self._same(plan) if plan.same else None

        def make(row: int) -> Effects:
            return self._of_tensors.tensor(
                name,
                written.at(row),
                hub.at(row) if hub else None,
                tuple(reader.at(row) for reader in read),
                plan.inside,
                tuple(self._views.users(plan.views, row, plan.orders)),
                plan.orders[: len(plan.readers)],
                BACKWARD_END if plan.replaced >= 0 else FORWARD_END,
                gathered_again=gathered is not None and bool(gathered[row]),
                same=same is not None and bool(same[row]),
            )

        columns = [
            written.which,
            *(reader.which for reader in read),
            *((hub.which,) if hub else ()),
            *((gathered,) if gathered is not None else ()),
            *((same,) if same is not None else ()),
            *self._views.columns(plan.views),
        ]
        first = self._writer(plan.same).name if plan.same else ""
        position = self.schedule.of_tensor(group.name, name, plan.places, plan.replaced, first)
        return _Chosen(("tensor", name), columns, make, position)

    def _parameter(self, name: str) -> tuple[Hashable, _Chosen]:
        tensor, stored = self.graph.atoms.graph.tensors[name], self.stored[name]
        first, last = self.schedule.users[name]
        shared, complete, tied = name in self.graph.shared, self._complete(name), self.tied.get(name)
        # Gradients that are handed over were already added up.
        joins = np.full(self.count, 2 * (first != last)) if tied is None else tied.joins
        neighbours = self.schedule.blocks.neighbours(self.schedule.first_users[name])
        whole = Use(whole_layout(tensor, self.mesh), 0, neighbours=neighbours)

        def make(row: int) -> Effects:
            layout, arrived = stored.at(row), COMPLETE[complete[row]]
            parameters = self._of_groups.parameters
            own = parameters.stored(name, layout, joins=int(joins[row]), complete=arrived)
            if not shared:  # a copy that stays gathered belongs to a single group
                return own
            return joined([own, parameters.unsharded(parameters.stored_use(name, layout, whole))])

        dtypes = tensor.dtype, tensor.stored_dtype
        kind = (
            *("parameter", self.graph.atoms.atoms[name], *dtypes),
            *(tensor.requires_grad, shared, neighbours),
        )
        columns = [stored.which, complete, joins]
        return kind, _Chosen(("parameter", name), columns, make, self.schedule.of_parameter(name))

    def _complete(self, name: str) -> Indices:
        """Return (strategies,) when a parameter's gradient is complete, as an index in ``COMPLETE``."""
        stored, user = self.stored[name], self.schedule.users[name][0]
        if all(Storage.of(stored.values[number]).is_plain for number in np.unique(stored.which)):
            return np.zeros(self.count, dtype=np.int64)
        used = self.readings.used(user, name)
        firsts, which = distinct([stored.which, used.which])
        # If it has several users, the first one in forward completes it.
        neighbours = self.schedule.blocks.neighbours(user)
        pairs = ((stored.at(row), Use(used.at(row), 0, neighbours=neighbours)) for row in firsts.tolist())
        uses = (self._of_groups.parameters.stored_use(name, layout, use) for layout, use in pairs)
        moments = [COMPLETE.index(use.complete(self.mesh[0])) for use in uses]
        return np.array(moments, dtype=np.int64)[which]
