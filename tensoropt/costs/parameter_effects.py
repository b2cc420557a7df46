"""The effects of a parameter in a step: it is stored between steps, brought to its uses, and its gradient
returns.

Sharded storage (ZeRO, Rajbhandari et al., arXiv 1910.02054) is a choice that no neighbour sees: the parameter
is gathered for each use (stage 3), or once per step, with gradients reduced in every micro-batch (stage 2) or
once (stage 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tensoropt.costs.effects import (
    ARRIVED,
    BACK_LEFT,
    COMPUTE,
    COMPUTE_AGAIN,
    COMPUTE_BACK,
    FIRST_ARRIVED,
    GATHER,
    GATHER_AGAIN,
    GATHER_BACK,
    PARAMETERS,
    REDUCE_LAST,
    REDUCED,
    STEP,
    Effect,
    Effects,
    GradientShare,
    When,
)
from tensoropt.costs.move_effects import Both
from tensoropt.costs.prices import Prices
from tensoropt.costs.together_effects import TogetherEffects, Use
from tensoropt.ops.layouts import Layout
from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.sharding.buckets import reduction_axes
from tensoropt.sharding.storage import Storage, Way, whole_layout
from tensoropt.sharding.strategy import made_again


class ParameterEffects(TogetherEffects):
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
