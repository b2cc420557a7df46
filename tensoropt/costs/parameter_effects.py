"""The effects of a parameter in a step: storing it, gathering it for its uses, reducing its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from tensoropt.costs import effects as at
from tensoropt.costs.effects import (
    Allocation,
    Effect,
    Effects,
    GradientShare,
    MoveEffects,
    SharedCollective,
    When,
    allocations,
    part_of,
)
from tensoropt.costs.prices import NO_WORK, Queues, Send
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.optimizers import kind_of
from tensoropt.sharding.buckets import reduction_axes
from tensoropt.sharding.regions import Blocks, Neighbours, find_blocks
from tensoropt.sharding.reshard.steps import ReshardingStep, lies_inside
from tensoropt.sharding.storage import Storage, Turn, Way, alone, way, whole_layout

_RETURNING = "gradients on their way"


class Use(NamedTuple):
    """One use of a parameter by an operator group, whatever the parameter's storage.

    Attributes:
        layout: the layout that the group reads.
        wanted: how many times the group's backward reads the gathered parameter.
        again: whether the group is recomputed.
        neighbours: whether other blocks' computation can hide its gathering; None if it is never prefetched.
        last_part: the index of the last part of the group's forward.
        turn: what this use does for the other uses of a tied parameter; None if it shares nothing.
        learns: whether the use gives a trained parameter a gradient.
        short: the parameter's short name in the group; "" if effects belong to the parameter, not the group.
    """

    layout: Layout
    wanted: int
    again: bool = False
    neighbours: Neighbours | None = None
    last_part: int = 0
    turn: Turn | None = None
    learns: bool = True
    short: str = ""

    @property
    def own(self) -> Turn:
        """Whether this use itself gathers the parameter, frees it and scatters its gradient."""
        return alone(wanted=self.wanted > 0) if self.turn is None else self.turn


@dataclass(frozen=True, slots=True, eq=False)
class StoredUse:
    """A use of a parameter that is stored in a given layout (:meth:`ParameterEffects.stored_use`).

    Attributes:
        forward, backward: the resharding steps from storage to the use, and of the gradient back.
        bytes: the size of the parameter in bytes, as the group reads it.
        wanted: how many times backward reads it; 0 in inference.
        gives: whether the use gives the parameter a gradient.
        casts: whether stored and read dtypes differ.
        anew: whether backward gathers or casts it again instead of having it saved.
        ahead: whether it is prefetched.
        behind: whether its gradient is scattered one block later, in every micro-batch.
        copy_ahead: whether its unsharded copy is prefetched in the first micro-batch, and its gradient
            scattered later.
    """

    name: str
    stored: Layout
    use: Use
    way: Way
    forward: tuple[ReshardingStep, ...]
    backward: tuple[ReshardingStep, ...]
    bytes: int
    wanted: int
    gives: bool
    casts: bool
    anew: bool
    ahead: bool
    behind: bool
    copy_ahead: bool

    def gathered(self, key: str) -> Allocation:
        """Return the allocation of the gathered parameter, in the layout that the group reads."""
        return Allocation(
            "gathered parameters", f"{key} {self.use.layout}", self.bytes, False, self.use.short
        )

    def gradient(self, key: str, size: int) -> Allocation:
        """Return an allocation for the use's gradient while it is resharded to the storage."""
        return Allocation(_RETURNING, f"{key} {self.use.layout}", size, False, self.use.short)

    @property
    def moves(self) -> bool:
        """Whether the parameter is resharded or cast for the use."""
        # A copy that stays gathered was cast once when it was gathered; only the others are cast at each use.
        return bool(self.forward) or (self.casts and not self.way.unsharded)

    @property
    def kept(self) -> bool:
        return bool(self.forward) and self.wanted > 0 and not self.anew

    @property
    def casts_back(self) -> bool:
        """Whether the gradient is cast at each use; with ZeRO-1 it is accumulated first, and cast once."""
        return self.gives and self.casts and not self.way.reduced_last

    @property
    def waits(self) -> bool:
        """Whether the gradient is resharded, or cast to another dtype, before the optimizer uses it."""
        return bool(self.backward) or self.casts_back

    def complete(self, micro_batches: int) -> When:
        """Return the moment, one of ``COMPLETE``, at which the gradient is in its stored layout."""
        last = self.copy_ahead and micro_batches > 1
        if self.behind or (self.way.reduced_last and last):
            # The first block's gradients are scattered when backward is over.
            return at.BACK_LEFT if self.use.neighbours and self.use.neighbours.before else at.REDUCE_LAST
        return at.REDUCE_LAST if self.way.reduced_last else at.ARRIVED


class ParameterEffects:
    """The effects of parameters on one mesh, in bytes and seconds of one rank."""

    def __init__(self, moves: MoveEffects):
        self.moves, self.prices = moves, moves.prices
        # Cached per instance, that is per mesh and prices, which the key does not contain.
        self._stored_uses: dict[tuple[str, Layout, Use], StoredUse] = {}
        self._used: dict[StoredUse, Effects] = {}

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks (repeated layers) whose parameters are gathered together when prefetched."""
        return find_blocks(self.moves.graph)

    def way(self, name: str, stored: Layout, use: Layout) -> Way:
        moves, graph = self.moves, self.moves.graph
        atoms, shared = graph.atoms.atom_sizes(name), name in graph.shared
        return way(moves.tensors[name], stored, use, atoms, moves.mesh, shared=shared)

    def stored_use(self, name: str, stored: Layout, use: Use) -> StoredUse:
        """Return a use of a parameter with the steps and casts that its stored layout requires."""
        key = name, stored, use
        if key not in self._stored_uses:
            moves, tensor = self.moves, self.moves.tensors[name]
            way, learns = self.way(name, stored, use.layout), moves.learns(name)
            overlaps = way.ahead and use.neighbours is not None
            gives, casts = use.learns and learns, tensor.master_dtype is not None
            forward, backward = way.steps(learns=gives)
            self._stored_uses[key] = StoredUse(
                *(name, stored, use, way, forward, backward, moves.bytes(name, use.layout)),
                wanted=use.wanted if moves.training else 0,
                gives=gives,
                casts=casts,
                # An unsharded copy is cast when it is gathered, once for all uses.
                anew=(casts and not way.unsharded) or any(step.kind == "all_gather" for step in forward),
                ahead=overlaps and way.goes_ahead(learns=gives),
                behind=overlaps and way.goes_behind(learns=gives),
                copy_ahead=overlaps and way.copy_goes_ahead(learns=learns),
            )
        return self._stored_uses[key]

    # -- one use ----------------------------------------------------------------------------------

    def used(self, use: StoredUse) -> Effects:
        """Return the effects per micro-batch of resharding a parameter for its use, and its gradient back."""
        if use not in self._used:
            gathered = self._gathered_ahead(use) if use.ahead else self._gathered_at_use(use)
            self._used[use] = Effects((*gathered, *self._returned(use)))
        return self._used[use]

    def _gathered_at_use(self, use: StoredUse) -> list[Effect]:
        found: list[Effect] = []
        training, again = self.moves.training, use.use.again
        if use.moves:
            gather = self.moves.stepped(at.GATHER, use.name, use.forward)
            if not use.way.unsharded:
                gather = self._with_cast(gather, use.name, use.stored)
            found.append(gather)
            if training and again:
                found.append(replace(gather, when=at.GATHER_AGAIN))
            elif use.anew:
                # Each saved use is unpacked, and therefore gathered, separately: two uses in one backward are
                # two collectives.
                found += [replace(gather, when=at.GATHER_BACK)] * use.wanted
        if use.kept:
            kept = use.gathered("kept")._replace(kept=True)
            found.append(Effect(at.COMPUTE_AGAIN if again else at.COMPUTE, begins=(kept,)))
            found.append(Effect(at.COMPUTE_BACK, after=True, ends=(kept,)))
        return found

    def _gathered_ahead(self, use: StoredUse) -> list[Effect]:
        name, neighbours, own = use.name, use.use.neighbours, use.use.own
        assert neighbours is not None
        copied, whole = self._copied(use.forward), allocations(use.gathered("whole"))
        moved = self.moves.stepped(at.GATHER, name, use.forward)
        # Pieces that lie inside others are joined in a separate buffer.
        joined = replace(moved, sends=(), workspace_bytes=use.bytes * copied)
        sent = self._with_cast(self._together(at.BEGIN_BEFORE, name, moved.sends), name, use.stored)
        sent = replace(sent, begins=whole)

        def gathered(before: When, at: When) -> list[Effect]:
            return [replace(sent, when=before), replace(joined, when=at)]

        back_before = at.BACK_BEFORE if neighbours.behind else at.BACK_BEGIN
        found: list[Effect] = []
        if own.gathers:
            found += gathered(at.BEGIN_BEFORE if neighbours.before else at.BEGIN, at.GATHER)
        if own.frees:
            found.append(Effect(part_of(use.use.last_part), after=True, ends=whole))
        if not self.moves.training:
            return found
        if use.use.again:
            if own.gathers:
                found += gathered(back_before, at.GATHER_AGAIN)
            # The second forward leaves in place what backward needs a second time.
            if own.frees_again:
                found.append(Effect(part_of(use.use.last_part, again=True), after=True, ends=whole))
        elif own.gathers_back:
            found += gathered(back_before, at.GATHER_BACK)
        if own.frees_back:
            found.append(Effect(at.COMPUTE_BACK, after=True, ends=whole))
        return found

    def _returned(self, use: StoredUse) -> list[Effect]:
        if use.behind:
            return self._scattered_behind(use)
        if not use.waits:
            return []
        # The duration of a cast includes that of passing the tensor on.
        passes = not use.forward and not use.casts_back
        back = self.moves.stepped(at.PARAMETERS, use.name, use.backward, passes=passes)
        if use.casts_back:
            return [self._with_cast(back, use.name, use.stored)]
        return [replace(back, sums_passing=False)]

    def _scattered_behind(self, use: StoredUse) -> list[Effect]:
        """Return the effects of a gradient that is scattered while backward computes the next block."""
        name, own, size, neighbours = use.name, use.use.own, use.bytes, use.use.neighbours
        source = self.moves.overheads_source
        assert neighbours is not None
        waiting = use.gradient("waiting", size)
        waits = Effect(at.PARAMETERS, begins=allocations(waiting))
        if own.before:
            # The first two gradients are added into a new tensor, later ones into that tensor.
            buffers, add_s = size * (2 if own.before == 1 else 1), size * self.prices.overheads.add_s_per_byte
            waits = Effect(at.PARAMETERS, workspace_bytes=buffers, local_s=add_s, source=source)
        if not own.scatters:
            return [waits]
        shard = self.moves.bytes(name, use.stored)
        copied, arriving = self._copied(use.backward), use.gradient("shard", shard)
        moved = self.moves.stepped(at.BACK_NEXT, name, use.backward)
        sent = replace(
            self._together(at.BACK_NEXT, name, moved.sends),
            begins=allocations(arriving),
            local_s=moved.local_s,
            host_s=moved.host_s,
            # Pieces that are copies replace the gradient, and are made before there is a shard.
            workspace_bytes=max(size - shard, 0) * copied,
        )
        # After the first block, backward passes no further block: it is over where the gradient is scattered.
        ended = allocations(waiting, arriving)
        left = Effect(
            at.BACK_LEFT, after=not neighbours.before, ends=ended, workspace_bytes=shard, source=source
        )
        return [waits, sent, self._with_cast(left, name, use.stored)]

    def ahead_bytes(self, use: StoredUse) -> float:
        """Return the bytes that the search counts for prefetching a parameter for one of its uses. Over all
        uses they add up to the gathered parameters and gradients of two average blocks."""
        if not use.ahead:
            return 0.0
        blocks = sum(last is not None for last in self.blocks.last)
        return min(2, blocks) * (1 + use.gives) * use.bytes / blocks

    # -- between uses -----------------------------------------------------------------------------

    def stored(self, name: str, stored: Layout, *, joins: int = 0, complete: When = at.ARRIVED) -> Effects:
        """Return the effects of a parameter between its uses: memory, accumulation of gradients, optimizer.

        Autograd accumulates a tied parameter's gradient once, from the sum of its users' gradients.

        Args:
            joins: 0 if no gradient of a tied parameter waits for those of other uses, 1 if one does, 2 if
                several do and are summed.
            complete: the moment at which the gradient is complete (:meth:`StoredUse.complete`).
        """
        tensor, size = self.moves.tensors[name], self.moves.stored_bytes(name, stored)
        if not self.moves.learns(name):
            return Effects((), parameters=size)
        # If the parameter is stored as it is used, its gradient has nothing to wait for.
        waits = Storage.of(stored).reduced_last and complete != at.ARRIVED
        axes, elements = reduction_axes(stored, self.moves.mesh), self.moves.elements(name, stored)
        arrivals = 1 if waits else self.moves.mesh[0]
        arrival = self.prices.gradient_arrival(size, arrivals, copied=bool(axes) or complete != at.ARRIVED)
        found: list[Effect] = []
        if joins:
            summed = Allocation(_RETURNING, "sum", self.summed_bytes(name, stored))
            found.append(Effect(at.FIRST_ARRIVED, after=True, begins=allocations(summed)))
            sum_bytes = summed.bytes if joins > 1 else 0
            found.append(Effect(at.ARRIVED, ends=allocations(summed), workspace_bytes=sum_bytes))
        optimizer, step = kind_of(self.prices.optimizer), self._work(at.STEP, self.prices.step(elements))
        made = optimizer.made(tensor.elements, self.moves.graph.atoms.graph.largest_trained)
        found.append(replace(step, workspace_bytes=round(size * made)))
        found.append(self._work(at.REDUCE_LAST if waits else at.ARRIVED, arrival))
        if axes:
            share = GradientShare(axes, tensor.stored_dtype, elements, complete)
            found.append(Effect(at.REDUCED, share=share))
        return Effects(tuple(found), size, size, round(size * optimizer.state))

    def summed_bytes(self, name: str, stored: Layout) -> int:
        """Return the size in bytes of a tied parameter's summed gradient: a shard's, or with ZeRO-1 whole."""
        way = self.way(name, stored, whole_layout(self.moves.tensors[name], self.moves.mesh))
        return (
            self.moves.bytes(name, way.source) if way.reduced_last else self.moves.stored_bytes(name, stored)
        )

    # -- unsharded copies -------------------------------------------------------------------------

    def unsharded(self, use: StoredUse) -> Effects:
        """Return the effects of a parameter's unsharded copy, gathered once per step (ZeRO-1 and ZeRO-2)."""
        name, way, moves = use.name, use.way, self.moves
        if not way.unsharded:
            return Effects(())
        gather, reduce = way.once(learns=moves.learns(name))
        neighbours, size = use.use.neighbours if use.copy_ahead else None, moves.bytes(name, way.source)
        found = self._copied_once(use, gather, neighbours)
        if neighbours is not None and not self._copied(gather):  # it stays as it arrives, with padding
            size = gather[0].payload(moves.mesh) * moves.tensors[name].element_bytes
        if not way.reduced_last:
            return Effects(tuple(found), parameters=size)
        # With one micro-batch nothing waits: a gradient that is reduced last is reduced when backward is
        # over.
        found += self._reduced_once(use, reduce, neighbours if moves.mesh[0] > 1 else None)
        # Each micro-batch adds its gradient to the one that waits, in the type in which that is stored.
        waiting = moves.stored_bytes(name, way.source)
        add_s = waiting * self.prices.overheads.add_s_per_byte * moves.mesh[0]
        found.append(Effect(at.REDUCE_LAST, local_s=add_s, source=moves.overheads_source))
        return Effects(tuple(found), parameters=size, gradients=waiting)

    def _copied_once(
        self, use: StoredUse, steps: Sequence[ReshardingStep], neighbours: Neighbours | None
    ) -> list[Effect]:
        """Return the effects of gathering an unsharded copy: alone without ``neighbours``, else with those of
        the other parameters of its block."""
        name, way, moves = use.name, use.way, self.moves
        narrow, size = moves.bytes(name, way.shard) if use.casts else 0, moves.bytes(name, way.source)
        buffers = max(moves.resharding_bytes(steps, name) - size, 0)
        gather = moves.stepped(at.GATHER_ONCE, name, steps, workspace_bytes=buffers + narrow)
        gather = self._with_cast(gather, name, way.shard)
        if neighbours is None:
            return [gather]
        sent = self._together(at.FIRST_BEFORE if neighbours.before else at.FIRST_BEGIN, name, gather.sends)
        joining = Effect(at.FIRST_BEGIN, workspace_bytes=size * self._copied(steps))
        return [replace(gather, sends=(), workspace_bytes=0), sent, joining]

    def _reduced_once(
        self, use: StoredUse, steps: Sequence[ReshardingStep], neighbours: Neighbours | None
    ) -> list[Effect]:
        """Return the effects of reducing an unsharded copy's gradient, in the dtype in which it is read:
        alone without ``neighbours``, else with those of the other parameters of its block."""
        name, way, moves = use.name, use.way, self.moves
        # The part of a wide sum that is sent is cast first.
        narrow = moves.bytes(name, way.source) if use.casts else 0
        buffers = moves.resharding_bytes(steps, name)
        reduce = moves.stepped(at.REDUCE_LAST, name, steps, workspace_bytes=buffers + narrow)
        reduce = self._with_cast(self._with_cast(reduce, name, way.source), name, way.shard)
        if neighbours is None:
            return [reduce]
        shard, copied = moves.bytes(name, way.shard), self._copied(steps)
        # The sent data is the waiting gradient itself, a copy of its pieces, or a cast copy.
        copy = use.gradient("sent copy", narrow or moves.bytes(name, way.source) * copied)
        arriving = allocations(use.gradient("last shard", shard), copy)
        sent = self._together(at.LAST_NEXT, name, reduce.sends, stays=not copy.bytes)
        return [
            replace(reduce, sends=(), workspace_bytes=0),
            replace(sent, begins=arriving, workspace_bytes=narrow * copied),
            Effect(at.LAST_LEFT, after=not neighbours.before, ends=arriving, workspace_bytes=shard),
        ]

    # -- parts ------------------------------------------------------------------------------------

    def _work(self, when: When, seconds: Queues) -> Effect:
        source = self.moves.overheads_source
        return Effect(when, local_s=seconds.device_s, host_s=seconds.host_s, source=source)

    def _with_cast(self, moved: Effect, name: str, stored: Layout) -> Effect:
        cast = self.prices.cast(self.moves.tensors[name], self.moves.elements(name, stored))
        if cast == NO_WORK:
            return moved
        return replace(moved, local_s=moved.local_s + cast.device_s, host_s=moved.host_s + cast.host_s)

    def _together(self, when: When, name: str, sends: tuple[Send, ...], *, stays: bool = False) -> Effect:
        beside = tuple(SharedCollective(send, self.moves.tensors[name].dtype, stays) for send in sends)
        return Effect(when, source=self.moves.overheads_source, beside=beside, moves=True)

    def _copied(self, steps: Sequence[ReshardingStep]) -> bool:
        """Return whether a coalesced collective copies the tensor's pieces to a buffer, as they are padded or
        not contiguous."""
        (step,) = steps
        padded = step.payload(self.moves.mesh) != max(prod(step.before), prod(step.after))
        return lies_inside(step.before, step.atom) or (step.kind == "reduce_scatter" and padded)
