"""The storage of parameters between steps, and the way from there to a use.

A parameter that is stored sharded can be gathered for each use (ZeRO stage 3), or once per step after the
optimizer has changed it: then an unsharded copy serves all micro-batches, forward and backward. Its gradient
is reduced in every micro-batch (reduce-scattered, stage 2), or stays whole with the copy until the last one
(stage 1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import NamedTuple

from tensoropt.graph import Tensor
from tensoropt.ops.index_space import canonical
from tensoropt.ops.layouts import (
    GATHERED_AHEAD,
    GATHERED_ONCE,
    PARTIAL,
    PARTIAL_GRAD,
    REDUCED_LAST,
    REPLICATE,
    Layout,
    placement_name,
)
from tensoropt.sharding.reshard.steps import ReshardingStep, StepKind, edge_steps, forward_placements


class UsePlace(NamedTuple):
    """One use of a parameter, as the other uses see it.

    Attributes:
        block: the block that contains it.
        layout: the layout that the group reads.
        again: the group is recomputed, with the rest of its region.
        wanted: backward needs the parameter.
        ahead: it is gathered ahead.
        behind: its gradient is scattered behind.
        learns: it has a gradient.
    """

    block: int
    layout: Layout
    again: bool
    wanted: bool
    ahead: bool
    behind: bool
    learns: bool = True


class Turn(NamedTuple):
    """The part that falls to one use of what several uses share.

    Attributes:
        gathers, frees: it is the first, or the last, of its block in forward.
        frees_again: it is the last in the second forward of a recomputed block, which keeps nothing for
            backward.
        gathers_back, frees_back: it is the first, or the last, that needs the parameter in the block's
            backward.
        before: the number of gradients in the sum when its own arrives.
        scatters: its own is the last.
    """

    gathers: bool = True
    frees: bool = True
    frees_again: bool = True
    gathers_back: bool = True
    frees_back: bool = True
    before: int = 0
    scatters: bool = True


def alone(*, wanted: bool) -> Turn:
    """Return the turn of a use that is the only one."""
    return Turn(frees_again=not wanted, gathers_back=wanted, frees_back=wanted)


def turns(uses: Sequence[UsePlace]) -> list[Turn]:
    """Return the part that falls to each of a parameter's uses.

    Args:
        uses: in execution order; backward reaches them in reverse.
    """
    gathered: dict[Hashable, list[int]] = {}
    summed: dict[Hashable, list[int]] = {}
    for number, use in enumerate(uses):
        if use.ahead:
            gathered.setdefault((use.block, use.layout, use.again, use.learns), []).append(number)
        if use.behind:
            summed.setdefault(use.layout, []).append(number)
    shares = [alone(wanted=use.wanted) for use in uses]
    for members in gathered.values():
        wanting = [number for number in members if uses[number].wanted]
        for number in members:
            shares[number] = shares[number]._replace(
                gathers=number == members[0],
                frees=number == members[-1],
                frees_again=number == members[-1] and not wanting,
                gathers_back=number in wanting[-1:],
                frees_back=number in wanting[:1],
            )
    for members in summed.values():
        for before, number in enumerate(reversed(members)):
            shares[number] = shares[number]._replace(before=before, scatters=number == members[0])
    return shares


_Both = tuple[tuple[ReshardingStep, ...], tuple[ReshardingStep, ...]]
"""(forward, backward) steps."""


class Gather(Enum):
    """The times at which a parameter that is stored sharded is gathered."""

    EACH_USE = "each use"
    AHEAD = "ahead of each use"
    ONCE = "once per step"


class Reduce(Enum):
    """The times at which a gradient is brought to where its parameter is stored."""

    EACH_MICRO_BATCH = "each micro-batch"
    LAST_MICRO_BATCH = "last micro-batch"


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of a parameter.

    Strategies, plans and cost tables keep it as one :data:`Layout` (:attr:`stored`), in which the micro-batch
    axis says how often it is gathered and reduced. No parameter is split on that axis, so its code is free
    for this purpose. Only this module reads and writes that code.

    Attributes:
        layout: the placement of its shards. If it is gathered once per step or ahead, the micro-batch axis is
            ``REPLICATE``: whether gradients add up over that axis depends on the unsharded copy, or on the
            use.
        gather: how often it is gathered.
        reduce: how often its gradient is reduced; in each micro-batch, unless an unsharded copy waits for it.
    """

    layout: Layout
    gather: Gather = Gather.EACH_USE
    reduce: Reduce = Reduce.EACH_MICRO_BATCH

    def __post_init__(self) -> None:
        if self.gather is not Gather.ONCE and self.reduce is Reduce.LAST_MICRO_BATCH:
            raise ValueError("a gradient waits for the last micro-batch beside a copy that is gathered once")

    @classmethod
    def of(cls, stored: Layout) -> Storage:
        """Inverse of :attr:`stored`."""
        return _storage(stored)

    @property
    def stored(self) -> Layout:
        """The layout under which strategies, plans and cost tables keep it."""
        if self.gather is Gather.EACH_USE:
            return self.layout
        if self.gather is Gather.AHEAD:
            return (GATHERED_AHEAD, *self.layout[1:])
        last = self.reduce is Reduce.LAST_MICRO_BATCH
        return (REDUCED_LAST if last else GATHERED_ONCE, *self.layout[1:])

    @property
    def is_plain(self) -> bool:
        """Whether it is gathered for each use, at the use itself."""
        return self.gather is Gather.EACH_USE

    @property
    def gathered_once(self) -> bool:
        """Whether an unsharded copy serves the whole step."""
        return self.gather is Gather.ONCE

    @property
    def gathered_ahead(self) -> bool:
        """Whether it is gathered for each use while the block before computes."""
        return self.gather is Gather.AHEAD

    @property
    def reduced_last(self) -> bool:
        """Whether the gradient stays with the unsharded copy until the last micro-batch."""
        return self.reduce is Reduce.LAST_MICRO_BATCH


_ONCE = {GATHERED_ONCE: Reduce.EACH_MICRO_BATCH, REDUCED_LAST: Reduce.LAST_MICRO_BATCH}


# Pricing queries the same few layouts a million times.
@lru_cache(maxsize=1 << 16)
def _storage(stored: Layout) -> Storage:
    if stored[0] == GATHERED_AHEAD:
        return Storage((REPLICATE, *stored[1:]), Gather.AHEAD)
    if stored[0] not in _ONCE:
        return Storage(stored)
    return Storage((REPLICATE, *stored[1:]), Gather.ONCE, _ONCE[stored[0]])


@dataclass(frozen=True, slots=True)
class Way:
    """The way from a parameter's storage to one use of it, and the way back of its gradient.

    Attributes:
        shard: the layout of the shard that the optimizer changes.
        source: the layout from which a use starts: that of the shard, or of the unsharded copy.
        use: the layout that the group reads.
        back: the destination of a use's gradient in every micro-batch: the shard, or the unsharded copy.
        ahead: the parameter, or the unsharded copy, is meant to be gathered ahead of the use, if
            :meth:`goes_ahead` or :meth:`copy_goes_ahead` says so; its gradient is scattered behind if
            :meth:`goes_behind` says so.
    """

    shard: Layout
    source: Layout
    use: Layout
    back: Layout
    ahead: bool = False

    @property
    def unsharded(self) -> bool:
        """Whether a use starts from an unsharded copy, for which nothing has to be gathered or cast."""
        return self.source != self.shard

    @property
    def reduced_last(self) -> bool:
        """Whether the gradient stays with the unsharded copy until the last micro-batch."""
        return self.unsharded and self.back == self.source

    def steps(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> _Both:
        """Return the steps of every use; no backward steps without a gradient."""
        forward = edge_steps(atoms, mesh, self.source, self.use)[0] if self.source != self.use else ()
        # Not the backward of the way forward: with an unsharded copy, the value comes from the copy and the
        # gradient may go to the shard.
        backward = edge_steps(atoms, mesh, self.back, self.use)[1] if self.back != self.use else ()
        return forward, backward if learns else ()

    def goes_ahead(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> bool:
        """Return whether a use is gathered ahead: one all-gather brings the parameter, one reduce-scatter its
        gradient back, and both can be combined with those of other parameters. All other ways stay unchanged.
        """
        if not self.ahead or self.unsharded:
            return False
        forward, backward = self.steps(atoms, mesh, learns=learns)
        back = _is_one("reduce_scatter", backward, atoms, mesh) if learns else not backward
        return back and _is_one("all_gather", forward, atoms, mesh)

    def copy_goes_ahead(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> bool:
        """Return whether an unsharded copy is gathered ahead of its first use in the first micro-batch, under
        the same conditions; a gradient that waits with it is then scattered behind in the last one."""
        if not self.ahead or not self.unsharded:
            return False
        forward, last = self.once(atoms, mesh, learns=learns)
        back = not last or _is_one("reduce_scatter", last, atoms, mesh)
        return back and _is_one("all_gather", forward, atoms, mesh)

    def goes_behind(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> bool:
        """Return whether the gradient of a use is scattered behind in every micro-batch."""
        if not learns or self.reduced_last:
            return False
        if not self.unsharded:
            return self.goes_ahead(atoms, mesh, learns=learns)
        backward = self.steps(atoms, mesh, learns=learns)[1]
        return self.ahead and _is_one("reduce_scatter", backward, atoms, mesh)

    def once(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> _Both:
        """Return the steps of an unsharded copy that run once per step: its gathering, and the reduction of a
        gradient that stayed with it."""
        if not self.unsharded:
            return (), ()
        forward, backward = edge_steps(atoms, mesh, self.shard, self.source)
        return forward, backward if learns and self.reduced_last else ()


def _is_one(
    kind: StepKind, steps: Sequence[ReshardingStep], atoms: tuple[int, ...], mesh: tuple[int, ...]
) -> bool:
    """Return whether a single collective of this kind is the whole way. Shards are even, or a single axis has
    cut them, so that only the last ones are smaller: these are sent with padding."""
    if [step.kind for step in steps] != [kind]:
        return False
    (step,) = steps
    # Axes with one rank send nothing.
    if prod(mesh[axis] for axis in step.axes) == 1:
        return False
    whole = step.after if kind == "all_gather" else step.before
    return step.payload(mesh) == prod(whole) or (len(step.axes) == 1 and whole[step.atom] == atoms[step.atom])


def stored_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return the words that people see for a stored layout, given by its names: one per mesh axis, followed
    by ``held`` or ``held/P`` if an unsharded copy serves the whole step, or ``ahead`` if it is gathered ahead
    of its uses."""
    shown = tuple(map(placement_name, (*_ONCE, GATHERED_AHEAD)))
    return (*names[1:], *(name for name in names[:1] if name in shown))


def stored_layout(tensor: Tensor, use: Layout) -> Layout:
    """Return the stored layout of a parameter for which nothing is gathered: that of its use.

    A bias that enters a contraction as ``P/R`` is stored whole and masked where it is used.
    """
    return tuple(canonical(tensor, REPLICATE if code == PARTIAL else code) for code in use)


def whole_layout(tensor: Tensor, mesh: tuple[int, ...]) -> Layout:
    """Return the layout of a parameter that is whole on every device, with its gradient a sum over all: that
    of a copy that several groups share."""
    return stored_layout(tensor, tuple(PARTIAL_GRAD if size > 1 else REPLICATE for size in mesh))


def way(tensor: Tensor, stored: Layout, use: Layout, mesh: tuple[int, ...], *, shared: bool) -> Way:
    """Return the way of a parameter with this storage to a use.

    An unsharded copy has the layout in which its only reader would have the parameter stored, or is whole if
    it has several. A parameter that already has that layout needs no copy.
    """
    storage = Storage.of(stored)
    if storage.gathered_ahead:
        shard = (stored_layout(tensor, use)[0], *stored[1:])
        return Way(shard, shard, use, shard, ahead=True)
    if not storage.gathered_once:
        return Way(stored, stored, use, stored)
    copy = whole_layout(tensor, mesh) if shared else stored_layout(tensor, use)
    # The code occupied the micro-batch axis of `stored`; whether gradients add up over that axis is taken
    # from the copy.
    shard = (copy[0], *stored[1:])
    # Gradient placements may still differ; the edge to the use handles them, without a copy.
    if forward_placements(copy) == forward_placements(shard):
        return Way(shard, shard, use, shard)
    return Way(shard, copy, use, copy if storage.reduced_last else shard, ahead=True)
