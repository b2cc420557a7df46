"""The effects of a parameter in a step: it is stored between steps, brought to its uses, and its gradient
returns.

Sharded storage (ZeRO, Rajbhandari et al., arXiv 1910.02054) is a choice that no neighbour sees: the parameter
is gathered for each use (stage 3), or once per step, with gradients reduced in every micro-batch (stage 2) or
once (stage 1).

Parameters gathered together with others ahead of their use, and gradients that are scattered behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
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
    SharedCollective,
    When,
    part_of,
)
from tensoropt.costs.move_effects import Both, MoveEffects
from tensoropt.costs.prices import Prices, Send
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.sharding.buckets import reduction_axes
from tensoropt.sharding.regions import Blocks, Neighbours, find_blocks
from tensoropt.sharding.reshard.steps import Step, lies_inside
from tensoropt.sharding.storage import Storage, Turn, Way, alone, way, whole_layout
from tensoropt.sharding.strategy import made_again


class Use(NamedTuple):
    """One use of a parameter by a group.

    Attributes:
        layout: the layout that the group reads.
        wanted: how often the group's backward needs the gathered parameter.
        again: the group is recomputed.
        neighbours: the blocks with which gathering the parameter can overlap; None if it is gathered at the
            use.
        last_part: the last part of the group's forward.
        turn: for a parameter that several groups use, the part of its gathering, and of the sum of its
            gradients, that falls to this use; None if it shares nothing.
        learns: whether the group gives the parameter a gradient, if it is trained.
    """

    layout: Layout
    wanted: int
    again: bool = False
    neighbours: Neighbours | None = None
    last_part: int = 0
    turn: Turn | None = None
    learns: bool = True

    @property
    def own(self) -> Turn:
        """The part that falls to this use."""
        return alone(wanted=self.wanted > 0) if self.turn is None else self.turn


class _Flat(NamedTuple):
    """The share of a gradient that is sent, or of a parameter that arrives, in a collective with others.

    Attributes:
        bytes: of all pieces, with smaller ones padded.
        copied: whether the pieces are copied into or out of the whole; otherwise they are the whole.
    """

    bytes: int
    copied: bool


class _TogetherEffects(MoveEffects):
    """The effects on one mesh of parameters that are gathered together with others."""

    def way(self, name: str, stored: Layout, use: Layout) -> Way:
        """The way from a parameter's storage to a use of it."""
        return way(self.tensors[name], stored, use, self.mesh, shared=name in self.graph.shared)

    def use_steps(self, name: str, way: Way, use: Use) -> Both:
        """The (forward, backward) steps of a use of a parameter."""
        return way.steps(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.gives(name, use))

    def gives(self, name: str, use: Use) -> bool:
        """Whether a use gives the parameter a gradient."""
        return use.learns and self.learns(name)

    def casts(self, name: str) -> bool:
        """Whether the parameter is stored in a dtype that differs from the one its readers see."""
        return self.tensors[name].master_dtype is not None

    def with_cast(self, moved: Effect, name: str, stored: Layout) -> Effect:
        """A move with the cast of a parameter's stored shard, in either direction, if there is one."""
        cast = self.prices.cast(self.tensors[name], self.elements(name, stored))
        return replace(moved, local_s=moved.local_s + cast.device_s, host_s=moved.host_s + cast.host_s)

    def goes_ahead(self, name: str, stored: Layout, use: Use) -> bool:
        """Whether a parameter is gathered ahead of a use."""
        way = self.way(name, stored, use.layout)
        sizes = self.graph.atoms.atom_sizes(name)
        if use.neighbours is None:
            return False
        return way.goes_ahead(sizes, self.mesh, learns=self.gives(name, use))

    def copy_goes_ahead(self, name: str, way: Way, use: Use) -> bool:
        """Whether an unsharded copy is made while the block before its first use computes in the first
        micro-batch, and the gradient that waits with it is scattered while backward passes the next block."""
        sizes = self.graph.atoms.atom_sizes(name)
        if use.neighbours is None:
            return False
        return way.copy_goes_ahead(sizes, self.mesh, learns=self.learns(name))

    def hands_over(self, name: str, stored: Layout, use: Use) -> bool:
        """Whether the gradient of a use is scattered behind in every micro-batch, and not at the use."""
        sizes = self.graph.atoms.atom_sizes(name)
        if use.neighbours is None:
            return False
        return self.way(name, stored, use.layout).goes_behind(sizes, self.mesh, learns=self.gives(name, use))

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks whose parameters are gathered together if they are gathered ahead."""
        return find_blocks(self.graph)

    def ahead_bytes(self, name: str, stored: Layout, use: Use) -> float:
        """The bytes that the search counts for a parameter that is gathered ahead: two blocks of parameters
        are alive at a time, and in backward two of gradients. The search assumes an average block's share of
        each parameter."""
        if not self.goes_ahead(name, stored, use):
            return 0.0
        blocks = sum(last is not None for last in self.blocks.last)
        kinds = 1 + self.gives(name, use)
        return min(2, blocks) * kinds * self.bytes(name, use.layout) / blocks

    def gathered_ahead(self, name: str, stored: Layout, use: Use, steps: Both) -> list[Effect]:
        """Effects of gathering a parameter while the block before its own computes, forward and backward."""
        flat, narrow = self._flat(name, steps[0]), self.bytes(name, stored) if self.casts(name) else 0
        size = self.bytes(name, use.layout) if flat.copied else flat.bytes
        moved = self.stepped(GATHER, name, steps[0], steps[0])
        # Pieces that lie inside others are joined in a separate buffer.
        buffer = flat.bytes * flat.copied
        joined = replace(moved, sends=(), transient=size - flat.bytes, workspace_bytes=buffer)
        sent = self.with_cast(self._together(BEGIN_BEFORE, name, moved.sends), name, stored)
        issued = replace(sent, transient=flat.bytes + narrow)
        assert use.neighbours is not None

        def gathered(before: When, begin: When, at: When) -> list[Effect]:
            return [
                replace(issued, when=before, workspace_bytes=narrow * before.at_once),
                *([Effect(begin, transient=-narrow)] if narrow else []),
                replace(joined, when=at),
            ]

        before = BEGIN_BEFORE if use.neighbours.before else BEGIN
        back_before = BACK_BEFORE if use.neighbours.behind else BACK_BEGIN
        own, found = use.own, []
        if own.gathers:
            found += gathered(before, BEGIN, GATHER)
        if own.frees:
            found.append(Effect(part_of(use.last_part), after=True, transient=-size))
        if not self.training:
            return found
        if use.again:
            if own.gathers:
                found += gathered(back_before, BACK_BEGIN, GATHER_AGAIN)
            # The second forward leaves in place what backward needs a second time.
            if own.frees_again:
                found.append(Effect(part_of(use.last_part, again=True), after=True, transient=-size))
        elif own.gathers_back:
            found += gathered(back_before, BACK_BEGIN, GATHER_BACK)
        if own.frees_back:
            found.append(Effect(COMPUTE_BACK, after=True, transient=-size))
        return found

    def scattered_behind(self, name: str, stored: Layout, use: Use, steps: Both) -> list[Effect]:
        """The effects of such a use's gradient, which waits whole until backward has left the block, and is
        scattered while it passes the next. The gradient of one of several uses is added to what waits, and
        the last use's block counts."""
        if not self.gives(name, use):
            return []
        own, size = use.own, self.bytes(name, use.layout)
        waits = Effect(PARAMETERS, transient=size)
        if own.before:
            # The first two are added into a new tensor, the others into that one.
            buffers, add_s = size * (2 if own.before == 1 else 1), size * self.prices.overheads.add_s_per_byte
            source = self.overheads_source
            waits = Effect(PARAMETERS, workspace_bytes=buffers, local_s=add_s, source=source)
        if not own.scatters:
            return [waits]
        return [waits, *self._scattered(name, stored, use, steps)]

    def _scattered(self, name: str, stored: Layout, use: Use, steps: Both) -> list[Effect]:
        size, shard = self.bytes(name, use.layout), self.bytes(name, stored)
        flat = self._flat(name, steps[1])
        # Pieces that are copies replace the gradient.
        sending = flat.bytes if flat.copied else size
        moved = self.stepped(BACK_NEXT, name, steps[1], steps[1])
        sent = self._together(BACK_NEXT, name, moved.sends)
        sent = replace(sent, transient=sending - size + shard, local_s=moved.local_s, host_s=moved.host_s)
        # After the first block, backward passes no further block: it is over where the gradient is scattered.
        assert use.neighbours is not None
        left = Effect(
            BACK_LEFT,
            after=not use.neighbours.before,
            transient=-sending - shard,
            workspace_bytes=shard,
            source=self.overheads_source,
        )
        return [
            # They are made before there is a shard.
            replace(sent, workspace_bytes=max(size - shard, 0) * flat.copied),
            self.with_cast(left, name, stored),
        ]

    def _together(self, when: When, name: str, sends: tuple[Send, ...], *, stays: bool = False) -> Effect:
        beside = tuple(SharedCollective(send, self.tensors[name].dtype, stays) for send in sends)
        return Effect(when, source=self.overheads_source, beside=beside, moves=True)

    def _flat(self, name: str, steps: Sequence[Step]) -> _Flat:
        """The part of a parameter that one step sends, or receives, together with others."""
        (step,) = steps
        sent, whole = step.payload(self.mesh), max(prod(step.before), prod(step.after))
        inside = lies_inside(step.before, step.atom)
        # The padding of gathered pieces lies behind them, unless they lie inside others.
        copied = inside or (step.kind == "reduce_scatter" and sent != whole)
        return _Flat(sent * self.tensors[name].element_bytes, copied)

    def copy_bytes(self, name: str, way: Way, steps: Sequence[Step], *, together: bool) -> int:
        """The bytes of an unsharded copy; it stays as it arrives, including padding, if it is gathered
        together with others and its pieces are contiguous."""
        if together and not (flat := self._flat(name, steps)).copied:
            return flat.bytes
        return self.bytes(name, way.source)

    def copied_once(
        self, name: str, way: Way, steps: Sequence[Step], neighbours: Neighbours | None
    ) -> list[Effect]:
        """The effects of making an unsharded copy, which counts as a parameter during the whole step.

        Args:
            neighbours: those of the block for which it is made together with others; None if it is made
                alone.
        """
        narrow = self.bytes(name, way.shard) if self.casts(name) else 0
        size = self.bytes(name, way.source)
        buffers = max(self.resharding_bytes(steps, name) - size, 0)
        gather = self.stepped(GATHER_ONCE, name, steps, steps, workspace_bytes=buffers + narrow)
        gather = self.with_cast(gather, name, way.shard)
        if neighbours is None:
            return [gather]
        flat = self._flat(name, steps)
        # What waits is initially as it arrives, with padding.
        padding, joining = (flat.bytes - size, flat.bytes) if flat.copied else (0, 0)
        before = FIRST_BEFORE if neighbours.before else FIRST_BEGIN
        sent = self._together(before, name, gather.sends)
        return [
            replace(gather, sends=(), workspace_bytes=0),
            replace(sent, transient=narrow + padding, workspace_bytes=narrow * before.at_once),
            Effect(FIRST_BEGIN, transient=-narrow - padding, workspace_bytes=joining),
        ]

    def reduced_once(
        self, name: str, way: Way, steps: Sequence[Step], neighbours: Neighbours | None
    ) -> list[Effect]:
        """The effects of reducing the gradient that waited with a copy, sent in the type that readers see;
        ``neighbours`` as above."""
        # The part of a wide sum that is sent is cast first.
        narrow = self.bytes(name, way.source) if self.casts(name) else 0
        buffers = self.resharding_bytes(steps, name)
        reduce = self.stepped(REDUCE_LAST, name, steps, steps, workspace_bytes=buffers + narrow)
        reduce = self.with_cast(self.with_cast(reduce, name, way.source), name, way.shard)
        if neighbours is None:
            return [reduce]
        shard, flat = self.bytes(name, way.shard), self._flat(name, steps)
        # The pieces that are sent are copies of what waits; if it is cast, they replace the cast copy.
        pieces = flat.bytes * flat.copied
        sent = self._together(LAST_NEXT, name, reduce.sends, stays=not (narrow or flat.copied))
        stays = shard + (pieces - narrow if narrow and pieces else pieces)
        return [
            replace(reduce, sends=(), workspace_bytes=0),
            *([Effect(PARAMETERS, transient=narrow)] if narrow else []),
            replace(sent, transient=stays, workspace_bytes=narrow * flat.copied),
            Effect(LAST_LEFT, after=not neighbours.before, transient=-stays - narrow, workspace_bytes=shard),
        ]


class ParameterEffects(_TogetherEffects):
    """Derives the effects of parameters on one mesh: bytes of one rank, seconds per moment."""

    def __init__(self, prices: Prices):
        super().__init__(prices)
        self._used: dict[object, Effects] = {}

    # -- one use ----------------------------------------------------------------------------------

    def use(self, name: str, stored: Layout, use: Use) -> Effects:
        """The effects of bringing a parameter to its use and its gradient back to where it is stored, per
        micro-batch.

        A parameter that was gathered or cast for forward is gathered or cast anew each time backward needs
        it, unless the group is recomputed: then its second forward leaves it in place. A copy that took less
        work is kept.
        """
        key = name, stored, use
        if key not in self._used:
            self._used[key] = self._use(name, stored, use)
        return self._used[key]

    def _use(self, name: str, stored: Layout, use: Use) -> Effects:
        way = self.way(name, stored, use.layout)
        steps = self.use_steps(name, way, use)
        if self.goes_ahead(name, stored, use):
            return Effects(
                (
                    *self.gathered_ahead(name, stored, use, steps),
                    *self.scattered_behind(name, stored, use, steps),
                )
            )
        found: list[Effect] = []
        if self.moves_to_use(name, way, use):
            gather = self._gathered(name, stored, way, steps)
            found.append(gather)
            if self.training and use.again:
                found.append(replace(gather, when=GATHER_AGAIN))
            elif self.training and self.made_anew(name, way, use):
                # Each saved use is unpacked, and therefore gathered, separately: two uses in one backward are
                # two collectives.
                found += [replace(gather, when=GATHER_BACK)] * use.wanted
        if self.copies(name, way, use):
            size, compute = self.bytes(name, use.layout), COMPUTE_AGAIN if use.again else COMPUTE
            found.append(Effect(compute, kept=size))
            found.append(Effect(COMPUTE_BACK, after=True, kept=-size))
        if self.hands_over(name, stored, use):
            found += self.scattered_behind(name, stored, use, steps)
        elif self.gives(name, use) and self.casts(name) and not way.reduced_last:
            # The steps are passed as the other direction too, so that no passing time is added: the cast,
            # which autograd also has to pass, is priced with the issuing of a call by cast.
            back = self.stepped(PARAMETERS, name, steps[1], steps[1])
            found.append(self.with_cast(back, name, stored))
        elif steps[1]:
            back = self.stepped(PARAMETERS, name, steps[1], steps[0])
            found.append(replace(back, sums_passing=False))
        return Effects(tuple(found))

    def moves_to_use(self, name: str, way: Way, use: Use) -> bool:
        """Whether bringing a parameter to a use takes any work: a move or a cast."""
        return bool(self.use_steps(name, way, use)[0]) or (self.casts(name) and not way.unsharded)

    def copies(self, name: str, way: Way, use: Use) -> bool:
        """Whether backward keeps the copy that was made for a use."""
        moved = bool(self.use_steps(name, way, use)[0])
        return self.training and moved and use.wanted > 0 and not self.made_anew(name, way, use)

    def made_anew(self, name: str, way: Way, use: Use) -> bool:
        """Whether backward gathers or casts a parameter a second time, instead of keeping what forward
        made."""
        return made_again(self.tensors[name], self.use_steps(name, way, use)[0], unsharded=way.unsharded)

    def _gathered(self, name: str, stored: Layout, way: Way, steps: Both) -> Effect:
        """The gathering of a parameter for a use in forward: it is moved, and cast unless a copy was already
        cast."""
        moved = self.stepped(GATHER, name, steps[0], steps[0])
        return moved if way.unsharded else self.with_cast(moved, name, stored)

    # -- between uses -----------------------------------------------------------------------------

    def stored(self, name: str, stored: Layout, *, joins: bool = False, complete: When = ARRIVED) -> Effects:
        """Effects of a parameter between its uses: its bytes, its gradient's arrival, the optimizer's step.

        Autograd adds to a shared parameter's gradient once, when the parts of all its users have arrived;
        until then, the sum of those that have arrived waits.

        Args:
            joins: gradients of several groups are added up.
            complete: the moment when the gradient is where the parameter is stored (:meth:`complete`).
        """
        tensor, size = self.tensors[name], self.stored_bytes(name, stored)
        if not (self.training and tensor.requires_grad):
            return Effects((), parameters=size)
        # If the parameter is stored as it is used, its gradient has nothing to wait for.
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
                workspace_bytes=size * OPTIMIZERS[self.prices.optimizer].transient,
                local_s=step.device_s,
                host_s=step.host_s,
                source=source,
            )
        )
        found.append(Effect(arrived, local_s=arrival.device_s, host_s=arrival.host_s, source=source))
        if axes:
            share = GradientShare(axes, tensor.stored_dtype, elements, complete)
            found.append(Effect(REDUCED, share=share))
        state = size * OPTIMIZERS[self.prices.optimizer].state
        return Effects(tuple(found), size, size, state)

    def complete(self, name: str, stored: Layout, use: Use) -> When:
        """Moment, one of ``COMPLETE``, after which the gradient of a parameter with this use is complete."""
        way = self.way(name, stored, use.layout)
        last = self.copy_goes_ahead(name, way, use) and self.mesh[0] > 1
        if self.hands_over(name, stored, use) or (way.reduced_last and last):
            # For the first block, when backward is over.
            return BACK_LEFT if use.neighbours and use.neighbours.before else REDUCE_LAST
        return REDUCE_LAST if way.reduced_last else ARRIVED

    def _summed_bytes(self, name: str, stored: Layout) -> int:
        """The bytes of a sum of gradients of several groups: whole gradients of the copy, in its type, if
        they are reduced last; otherwise those of the stored shard."""
        if name not in self.graph.shared:
            return self.stored_bytes(name, stored)
        way = self.way(name, stored, whole_layout(self.tensors[name], self.mesh))
        return self.bytes(name, way.source) if way.reduced_last else self.stored_bytes(name, stored)

    def unsharded(self, name: str, stored: Layout, use: Use) -> Effects:
        """The copy of a sharded parameter that stays gathered over the step: its bytes, and the work that is
        done once.

        The executor makes the copy in the next step's first micro-batch, which is equivalent to the end of
        this step, because no more is alive then. Copies that are gathered together with others are made one
        block ahead of their use there, and the gradients that waited for the last micro-batch are sent one
        block behind backward.
        """
        way = self.way(name, stored, use.layout)
        if not way.unsharded:
            return Effects(())
        once = way.once(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.learns(name))
        ahead = self.copy_goes_ahead(name, way, use)
        neighbours = use.neighbours if ahead else None
        size = self.copy_bytes(name, way, once[0], together=ahead)
        found = self.copied_once(name, way, once[0], neighbours)
        if not way.reduced_last:
            return Effects(tuple(found), parameters=size)
        # With one micro-batch nothing waits: a gradient that is reduced last is reduced when backward is
        # over.
        found += self.reduced_once(name, way, once[1], neighbours if self.mesh[0] > 1 else None)
        # Each micro-batch adds its gradient to the one that waits, in the type in which that is stored.
        waiting = self.stored_bytes(name, way.source)
        add_s = waiting * self.prices.overheads.add_s_per_byte * self.mesh[0]
        found.append(Effect(REDUCE_LAST, local_s=add_s, source=self.overheads_source))
        return Effects(tuple(found), parameters=size, gradients=waiting)

    def waiting_bytes(self, uses: Mapping[str, tuple[Layout, Use]]) -> dict[str, int]:
        """The bytes of those gradients that have to move, or to be cast, to where their parameters are
        stored; ``uses`` gives each parameter's storage and use."""
        found = {}
        for name, (stored, use) in uses.items():
            # A gradient that is reduced last is added to the others as soon as it exists.
            way = self.way(name, stored, use.layout)
            steps = self.use_steps(name, way, use)[1]
            if self.gives(name, use) and (steps or (self.casts(name) and not way.reduced_last)):
                found[name] = self.bytes(name, use.layout)
        return found
