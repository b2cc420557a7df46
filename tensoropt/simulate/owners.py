"""The owners of a memory curve's bytes: at every change of it, the tensors that are alive, and until when.

The simulator adds up effects; this module takes the same effects apart. An effect that takes memory begins a
block, and one that gives memory back ends blocks of the same owner and kind, of equal size if there is one,
so that at every moment the blocks add up to the bytes that the simulator counts. None of this is done unless
it is requested.

The memory curve itself, moment by moment, is taken from the recording of the simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from tensoropt.costs.effects import Effect
from tensoropt.costs.prices import free_prices
from tensoropt.profiling.facts import Facts
from tensoropt.sharding.strategy import Strategy
from tensoropt.simulate.batch import Batch, Owner
from tensoropt.simulate.candidates import StrategyCandidates
from tensoropt.simulate.collectives import coalesced
from tensoropt.simulate.recorder import StepRecorder
from tensoropt.simulate.recording import OwnerRow
from tensoropt.simulate.simulator import StepSimulator


@dataclass(frozen=True)
class _MemoryPoint:
    """Bytes alive at one moment, by kind."""

    moment: str
    parameters: int
    gradients: int
    optimizer: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.kept + self.transient


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one step on the rank with the largest shards."""

    points: tuple[_MemoryPoint, ...]

    @property
    def peak(self) -> _MemoryPoint:
        """The point with the most bytes; the first of several."""
        return max(self.points, key=lambda p: p.total)


def memory_curve(strategy: Strategy, facts: Mapping[str, Facts], optimizer: str) -> MemoryCurve:
    """Return the memory curve of one strategy: one point for every moment at which something is computed or
    needed.

    Args:
        facts: by group name, the facts of its configuration.
    """
    candidates = StrategyCandidates(strategy, facts)
    batch = Batch(candidates, *candidates.row(), free_prices(strategy.graph, strategy.mesh, optimizer))
    recorder = StepRecorder()
    simulator = StepSimulator(batch, recorder)
    simulator.simulate()
    curve: list[_MemoryPoint] = []
    parameters, gradients, state = (int(x) for x in simulator.lasting[0])
    for at in recorder.moments:
        # Moments at which nothing is needed or computed only repeat the last point.
        if not at.workspace and at.moment.kind not in ("compute", "step"):
            continue
        words = at.moment.words
        point = _MemoryPoint(words, parameters, gradients, state, int(at.kept), int(at.transient))
        if curve and curve[-1].moment == words:  # parts of one group
            point = max(curve.pop(), point, key=lambda p: p.total)
        curve.append(point)
    return MemoryCurve(tuple(curve))


_PACKED = "gradients that are scattered together"
"""The owner of packed gradients, which belong to no single operator."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes of one owner that are alive at the positions from ``first`` up to, but not including, ``end``.

    Attributes:
        kind: ``kept``, ``transient`` or ``workspace``.
        since, until: the moments that allocate and free them, in words.
    """

    operator: str
    tensor: str
    what: str
    kind: str
    bytes: int
    first: int
    end: int
    since: str
    until: str


class StepOwners:
    """The owners at every point of a recorded strategy's memory curve.

    Args:
        batch: a batch of one strategy.
        recorder: the recorder that recorded its step.
    """

    def __init__(self, batch: Batch, recorder: StepRecorder):
        assert batch.count == 1, "one strategy is recorded"
        self.batch, self.recorder = batch, recorder
        self.count, self.last = len(batch.schedule.moments), batch.schedule.last
        self._lasting: list[OwnerRow] = []
        self._blocks: list[_Block] = []
        for owner in batch.owners:
            self._lasting += _lasting(batch, owner)
            self._blocks += self._workspace(owner)
        tied = [set(users) for users in batch.schedule.users.values() if len(users) > 1]
        for kind in ("kept", "transient"):
            changes = [change for owner in batch.owners for change in self._changes(owner, kind)]
            self._blocks += _matched(changes, tied)
        self._blocks += self._packed()

    def at(self, point: int) -> tuple[OwnerRow, ...]:
        """Return the owners at one point of the curve, those with the most bytes first; together they give
        its height.

        Args:
            point: counted as in :meth:`StepRecorder.memory_at`: 0 is before anything happens.
        """
        if not 0 <= point <= len(self.recorder.curve):
            raise IndexError(f"there is no point {point} in a curve of {len(self.recorder.curve) + 1}")
        rows = list(self._lasting)
        if point:
            states = self.recorder.states[point - 1]
            for kind, moment in zip(("kept", "transient", "workspace"), states, strict=True):
                if moment >= 0:
                    rows += self._alive(kind, moment)
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def _alive(self, kind: str, moment: int) -> Iterator[OwnerRow]:
        """Yield the rows of one kind that are alive at a moment, counted through all micro-batches."""
        position = self._position(moment)
        for block in self._blocks:
            if block.kind != kind or not block.first <= position < block.end:
                continue
            yield OwnerRow(
                block.operator,
                block.tensor,
                block.what,
                # A moment's workspace is part of the curve's transient bytes.
                "transient" if kind == "workspace" else kind,
                block.bytes,
                self._time_s(moment, position, block.first),
                self._time_s(moment, position, block.end),
                block.since,
                block.until,
            )

    def _position(self, moment: int) -> int:
        in_all = self.last * self.batch.mesh[0]
        return moment % self.last if moment < in_all else moment - in_all + self.last

    def _time_s(self, moment: int, position: int, other: int) -> float:
        """Return the time at which another position begins in the micro-batch of ``moment``; the step's end
        comes after all."""
        in_all, times = self.last * self.batch.mesh[0], self.recorder.moment_times
        if moment < in_all:
            begins = moment - position
            # What the end of one micro-batch gives back is gone when the next one begins.
            number = (
                min(begins + other, begins + self.last) if begins + self.last < in_all else begins + other
            )
        else:
            number = in_all + other - self.last
        return times[number] if number < len(times) else self.recorder.end_s

    # -- blocks -------------------------------------------------------------------------------------

    def _workspace(self, owner: Owner) -> list[_Block]:
        """Return the workspace of one owner's moments."""
        done: list[_Block] = []
        for effect in owner.effects.at(0).effects:
            at = owner.position(effect.when) + effect.after
            if effect.workspace_bytes and 0 <= at < self.count:
                words = self.batch.schedule.moments[at].words
                block = self._block(owner, effect, "workspace", effect.workspace_bytes, at)
                done.append(replace(block, end=at + 1, until=f"the end of {words}"))
        return done

    def _changes(self, owner: Owner, kind: str) -> Iterator[_Block]:
        """Yield the blocks of one kind that begin and (with negative bytes) end."""
        for effect in owner.effects.at(0).effects:
            size = effect.kept if kind == "kept" else effect.transient
            at = owner.position(effect.when) + effect.after
            if size and 0 <= at < self.count:
                yield self._block(owner, effect, kind, size, at)

    def _block(self, owner: Owner, effect: Effect, kind: str, size: int, at: int) -> _Block:
        words = self.batch.schedule.moments[at - effect.after].words
        since = f"the end of {words}" if effect.after else words
        return _Block(
            _operator(self.batch, owner), owner.name, self._what(owner, effect, kind), kind,
            size, at, self.count, since, "the end of the step",
        )  # fmt: skip

    def _what(self, owner: Owner, effect: Effect, kind: str) -> str:
        new = owner.kind == "tensor" and owner.name in self.batch.graph.atoms.graph.mutations.values()
        what = _what(owner, effect, kind)
        return "new value of a buffer" if new and what == "activation" else what

    def _packed(self) -> Iterator[_Block]:
        """Yield the copies made of gradients to scatter them together, as the simulator lays them out."""
        if not self.batch.prices.packs:
            return
        beginnings = self.batch.schedule.beginnings
        workspace: dict[int, int] = {}
        for block in self._blocks:
            if block.kind == "workspace":
                workspace[block.first] = workspace.get(block.first, 0) + block.bytes
        for one in coalesced(self.batch):
            at = one.position
            if one.kind != "reduce_scatter" or int(one.members[0]) <= 1:
                continue
            shards = int(one.bytes[0]) // prod(self.batch.mesh[axis + 1] for axis in one.axes)
            beside = int(one.staying[0])
            arrived = min((begin for begin in beginnings if begin > at), default=at + 1)
            words = self.batch.schedule.moments[at].words
            block = _Block("", _PACKED, "packed copy", "transient", beside, at, arrived, words, words)
            if beside:
                until = self.batch.schedule.moments[arrived].words if arrived < self.count else words
                yield replace(block, until=until)
            # Of this and the moment's other memory, the larger counts.
            more = int(one.bytes[0]) - shards - beside - workspace.get(at, 0)
            if more > 0:
                workspace[at] = workspace.get(at, 0) + more
                yield replace(block, kind="workspace", bytes=more, end=at + 1, until=f"the end of {words}")


def _matched(changes: Sequence[_Block], tied: Sequence[Collection[str]]) -> list[_Block]:
    """Return blocks with their ends, given all changes of one kind in a step.

    Args:
        tied: the users of each parameter that has several.
    """
    done: list[_Block] = []
    alive: list[_Block] = []
    # What ends at a moment existed before anything begins at that moment.
    in_order = sorted(changes, key=lambda change: (change.first, change.bytes > 0))
    owed: list[_Block] = []
    for _, at_once in groupby(in_order, key=lambda change: change.first):
        for change in at_once:
            if change.bytes > 0:
                alive.append(change)
            else:
                owed, ended = _given_back([*owed, change], alive, None)
                done += ended
        # If memory is given back before it is taken, both happen at one moment; only then are other owners
        # searched.
        for among in (None, tied):
            owed, ended = _given_back(owed, alive, among)
            done += ended
    assert not owed, f"{owed[0].operator} {owed[0].tensor} gives back what none took"
    return [block for block in (*done, *alive) if block.end > block.first]


def _given_back(
    owed: Sequence[_Block], alive: list[_Block], tied: Sequence[Collection[str]] | None
) -> tuple[list[_Block], list[_Block]]:
    """Return (changes that still have nothing to end, the blocks that the others have ended)."""
    left: list[_Block] = []
    done: list[_Block] = []
    for change in owed:
        ended = _ended(alive, change, tied)
        if ended is None:
            left.append(change)
        else:
            done += ended
    return left, done


def _ended(
    alive: list[_Block], change: _Block, tied: Sequence[Collection[str]] | None
) -> tuple[_Block, ...] | None:
    """Return the blocks that a change ends, removed from those that are alive; None if no owner has enough
    for it.

    An owner gives back its own memory: a block of the size, otherwise the oldest first. For a tied parameter,
    one user takes a copy or makes a gradient that another user gives back.

    Args:
        tied: the users of each parameter that has several; None searches only the owner's own blocks.
    """
    own = [block for block in alive if (block.operator, block.tensor) == (change.operator, change.tensor)]
    rest = -change.bytes - _bytes(own)
    taken = own
    if rest > 0 and tied is not None:
        others = [block for block in alive if block not in own and block.bytes == rest]
        users = [of for of in tied if change.operator in of]
        with_it = [block for block in others if any(block.operator in of for of in users)]
        taken = [*own, *(with_it or others)[:1]]
    if _bytes(taken) < -change.bytes:
        return None
    for block in taken:
        alive.remove(block)
    ended = _end(taken, change)
    alive += taken
    return tuple(ended)


def _bytes(blocks: Sequence[_Block]) -> int:
    return sum(block.bytes for block in blocks)


def _end(alive: list[_Block], change: _Block) -> list[_Block]:
    """Remove from the live blocks the bytes that a change gives back."""
    size = -change.bytes
    same = next((block for block in alive if block.bytes == size), None)
    ending = [same] if same is not None else list(alive)
    done = []
    for block in ending:
        if not size:
            break
        part = min(block.bytes, size)
        size -= part
        place = alive.index(block)
        alive.remove(block)
        if part < block.bytes:  # a single sum is given back in parts
            alive.insert(place, replace(block, bytes=block.bytes - part))
        done.append(replace(block, bytes=part, end=change.first, until=change.since))
    return done


def _operator(batch: Batch, owner: Owner) -> str:
    """Return the group of operators that an owner belongs to; for a parameter, the first group that
    uses it."""
    if owner.kind == "group":
        return owner.name
    if owner.kind == "parameter":
        return batch.schedule.users[owner.name][0]
    maker = batch.graph.atoms.graph.producer[owner.name]
    return batch.graph.group_of[maker.name].name


def _what(owner: Owner, effect: Effect, kind: str) -> str:
    """Return a description of an owner's bytes."""
    backward = effect.when.phase not in ("first", "forward", "again")
    if kind == "workspace":
        return "optimizer's temporaries" if effect.when.what == "step" else "workspace"
    if owner.kind == "group":
        if kind == "kept":
            return "saved inside for backward"
        gathered = effect.when.what in ("before", "begin", "compute") or not backward
        return "gathered parameters" if gathered else "gradients on their way"
    if owner.kind == "parameter":
        return "gathered copy" if not backward else "gradient on its way"
    return "gradient" if backward else "activation"


def _lasting(batch: Batch, owner: Owner) -> Iterator[OwnerRow]:
    """Yield the memory that is alive during the whole step."""
    effects = owner.effects.at(0)
    words = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer state"}
    for kind, what in words.items():
        if size := getattr(effects, kind):
            what = what if owner.kind == "parameter" else f"{what} (unsharded copy)"
            yield OwnerRow(_operator(batch, owner), owner.name, what, kind, int(size), 0.0, None, "", "")
