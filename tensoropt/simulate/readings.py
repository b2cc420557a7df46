"""How operator groups read and write tensors in many strategies, and the effects of choices as tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from tensoropt.costs.effects import Effects, GradientShare, Reading, When
from tensoropt.costs.group_effects import Choice, GroupEffects
from tensoropt.costs.variables import Variable
from tensoropt.ops.families.stages import ARRIVE
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload
from tensoropt.sharding.groups import Group
from tensoropt.sharding.regions import region_of
from tensoropt.sharding.storage import Storage, Turn, UsePlace, turns
from tensoropt.simulate.candidates import Candidates
from tensoropt.types import SOURCES, Flags, Floats, Indices

Axes = tuple[int, ...]


class MomentPlace(NamedTuple):
    """A moment of a step as an effect names it; with ``after``, the point right after the moment."""

    when: When
    after: bool


class Cells:
    """A sparse column of a table of effects: one number per row, by default 0."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._table: Floats = np.zeros(0)

    def add(self, number: int, value: float) -> None:
        """Add ``value`` to the row ``number``, which must be the last one or a new one."""
        self._values[number] = self._values.get(number, 0.0) + value

    def most(self, number: int, value: float) -> None:
        """Raise the row ``number``, which must be the last one or a new one, to at least ``value``."""
        self._values[number] = max(self._values.get(number, 0.0), value)

    def of(self, numbers: Indices, count: int) -> Floats:
        """Return (k,) the values of the rows ``numbers``, in a column that has ``count`` rows."""
        # Figures are only added for a new number, so a table with that many numbers is up to date.
        if len(self._table) != count:
            self._table = np.zeros(count)
            self._table[list(self._values)] = list(self._values.values())
        return self._table[numbers]


class _EffectTables:
    """The effects of all choices of isomorphic groups, tensors or parameters, as tables with a row per
    choice.

    Attributes:
        columns: by moment, bytes saved, transient and of workspace; seconds of the device and of the host.
        sends: (moment, axes) -> (seconds, seconds of overlapped computation).
        beside: (moment, kind, axes, dtype) of coalesced collectives -> (bytes, parameters, bytes not moved).
        kinds: (axes, kind of collective) -> 1 if sent.
        lasting: bytes of (parameters, gradients, optimizer state), in use during the whole step.
        seconds: seconds by the source of the figure, as in ``SOURCES``.
        shares: the gradient that is all-reduced in a bucket, or None.
    """

    def __init__(self, micro: int):
        self.micro, self.count = micro, 0
        self.columns: tuple[dict[MomentPlace, Cells], ...] = tuple({} for _ in range(5))
        self.sends: dict[tuple[MomentPlace, Axes], tuple[Cells, Cells]] = {}
        self.beside: dict[tuple[MomentPlace, str, Axes, str], tuple[Cells, Cells, Cells]] = {}
        self.kinds: dict[tuple[Axes, str], Cells] = {}
        self.lasting: list[tuple[int, int, int]] = []
        self.seconds: list[list[float]] = []
        self.shares: list[GradientShare | None] = []

    def add(self, choice: Effects) -> None:
        number, seconds, shared = self.count, [0.0] * len(SOURCES), None
        self.count += 1
        for e in choice.effects:
            place, work_s = MomentPlace(e.when, e.after), e.local_s + e.passing.device_s
            figures = e.kept, e.transient, e.workspace_bytes, work_s, e.host_s + e.passing.host_s
            for cells, value in zip(self.columns, figures, strict=True):
                if value:
                    cells.setdefault(place, Cells()).add(number, value)
            times = 1 if e.when.once else self.micro
            if work_s:
                seconds[SOURCES.index(e.source)] += work_s * times
            for send in e.sends:
                sends = self.sends.setdefault((place, send.axes), (Cells(), Cells()))
                sends[0].add(number, send.seconds)
                if e.beside_work_s:
                    sends[1].most(number, e.beside_work_s)
                self.kinds.setdefault((send.axes, send.kind), Cells()).most(number, 1.0)
                seconds[SOURCES.index(send.source)] += send.seconds * times
            for send, dtype, stays in e.beside:
                key = place, send.kind, send.axes, dtype
                size, members, staying = self.beside.setdefault(key, (Cells(), Cells(), Cells()))
                size.add(number, send.bytes)
                members.add(number, 1.0)
                staying.add(number, send.bytes * stays)
                self.kinds.setdefault((send.axes, send.kind), Cells()).most(number, 1.0)
            if shared is None:
                shared = e.share
        self.lasting.append((choice.parameters, choice.gradients, choice.optimizer))
        self.seconds.append(seconds)
        self.shares.append(shared)


_Derived = TypeVar("_Derived", bound=Hashable)


class _Numbering(Generic[_Derived]):
    """Gives equal values the same number, in order of first occurrence; ``values[number]`` is the value."""

    def __init__(self) -> None:
        self.values: list[_Derived] = []
        self._numbers: dict[_Derived, int] = {}

    def of(self, value: _Derived) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Kind:
    """Isomorphic groups, tensors or parameters (owners), such as one tensor per layer, with
    shared effects."""

    def __init__(self, micro: int):
        self.effects: list[Effects] = []
        self.tables = _EffectTables(micro)
        self._positions: dict[Hashable, dict[When, Indices]] = {}
        self._numbers: dict[tuple[int, ...], int] = {}

    def positions(self, owners: Hashable) -> dict[When, Indices]:
        """Return a cache, moment -> (owners,) positions, that the caller fills; ``owners``: its key."""
        return self._positions.setdefault(owners, {})

    def number(self, key: tuple[int, ...], make: Callable[[], Effects]) -> int:
        """Return the index of a choice's effects; ``make`` computes them if ``key`` (the choice) is new."""
        if key not in self._numbers:
            self._numbers[key] = len(self.effects)
            self.effects.append(make())
            self.tables.add(self.effects[-1])
        return self._numbers[key]


class Memo:
    """Cached results that batches of the same candidates, schedule and cost model share."""

    def __init__(self) -> None:
        self.readings: _Numbering[Reading] = _Numbering()
        self.layouts: _Numbering[Layout] = _Numbering()
        self.turns: _Numbering[Turn] = _Numbering()
        self._found: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached under ``key`` for all batches."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]


Value = TypeVar("Value")
_LARGEST_CODE = 2**62


@dataclass(frozen=True, slots=True)
class Column(Generic[Value]):
    """One value per strategy: strategy number ``row`` has ``values[which[row]]``."""

    which: Indices
    values: list[Value]

    def at(self, row: int) -> Value:
        return self.values[self.which[row]]


def distinct(columns: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Return the first row of each distinct combination of values, and (rows,) indices of combinations."""
    # A mixed-radix code of the columns so far, made dense again if the next column's values could overflow
    # it.
    firsts, code, size = np.zeros(1, dtype=np.int64), np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        base = int(column.max(initial=0)) + 1
        if size * base > _LARGEST_CODE:
            firsts, code = np.unique(code, return_index=True, return_inverse=True)[1:]
            size = len(firsts)
        code, size = code * base + column, size * base
    return np.unique(code, return_index=True, return_inverse=True)[1:]


class Readings:
    """How operator groups write and read tensors (layout, saved, recomputed), for each of many strategies.

    Args:
        choices, options: variable of the search, group or tensor -> (strategies,) indices of chosen values.
        product_s: returns the seconds of the product that may overlap with reducing a read tensor's gradient.
        memo: the shared cache, by which equal values have equal numbers in all batches.
    """

    def __init__(
        self,
        candidates: Candidates,
        choices: Mapping[str, Indices],
        options: Mapping[str, Indices],
        product_s: Callable[[Group, str, Workload, Facts], float | None],
        memo: Memo,
    ):
        self.candidates, self.choices, self.options = candidates, choices, options
        self.product_s, self.memo, self.graph = product_s, memo, candidates.graph
        self.count = len(next(iter(choices.values()))) if choices else 1
        self._region_of = self.memo.once("regions of groups", lambda: region_of(candidates.regions))
        self._seen: dict[tuple[str, str, bool], Column[Reading]] = {}

    def written(self, group: str, name: str) -> Column[Reading]:
        """Return, for each strategy, how a group writes a tensor: layout, saved for backward, recomputed."""
        return self._reading(group, name, writes=True)

    def read(self, group: str, name: str) -> Column[Reading]:
        """Return, for each strategy, how a group reads a tensor: layout, needed in backward, recomputed."""
        return self._reading(group, name, writes=False)

    def _reading(self, group_name: str, name: str, *, writes: bool) -> Column[Reading]:
        query = group_name, name, writes
        if query not in self._seen:
            group, memo = self.graph.group_of[group_name], self.memo
            # Equal groups see their tensors in the same way, each under its own name.
            key = ("reading", self.candidates.signature(group), group.short_names[name], writes)
            numbers = memo.once(key, lambda: self._numbers(group, name, writes=writes))
            self._seen[query] = Column(numbers[self.choices[group_name]], memo.readings.values)
        return self._seen[query]

    def _numbers(self, group: Group, name: str, *, writes: bool) -> Indices:
        short, candidates = group.short_names[name], self.candidates
        configurations, recomputed = candidates.configurations(group), candidates.again(group)
        looks = zip(configurations, candidates.facts(group), recomputed, strict=True)
        if writes:
            readings = [
                Reading(
                    c.layout(name),
                    short in f.writes_kept,
                    recomputed,
                    f.lies_in.get(short, ""),
                    f.extents.get(short),
                    given=group.anchor.target == ARRIVE,
                )
                for c, f, recomputed in looks
            ]
        else:
            readings = [
                Reading(
                    c.layout(name),
                    short in f.reads_kept,
                    recomputed,
                    extent=f.gradient_extents.get(short),
                    product_s=self.product_s(group, name, work, f),
                )
                for (c, f, recomputed), work in zip(looks, candidates.works(group), strict=True)
            ]
        return np.array([self.memo.readings.of(reading) for reading in readings], dtype=np.int64)

    def same_gradients(self, group_name: str, *names: str) -> Flags:
        """Return, for each configuration of a group, whether it gives the named tensors equal gradients."""
        group = self.graph.group_of[group_name]
        shorts = {group.short_names[name] for name in names}
        key = ("same gradients", self.candidates.signature(group), *sorted(shorts))

        def same() -> Flags:
            facts = self.candidates.facts(group)
            return np.array([any(shorts <= {*alike} for alike in f.same_gradients) for f in facts], bool)

        found: Flags = self.memo.once(key, same)
        return found

    def used(self, group_name: str, name: str) -> Column[Layout]:
        group, of = self.graph.group_of[group_name], self.candidates
        key = "use", of.signature(group), group.short_names[name]
        return self._layouts(key, group_name, lambda: [c.layout(name) for c in of.configurations(group)])

    def hub(self, name: str) -> Column[Layout] | None:
        """Return the layout in which a tensor with several readers is materialised; None for others."""
        if name not in self.graph.hubs:
            return None
        return self._layouts(("hub", name), Variable.of_hub(name), lambda: self.candidates.hubs(name))

    def gathered_again(self, name: str) -> Indices | None:
        """Return 1 for each strategy whose backward gathers a tensor again; None if no strategy can do so."""
        return self.options[Variable.of_move(name)] if name in self.candidates.moves else None

    def _layouts(self, key: Hashable, chosen: str, layouts: Callable[[], Sequence[Layout]]) -> Column[Layout]:
        memo = self.memo
        numbers = memo.once(key, lambda: np.array([*map(memo.layouts.of, layouts())], dtype=np.int64))
        return Column(numbers[self.choices[chosen]], memo.layouts.values)

    def inside(self, producer: str, reader: str) -> bool:
        """Return whether the groups ``producer`` and ``reader`` are in the same recomputable block."""
        region = self._region_of.get(reader)
        return region is not None and region is self._region_of.get(producer)

    def stored(self) -> dict[str, Column[Layout]]:
        stored: dict[str, Column[Layout]] = {}
        for group in self.graph.groups:
            if not group.parameters:
                continue
            choices, options = self.choices[group.name], self.options[group.name]
            firsts, which = distinct([choices, options])
            layouts = (self.candidates.stored(group, int(choices[r]), int(options[r])) for r in firsts)
            numbers = np.array([[*map(self.memo.layouts.of, of_row)] for of_row in layouts])
            for position, name in enumerate(group.parameters):
                stored[name] = Column(numbers[which, position], self.memo.layouts.values)
        for name in self.graph.shared:
            shared = partial(self.candidates.shared, name)
            stored[name] = self._layouts(("shared", name), Variable.of_parameter(name), shared)
        return stored


_Choose = Callable[[Group, int, Mapping[str, Layout]], Choice]


@dataclass(frozen=True)
class _TiedParameter:
    """A tied parameter some of whose uses are prefetched or sum their gradients.

    Attributes:
        turns: group -> for each strategy, what its use does (:class:`~tensoropt.sharding.storage.Turn`).
        joins: (strategies,) 0 if no use's gradient waits for those of others, 1 if one does, 2 if several do.
    """

    turns: Mapping[str, Column[Turn]]
    joins: Indices


def tied_parameter(
    name: str,
    stored: Column[Layout],
    choices: Mapping[str, Indices],
    choose: _Choose,
    effects: GroupEffects,
    memo: Memo,
) -> _TiedParameter | None:
    """Return how the uses of a tied parameter share gathering and sums of gradients; None if they never do.

    Args:
        choices: group -> (strategies,) the index of its configuration.
        choose: a function of (group, index, stored layouts) that returns the group's choice.
    """
    if all(Storage.of(stored.values[number]).is_plain for number in np.unique(stored.which)):
        return None
    groups = [group for group in effects.graph.groups if name in group.shared]
    chosen = {group.name: choices[group.name] for group in groups}

    @cache
    def place(user: int, choice: int, layout: Layout) -> UsePlace:
        group = groups[user]
        (there,) = effects.stored_uses(choose(group, choice, {name: layout}))
        use, block = there.use, effects.parameters.blocks.of[group.name]
        ways = there.ahead, there.behind, use.learns
        return UsePlace(block, use.layout, use.again, use.wanted > 0, *ways)

    firsts, which = distinct([stored.which, *chosen.values()])
    numbers, joins = [], []
    for row in firsts.tolist():
        uses = [place(user, int(column[row]), stored.at(row)) for user, column in enumerate(chosen.values())]
        numbers.append([memo.turns.of(turn) for turn in turns(uses)])
        # Autograd waits for all uses, also for those whose gradients are handed over.
        learning = [n for n, use in enumerate(uses) if use.learns]
        direct = [n for n in learning if not uses[n].behind]
        joins.append(min(len(direct), 2) if direct and direct[-1] > learning[0] else 0)
    table = np.array(numbers)[which]
    columns = {group: Column(table[:, user], memo.turns.values) for user, group in enumerate(chosen)}
    return _TiedParameter(columns, np.array(joins)[which])
