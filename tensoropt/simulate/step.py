"""The allocations of a rank's step in one strategy, each with a name and a lifetime."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import prod
from operator import itemgetter
from typing import NamedTuple

from tensoropt.costs.effects import Allocation, Effect
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.collectives import coalesced

_PACKED = "gradients that are scattered together"
"""The name of copies in which gradients of several operators are packed."""


class NamedBytes(NamedTuple):
    """An allocation of a step, whose end is found by its name (tensor, what, key) and its kind.

    Attributes:
        operator: the operator group that begins it; "" for none.
        what: the use of the memory, such as ``activation``, ``gathered parameters`` or ``gradient``.
        key: a text that distinguishes allocations with the same ``tensor`` and ``what``.
        kind: ``kept`` (saved for backward), ``transient`` or ``workspace``.
    """

    operator: str
    tensor: str
    what: str
    key: str
    kind: str
    bytes: int

    @property
    def name(self) -> tuple[str, str, str]:
        """The name, which stays the same when the allocation becomes saved for backward."""
        return self.tensor, self.what, self.key


class _Lifetime(NamedTuple):
    """An allocation from its first position in the step schedule to its end, which are also given
    in words."""

    named: NamedBytes
    first: int
    end: int
    since: str
    until: str


class _Names:
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


_BEGINS, _ENDS, _ALONE = range(3)
"""What happens to an allocation at a position: it begins, it ends, or it is in use only there."""
_Change = tuple[int, int, bool, NamedBytes]
"""(position, what happens, whether it happens in that moment or as the previous one ends, allocation)."""


def lifetimes(batch: Batch) -> Iterator[_Lifetime]:
    """Yield all allocations of a micro-batch, then of the step's end, in the order in which they end.

    What happens as a moment ends counts in the next moment's time and peak.

    Args:
        batch: a batch of one strategy.
    """
    moments = batch.schedule.moments
    changes: list[_Change] = []
    for owner in batch.owners:
        names = _Names(batch, owner)
        for moment, effect in owner.of(0):
            position = moment + effect.after
            if moment < 0 or position >= len(moments):
                continue
            for what, changed in ((_BEGINS, effect.begins), (_ENDS, effect.ends)):
                changes += [(position, what, not effect.after, names.of(each)) for each in changed]
            if effect.workspace_bytes:
                changes.append((position, _ALONE, True, names.workspace(effect)))
    changes += _packed(batch, changes)
    alive: dict[tuple[tuple[str, str, str], str], list[tuple[NamedBytes, int, str]]] = defaultdict(list)
    # Begins first: what one effect begins, another one may end at the same time.
    for position, what, itself, named in sorted(changes, key=itemgetter(0, 1, 2)):
        words = moments[position].words if itself else f"the end of {moments[position - 1].words}"
        if what == _BEGINS:
            alive[named.name, named.kind].append((named, position, words))
        elif what == _ALONE:
            yield _Lifetime(named, position, position + 1, words, f"the end of {words}")
        else:
            begun, first, since = alive[named.name, named.kind].pop(0)
            if first < position:
                yield _Lifetime(begun, first, position, since, words)
    for begun, first, since in (left for of_name in alive.values() for left in of_name):
        yield _Lifetime(begun, first, len(moments), since, "the end of the step")


def _packed(batch: Batch, changes: list[_Change]) -> Iterator[_Change]:
    """Yield the allocations of buffers into which gradients that are scattered together are packed."""
    alone = Counter[int]()
    for position, what, _, named in changes:
        alone[position] += named.bytes * (what == _ALONE)
    beginnings = batch.schedule.beginnings
    for number, call in enumerate(coalesced(batch) if batch.prices.packs else ()):
        at, size, staying = call.position, int(call.bytes[0]), int(call.staying[0])
        if call.kind != "reduce_scatter" or int(call.members[0]) <= 1:
            continue
        shards = size // prod(batch.mesh[axis + 1] for axis in call.axes)
        copy = NamedBytes("", _PACKED, "packed copy", str(number), "transient", staying)
        arrived = min((begin for begin in beginnings if begin > at), default=at + 1)
        if staying:
            yield at, _BEGINS, True, copy
            if arrived < len(batch.schedule.moments):
                yield arrived, _ENDS, True, copy
        # Of this copy and the moment's other memory, the larger counts.
        if (more := size - shards - staying - alone[at]) > 0:
            alone[at] += more
            yield at, _ALONE, True, copy._replace(kind="workspace", bytes=more)


def operator_of(batch: Batch, owner: Owner) -> str:
    """Return the operator group of an owner of effects; for a parameter, the first one that uses it."""
    if owner.kind == "group":
        return owner.name
    if owner.kind == "parameter":
        return batch.schedule.users[owner.name][0]
    maker = batch.graph.atoms.graph.producer[owner.name]
    return batch.graph.group_of[maker.name].name
