"""What a parameter does in a step: stored between steps, brought to its uses, its gradient brought back.

Sharded storage (ZeRO, Rajbhandari et al., arXiv 1910.02054) is a choice that no neighbour sees: gathered for
each use (stage 3), or once per step, with gradients reduced in every micro-batch (stage 2) or once (stage 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from tensoropt.costs.effects import (
    ARRIVED,
    BACK_BEFORE,
    BACK_BEGIN,
    BACK_LEFT,
    BACK_NEXT,
    BEGIN,
    BEGIN_BEFORE,
    COMPUTE,
    COMPUTE_AGAIN,
    COMPUTE_BACK,
    FIRST_ARRIVED,
    FIRST_BEFORE,
    FIRST_BEGIN,
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    GATHER_ONCE,
    LAST_LEFT,
    LAST_NEXT,
    PARAMETERS,
    REDUCE_LAST,
    REDUCED,
    STEP,
    Effect,
    Effects,
    GradientShare,
    Together,
    When,
    part_of,
)
from tensoropt.costs.move_effects import Both, MoveEffects
from tensoropt.costs.parameters import OPTIMIZER_STATE, OPTIMIZER_TRANSIENT
from tensoropt.costs.prices import Prices, Send
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.blocks import Blocks, Neighbours, find_blocks
from tensoropt.sharding.buckets import reduction_axes
from tensoropt.sharding.reshard.steps import Step
from tensoropt.sharding.storage import Storage, Way, way, whole_layout
from tensoropt.sharding.strategy import made_again


class Use(NamedTuple):
    """One use of a parameter by a group.

    Attributes:
        layout: the one that the group reads.
        wanted: how often the group's backward needs the parameter, gathered.
        again: the group is recomputed.
        neighbours: the blocks beside which the parameter can be gathered; None where it is gathered at the
            use.
        last_part: the last of the parts of the group's forward.
    """

    layout: Layout
    wanted: int
    again: bool = False
    neighbours: Neighbours | None = None
    last_part: int = 0


class ParameterEffects(MoveEffects):
    """Works out what parameters do on one mesh: bytes of one rank, seconds per moment."""

    def __init__(self, prices: Prices):
        super().__init__(prices)
        self._used: dict[object, Effects] = {}

    def way(self, name: str, stored: Layout, use: Layout) -> Way:
        """From where a parameter lives to a use of it."""
        return way(self.tensors[name], stored, use, self.mesh, shared=name in self.graph.shared)

    def use_steps(self, name: str, way: Way) -> Both:
        """(forward, backward) steps of every use of a parameter."""
        return way.steps(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.learns(name))

    def casts(self, name: str) -> bool:
        """Whether the parameter is stored in another dtype than the one that its readers see."""
        return self.tensors[name].master_dtype is not None

    def with_cast(self, moved: Effect, name: str, stored: Layout) -> Effect:
        """A move with the cast of the stored shard of a parameter, either way, where there is one."""
        cast = self.prices.cast(self.tensors[name], self.elements(name, stored))
        return replace(moved, local_s=moved.local_s + cast.device_s, host_s=moved.host_s + cast.host_s)

    # -- one use ----------------------------------------------------------------------------------

    def use(self, name: str, stored: Layout, use: Use) -> Effects:
        """A parameter brought to its use and its gradient brought to where it is stored, per micro-batch.

        What was gathered or cast for forward is made anew for each time that backward needs it, unless the
        group is recomputed: then its second forward leaves it there. A copy that took less is kept.
        """
        key = name, stored, use
        if key not in self._used:
            self._used[key] = self._use(name, stored, use)
        return self._used[key]

    def goes_ahead(self, name: str, stored: Layout, use: Use) -> bool:
        """Whether a parameter is gathered ahead of a use."""
        way = self.way(name, stored, use.layout)
        sizes = self.graph.atoms.atom_sizes(name)
        if use.neighbours is None:
            return False
        return way.goes_ahead(sizes, self.mesh, learns=self.learns(name))

    def copy_goes_ahead(self, name: str, way: Way, use: Use) -> bool:
        """Whether an unsharded copy is made while the block before its use computes in the first micro-batch,
        and its gradients scattered while backward passes the next block."""
        sizes = self.graph.atoms.atom_sizes(name)
        if use.neighbours is None:
            return False
        return way.copy_goes_ahead(sizes, self.mesh, learns=self.learns(name))

    def hands_over(self, name: str, stored: Layout, use: Use) -> bool:
        """Whether the gradient of a use is scattered behind in every micro-batch, and not at the use."""
        way = self.way(name, stored, use.layout)
        copy = self.copy_goes_ahead(name, way, use) and not way.reduced_last
        return copy or self.goes_ahead(name, stored, use)

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks whose parameters are gathered together where they are gathered ahead."""
        return find_blocks(self.graph)

    def ahead_bytes(self, name: str, stored: Layout, use: Use) -> float:
        """What the search counts for a parameter that is gathered ahead: two blocks of parameters are there
        at a time, and in backward two of gradients. An average block has so much of each parameter."""
        if not self.goes_ahead(name, stored, use):
            return 0.0
        blocks = sum(last is not None for last in self.blocks.last)
        kinds = 1 + self.learns(name)
        return min(2, blocks) * kinds * self.bytes(name, use.layout) / blocks

    def _use(self, name: str, stored: Layout, use: Use) -> Effects:
        way = self.way(name, stored, use.layout)
        steps = self.use_steps(name, way)
        if self.goes_ahead(name, stored, use):
            return Effects((*self._ahead(name, stored, use, steps), *self._behind(name, stored, use, steps)))
        found: list[Effect] = []
        if self.moves_to_use(name, way):
            gather = self._gathered(name, stored, way, steps)
            found.append(gather)
            if self.training and use.again:
                found.append(replace(gather, when=GATHER_AGAIN))
            elif self.training and self.made_anew(name, way):
                # Each saved use is unpacked by itself, and so gathers anew: two uses in one backward are two
                # collectives.
                found += [replace(gather, when=GATHER_BACK)] * use.wanted
        if self.copies(name, way, use):
            size, compute = self.bytes(name, use.layout), COMPUTE_AGAIN if use.again else COMPUTE
            found.append(Effect(compute, kept=size))
            found.append(Effect(COMPUTE_BACK, after=True, kept=-size))
        if self.hands_over(name, stored, use):
            found += self._behind(name, stored, use, steps)
        elif self.learns(name) and self.casts(name) and not way.reduced_last:
            # The steps are given as the other direction too, so that no passing time is added: the cast,
            # which autograd has to pass as well, is priced with the issuing of a call by cast.
            back = self.stepped(PARAMETERS, name, steps[1], steps[1])
            found.append(self.with_cast(back, name, stored))
        elif steps[1]:
            back = self.stepped(PARAMETERS, name, steps[1], steps[0])
            found.append(replace(back, sums_passing=False))
        return Effects(tuple(found))

    def _ahead(self, name: str, stored: Layout, use: Use, steps: Both) -> list[Effect]:
        """A parameter gathered while the block before its own computes, forward and backward."""
        size = self.bytes(name, use.layout)
        narrow = self.bytes(name, stored) if self.casts(name) else 0
        moved = self.stepped(GATHER, name, steps[0], steps[0])
        # Pieces of what lies inside others are put together in a buffer of their own.
        joined = replace(moved, sends=(), workspace_bytes=self.resharding_bytes(steps[0], name) - size)
        sent = self.with_cast(self._together(BEGIN_BEFORE, name, moved.sends), name, stored)
        assert use.neighbours is not None

        def gathered(before: When, begin: When, at: When, done: When) -> list[Effect]:
            return [
                replace(sent, when=before, transient=size + narrow, workspace_bytes=narrow * before.at_once),
                *([Effect(begin, transient=-narrow)] if narrow else []),
                replace(joined, when=at),
                Effect(done, after=True, transient=-size),
            ]

        before = BEGIN_BEFORE if use.neighbours.before else BEGIN
        back_before = BACK_BEFORE if use.neighbours.behind else BACK_BEGIN
        found = gathered(before, BEGIN, GATHER, part_of(use.last_part))
        if self.training and use.again:
            # What backward wants again is left there by the second forward.
            done = COMPUTE_BACK if use.wanted else part_of(use.last_part, again=True)
            found += gathered(back_before, BACK_BEGIN, GATHER_AGAIN, done)
        elif self.training and use.wanted:
            found += gathered(back_before, BACK_BEGIN, GATHER_BACK, COMPUTE_BACK)
        return found

    def _behind(self, name: str, stored: Layout, use: Use, steps: Both) -> list[Effect]:
        """The gradient of such a use, which waits whole until backward has left the block, and is scattered
        while it passes the next."""
        if not self.learns(name):
            return []
        size, shard = self.bytes(name, use.layout), self.bytes(name, stored)
        moved = self.stepped(BACK_NEXT, name, steps[1], steps[1])
        sent = self._together(BACK_NEXT, name, moved.sends)
        sent = replace(sent, transient=shard, local_s=moved.local_s, host_s=moved.host_s)
        pieces = self.resharding_bytes(steps[1], name) - shard
        # Backward passes no block after the first one's: that is over where it is scattered.
        assert use.neighbours is not None
        left = Effect(
            BACK_LEFT,
            after=not use.neighbours.before,
            transient=-size - shard,
            workspace_bytes=shard,
            source=self.overheads_source,
        )
        return [
            Effect(PARAMETERS, transient=size),
            replace(sent, workspace_bytes=pieces),
            self.with_cast(left, name, stored),
        ]

    def _together(self, when: When, name: str, sends: tuple[Send, ...]) -> Effect:
        beside = tuple(Together(send, self.tensors[name].dtype) for send in sends)
        return Effect(when, source=self.overheads_source, beside=beside, moves=True)

    def moves_to_use(self, name: str, way: Way) -> bool:
        """Whether anything is done to bring a parameter to a use: it is moved, or cast."""
        return bool(self.use_steps(name, way)[0]) or (self.casts(name) and not way.unsharded)

    def copies(self, name: str, way: Way, use: Use) -> bool:
        """Whether backward keeps the copy that was made for a use."""
        moved = bool(self.use_steps(name, way)[0])
        return self.training and moved and use.wanted > 0 and not self.made_anew(name, way)

    def made_anew(self, name: str, way: Way) -> bool:
        """Whether backward gathers or casts a parameter again, instead of keeping what forward made."""
        return made_again(self.tensors[name], self.use_steps(name, way)[0], unsharded=way.unsharded)

    def _gathered(self, name: str, stored: Layout, way: Way, steps: Both) -> Effect:
        """A parameter brought to a use in forward: moved, and cast unless a copy was cast already."""
        moved = self.stepped(GATHER, name, steps[0], steps[0])
        return moved if way.unsharded else self.with_cast(moved, name, stored)

    # -- between uses -----------------------------------------------------------------------------

    def stored(self, name: str, stored: Layout, *, joins: bool = False, complete: When = ARRIVED) -> Effects:
        """A parameter between its uses: its bytes, its gradient's arrival, the optimizer's step.

        Autograd adds to a shared one's gradient once, when all its users' parts are there; the sum of those
        that are waits beside.

        Args:
            joins: gradients of several groups are added up.
            complete: when the gradient is where the parameter is stored (:meth:`complete`).
        """
        tensor, size = self.tensors[name], self.stored_bytes(name, stored)
        if not (self.training and tensor.requires_grad):
            return Effects((), parameters=size)
        # Stored as it is used, a gradient has nothing to wait for.
        waits = Storage.of(stored).reduced_last and complete != ARRIVED
        arrived = REDUCE_LAST if waits else ARRIVED
        axes = reduction_axes(stored, self.mesh)
        copied = bool(axes) or complete != ARRIVED
        arrival = self.prices.gradient_arrival(size, copied=copied, once=waits)
        found = []
        if joins:
            summed = self._summed_bytes(name, stored)
            found.append(Effect(FIRST_ARRIVED, after=True, transient=summed))
            found.append(Effect(ARRIVED, transient=-summed, workspace_bytes=summed))
        elements = self.elements(name, stored)
        step, source = self.prices.step(elements), self.overheads_source
        found.append(
            Effect(
                STEP,
                workspace_bytes=size * OPTIMIZER_TRANSIENT[self.prices.optimizer],
                local_s=step.device_s,
                host_s=step.host_s,
                source=source,
            )
        )
        found.append(Effect(arrived, local_s=arrival.device_s, host_s=arrival.host_s, source=source))
        if axes:
            share = GradientShare(axes, tensor.stored_dtype, elements, complete)
            found.append(Effect(REDUCED, share=share))
        state = size * OPTIMIZER_STATE[self.prices.optimizer]
        return Effects(tuple(found), size, size, state)

    def complete(self, name: str, stored: Layout, use: Use) -> When:
        """The moment, one of ``COMPLETE``, after which the gradient of a parameter used so is complete."""
        way = self.way(name, stored, use.layout)
        last = self.copy_goes_ahead(name, way, use) and self.mesh[0] > 1
        if self.hands_over(name, stored, use) or (way.reduced_last and last):
            # Of the first block when backward is over.
            return BACK_LEFT if use.neighbours and use.neighbours.before else REDUCE_LAST
        return REDUCE_LAST if way.reduced_last else ARRIVED

    def _summed_bytes(self, name: str, stored: Layout) -> int:
        """Bytes of a sum of gradients of several groups: whole ones of the copy, in its type, where they are
        reduced last; else those of the stored shard."""
        if name not in self.graph.shared:
            return self.stored_bytes(name, stored)
        way = self.way(name, stored, whole_layout(self.tensors[name], self.mesh))
        return self.bytes(name, way.source) if way.reduced_last else self.stored_bytes(name, stored)

    def unsharded(self, name: str, stored: Layout, use: Use) -> Effects:
        """The copy of a sharded parameter that stays gathered over the step: its bytes, and what is done
        once.

        The executor makes it in the next step's first micro-batch, which comes to the same as the end of this
        one: no more is alive then. The copies that go together with others are made one block ahead of their
        use there, and the gradients that waited for the last micro-batch go one block behind backward.
        """
        way = self.way(name, stored, use.layout)
        if not way.unsharded:
            return Effects(())
        size = self.bytes(name, way.source)
        once = way.once(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.learns(name))
        ahead = self.copy_goes_ahead(name, way, use)
        neighbours = use.neighbours if ahead else None
        found = self._copied(name, way, once[0], neighbours)
        if not way.reduced_last:
            return Effects(tuple(found), parameters=size)
        # In one micro-batch nothing waits: what is reduced last is so when backward is over.
        found += self._reduced_last(name, way, once[1], neighbours if self.mesh[0] > 1 else None)
        # Each micro-batch adds its gradient to the one that waits, in the type in which that is stored.
        waiting = self.stored_bytes(name, way.source)
        add_s = waiting * self.prices.overheads.add_s_per_byte * self.mesh[0]
        found.append(Effect(REDUCE_LAST, local_s=add_s, source=self.overheads_source))
        return Effects(tuple(found), parameters=size, gradients=waiting)

    def _copied(
        self, name: str, way: Way, steps: Sequence[Step], neighbours: Neighbours | None
    ) -> list[Effect]:
        """The making of an unsharded copy, which counts as a parameter all through the step.

        Args:
            neighbours: of the block for which it is made together with others; None where it is made alone.
        """
        narrow = self.bytes(name, way.shard) if self.casts(name) else 0
        buffers = max(self.resharding_bytes(steps, name) - self.bytes(name, way.source), 0)
        gather = self.stepped(GATHER_ONCE, name, steps, steps, workspace_bytes=buffers + narrow)
        gather = self.with_cast(gather, name, way.shard)
        if neighbours is None:
            return [gather]
        before = FIRST_BEFORE if neighbours.before else FIRST_BEGIN
        sent = self._together(before, name, gather.sends)
        return [
            replace(gather, sends=(), workspace_bytes=0),
            replace(sent, transient=narrow, workspace_bytes=narrow * before.at_once),
            Effect(FIRST_BEGIN, transient=-narrow, workspace_bytes=buffers),
        ]

    def _reduced_last(
        self, name: str, way: Way, steps: Sequence[Step], neighbours: Neighbours | None
    ) -> list[Effect]:
        """The reduction of the gradient that waited beside a copy, sent in the type that readers see;
        likewise."""
        # What is sent of a wide sum is cast first.
        narrow = self.bytes(name, way.source) if self.casts(name) else 0
        buffers = self.resharding_bytes(steps, name)
        reduce = self.stepped(REDUCE_LAST, name, steps, steps, workspace_bytes=buffers + narrow)
        reduce = self.with_cast(self.with_cast(reduce, name, way.source), name, way.shard)
        if neighbours is None:
            return [reduce]
        shard = self.bytes(name, way.shard)
        # The pieces that are sent are copies of what waits; of a cast one they take the place.
        pieces, sent = buffers - shard, self._together(LAST_NEXT, name, reduce.sends)
        stays = shard if narrow else buffers
        return [
            replace(reduce, sends=(), workspace_bytes=0),
            *([Effect(PARAMETERS, transient=narrow)] if narrow else []),
            replace(sent, transient=stays, workspace_bytes=pieces if narrow else 0),
            Effect(LAST_LEFT, after=not neighbours.before, transient=-stays - narrow, workspace_bytes=shard),
        ]

    def waiting_bytes(self, uses: Mapping[str, tuple[Layout, Layout]]) -> dict[str, int]:
        """Bytes of the gradients of parameters, each (stored, used so), that have to move, or to be cast, to
        where their parameters are stored."""
        found = {}
        for name, (stored, use) in uses.items():
            steps = self.use_steps(name, self.way(name, stored, use))[1]
            # One that is reduced last is added to the others as soon as it is there.
            way = self.way(name, stored, use)
            if self.learns(name) and (steps or (self.casts(name) and not way.reduced_last)):
                found[name] = self.bytes(name, use)
        return found
