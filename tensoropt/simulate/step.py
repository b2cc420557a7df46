"""A rank's step as a list of instructions over named allocations, for a single strategy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from tensoropt.costs.effects import Allocation, Effect
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.collectives import coalesced
from tensoropt.simulate.step_schedule import Moment

PACKED = "gradients that are scattered together"
"""The owner of packed gradients, of no single operator."""


class NamedBytes(NamedTuple):
    """An allocation of a step, under a name unique at any time.

    Attributes:
        operator: the group that begins it; "" for none.
        what, key: as in :class:`~tensoropt.costs.effects.Allocation`.
        kind: ``kept``, ``transient`` or ``workspace``.
    """

    operator: str
    tensor: str
    what: str
    key: str
    kind: str
    bytes: int

    @property
    def name(self) -> tuple[str, str, str]:
        """The name, independent of its kind and of the operators that begin and end it."""
        return self.tensor, self.what, self.key


@dataclass
class Instruction:
    """A rank's work at one moment of its step.

    Attributes:
        begins, ends: the allocations that begin and end with its start.
        workspace: those alive while it runs.
        leaves, releases: those that begin and end with its end.
    """

    moment: Moment
    begins: list[NamedBytes] = field(default_factory=list)
    ends: list[NamedBytes] = field(default_factory=list)
    workspace: list[NamedBytes] = field(default_factory=list)
    leaves: list[NamedBytes] = field(default_factory=list)
    releases: list[NamedBytes] = field(default_factory=list)

    def allocate(self, effect: Effect, names: Names) -> None:
        begins, ends = (self.leaves, self.releases) if effect.after else (self.begins, self.ends)
        begins += map(names.of, effect.begins)
        ends += map(names.of, effect.ends)


class _Lifetime(NamedTuple):
    """An allocation with its lifetime.

    Attributes:
        first, end: positions in the step.
        since, until: these in words.
    """

    named: NamedBytes
    first: int
    end: int
    since: str
    until: str


@dataclass(frozen=True)
class Step:
    """The step of one rank: a micro-batch's instructions, then those of the step's end."""

    instructions: tuple[Instruction, ...]

    def lifetimes(self) -> Iterator[_Lifetime]:
        """Yield all allocations in the order of their end; ends belong to the next instruction's position."""
        alive: dict[tuple[tuple[str, str, str], str], list[tuple[NamedBytes, int, str]]] = defaultdict(list)
        over: tuple[Sequence[NamedBytes], Sequence[NamedBytes]] = (), ()
        end = words = ""
        for position, now in enumerate(self.instructions):
            # Begins first: what one effect begins, another one may end at the same time.
            for words, begins in ((end, over[0]), (now.moment.words, now.begins)):
                for named in begins:
                    alive[named.name, named.kind].append((named, position, words))
            for words, ends in ((end, over[1]), (now.moment.words, now.ends)):
                for named in ends:
                    begun, first, since = alive[named.name, named.kind].pop(0)
                    if first < position:
                        yield _Lifetime(begun, first, position, since, words)
            words, end = now.moment.words, f"the end of {now.moment.words}"
            yield from (_Lifetime(named, position, position + 1, words, end) for named in now.workspace)
            over = now.leaves, now.releases
        for begun, first, since in (left for of_name in alive.values() for left in of_name):
            yield _Lifetime(begun, first, len(self.instructions), since, "the end of the step")


class Names:
    def __init__(self, batch: Batch, owner: Owner):
        graph = batch.graph
        self.owner, self.operator = owner, operator_of(batch, owner)
        self.changes = owner.kind == "tensor" and owner.name in graph.atoms.graph.mutations.values()
        group = graph.group_of[owner.name] if owner.kind == "group" else None
        self.parameters = {} if group is None else {short: name for name, short in group.short_names.items()}

    def of(self, allocation: Allocation) -> NamedBytes:
        tensor = self.parameters[allocation.parameter] if allocation.parameter else self.owner.name
        what = allocation.what
        if self.changes and what == "activation":
            what = "new value of a buffer"
        kind = "kept" if allocation.kept else "transient"
        return NamedBytes(self.operator, tensor, what, allocation.key, kind, allocation.bytes)

    def workspace(self, effect: Effect) -> NamedBytes:
        what = "optimizer's temporaries" if effect.when.what == "step" else "workspace"
        return NamedBytes(self.operator, self.owner.name, what, "", "workspace", effect.workspace_bytes)


def lower(batch: Batch, row: int = 0) -> Step:
    moments = batch.schedule.moments
    instructions = [Instruction(moment) for moment in moments]
    for owner in batch.owners:
        names = Names(batch, owner)
        for position, effect in owner.of(row):
            if not 0 <= position < len(moments):
                continue
            instructions[position].allocate(effect, names)
            # What takes place when an instruction is over belongs to the next one's time and peak.
            if effect.workspace_bytes and position + effect.after < len(moments):
                instructions[position + effect.after].workspace.append(names.workspace(effect))
    _share(batch.part(slice(row, row + 1)), instructions)
    return Step(tuple(instructions))


def _share(batch: Batch, instructions: Sequence[Instruction]) -> None:
    """Add the copies in which gradients are scattered together."""
    beginnings = batch.schedule.beginnings
    for number, call in enumerate(coalesced(batch) if batch.prices.packs else ()):
        at, size, staying = instructions[call.position], int(call.bytes[0]), int(call.staying[0])
        if call.kind != "reduce_scatter" or int(call.members[0]) <= 1:
            continue
        shards = size // prod(batch.mesh[axis + 1] for axis in call.axes)
        copy = NamedBytes("", PACKED, "packed copy", str(number), "transient", staying)
        arrived = min((begin for begin in beginnings if begin > call.position), default=call.position + 1)
        if staying:
            at.begins.append(copy)
            if arrived < len(instructions):
                instructions[arrived].ends.append(copy)
        # Of this and the moment's other memory, the larger counts.
        more = size - shards - staying - sum(named.bytes for named in at.workspace)
        if more > 0:
            at.workspace.append(copy._replace(kind="workspace", bytes=more))


def operator_of(batch: Batch, owner: Owner) -> str:
    """Return an owner's group of operators; for a parameter, the first that uses it."""
    if owner.kind == "group":
        return owner.name
    if owner.kind == "parameter":
        return batch.schedule.users[owner.name][0]
    maker = batch.graph.atoms.graph.producer[owner.name]
    return batch.graph.group_of[maker.name].name
