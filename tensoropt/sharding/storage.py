"""How parameters are stored between steps, and resharded for the groups that use them.

A sharded parameter is gathered for each use (ZeRO-3), or once per step as an unsharded copy for all
micro-batches, with its gradient reduced in every micro-batch (ZeRO-2) or in the last one (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import NamedTuple

from tensoropt.graph import Tensor
from tensoropt.ops import layouts
from tensoropt.ops.index_space import canonical
from tensoropt.sharding.reshard.steps import ReshardingStep, StepKind, edge_steps, forward_placements


class UsePlace(NamedTuple):
    """The properties of a parameter's use that decide which gathers it shares with others (:func:`turns`).

    Attributes:
        layout: the layout that the group reads.
        again: whether the group is recomputed.
        wanted: whether backward needs the parameter.
        ahead: whether it is prefetched.
        behind: whether its gradient is scattered one block later.
        learns: whether it gives the parameter a gradient.
    """

    block: int
    layout: layouts.Layout
    again: bool
    wanted: bool
    ahead: bool
    behind: bool
    learns: bool = True


class Turn(NamedTuple):
    """What one of several uses of a tied parameter does: gather it, free it, scatter its gradient.

    Attributes:
        gathers, frees: whether it gathers the parameter in forward (first use of its block), or frees it
            (last).
        frees_again: whether it frees the parameter in the second forward of a recomputed block.
        gathers_back, frees_back: whether it gathers, or frees, the parameter in the block's backward.
        before: the number of other uses' gradients that are already summed when this use's arrives.
        scatters: whether its gradient is the last one, after which the sum is scattered.
    """

    gathers: bool = True
    frees: bool = True
    frees_again: bool = True
    gathers_back: bool = True
    frees_back: bool = True
    before: int = 0
    scatters: bool = True


def alone(*, wanted: bool) -> Turn:
    """Return what a use does that shares nothing with others; ``wanted``: whether backward needs it."""
    return Turn(frees_again=not wanted, gathers_back=wanted, frees_back=wanted)


def turns(uses: Sequence[UsePlace]) -> list[Turn]:
    """Return whether each use of a parameter gathers, frees and scatters; ``uses`` are in execution order."""
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


class Gather(Enum):
    """When a sharded parameter is gathered."""

    EACH_USE = "each use"
    AHEAD = "ahead of each use"
    ONCE = "once per step"


class Reduce(Enum):
    """When gradients are reduced across ranks: after each micro-batch, or once per step."""

    EACH_MICRO_BATCH = "each micro-batch"
    LAST_MICRO_BATCH = "last micro-batch"


@dataclass(frozen=True, slots=True)
class Storage:
    """How one parameter is stored between steps, gathered and reduced.

    Plans and tables encode it in one layout (:attr:`stored`). Its micro-batch axis, along which no parameter
    is split, says when the parameter is gathered and its gradient reduced.

    Attributes:
        layout: the placement of its shards; on the micro-batch axis ``REPLICATE`` if gathered once or
            prefetched.
    """

    layout: layouts.Layout
    gather: Gather = Gather.EACH_USE
    reduce: Reduce = Reduce.EACH_MICRO_BATCH

    # Pricing queries the same few layouts a million times.
    @staticmethod
    @lru_cache(maxsize=1 << 16)
    def of(stored: layouts.Layout) -> Storage:
        if stored[0] == layouts.GATHERED_AHEAD:
            return Storage((layouts.REPLICATE, *stored[1:]), Gather.AHEAD)
        if stored[0] not in _ONCE:
            return Storage(stored)
        return Storage((layouts.REPLICATE, *stored[1:]), Gather.ONCE, _ONCE[stored[0]])

    @property
    def stored(self) -> layouts.Layout:
        """The storage as one layout, as encoded in strategies, plans and cost tables."""
        if self.gather is Gather.EACH_USE:
            return self.layout
        if self.gather is Gather.AHEAD:
            return (layouts.GATHERED_AHEAD, *self.layout[1:])
        last = self.reduce is Reduce.LAST_MICRO_BATCH
        return (layouts.REDUCED_LAST if last else layouts.GATHERED_ONCE, *self.layout[1:])

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is gathered for each use, without prefetching."""
        return self.gather is Gather.EACH_USE

    @property
    def gathered_once(self) -> bool:
        return self.gather is Gather.ONCE

    @property
    def gathered_ahead(self) -> bool:
        return self.gather is Gather.AHEAD

    @property
    def reduced_last(self) -> bool:
        """Whether the gradient stays with the unsharded copy until the last micro-batch."""
        return self.reduce is Reduce.LAST_MICRO_BATCH


_ONCE = {layouts.GATHERED_ONCE: Reduce.EACH_MICRO_BATCH, layouts.REDUCED_LAST: Reduce.LAST_MICRO_BATCH}


@dataclass(frozen=True, slots=True)
class Way:
    """The resharding of a parameter from its storage to one of its uses, and of its gradient back.

    Attributes:
        shard: the layout of the stored parameter, which the optimizer updates.
        source: the layout from which a use starts: the shard's or the unsharded copy's.
        use: the layout that the group reads.
        back: the layout to which the gradient goes in every micro-batch: the shard's or the copy's.
        atoms, mesh: the sizes of the parameter's atoms (factors of its dims), and of the mesh's axes.
        ahead: whether prefetching is wanted (:meth:`goes_ahead`, :meth:`copy_goes_ahead`,
            :meth:`goes_behind`).
    """

    shard: layouts.Layout
    source: layouts.Layout
    use: layouts.Layout
    back: layouts.Layout
    atoms: tuple[int, ...]
    mesh: tuple[int, ...]
    ahead: bool = False

    @property
    def unsharded(self) -> bool:
        """Whether a use reads an unsharded copy, which was gathered and cast earlier in the step."""
        return self.source != self.shard

    @property
    def reduced_last(self) -> bool:
        return self.unsharded and self.back == self.source

    def steps(self, *, learns: bool) -> _Both:
        """Return the (forward, backward) steps of each use; no backward steps without a gradient."""
        forward = edge_steps(self.atoms, self.mesh, self.source, self.use)[0]
        # Not the backward of the way forward: with an unsharded copy, the value comes from the copy and the
        # gradient may go to the shard.
        return forward, edge_steps(self.atoms, self.mesh, self.back, self.use)[1] if learns else ()

    def goes_ahead(self, *, learns: bool) -> bool:
        """Return whether a use is prefetched: by one all-gather, with one reduce-scatter of its gradient."""
        if not self.ahead or self.unsharded:
            return False
        forward, backward = self.steps(learns=learns)
        back = not learns or self._is_one("reduce_scatter", backward)
        return back and self._is_one("all_gather", forward)

    def copy_goes_ahead(self, *, learns: bool) -> bool:
        """Return whether an unsharded copy is prefetched for its first use in a step: by one all-gather, with
        one reduce-scatter of its gradient if that is reduced last."""
        if not self.ahead or not self.unsharded:
            return False
        forward, last = self.once(learns=learns)
        back = not last or self._is_one("reduce_scatter", last)
        return back and self._is_one("all_gather", forward)

    def goes_behind(self, *, learns: bool) -> bool:
        """Return whether the gradient of a use is scattered one block later in every micro-batch."""
        if not learns or self.reduced_last:
            return False
        if not self.unsharded:
            return self.goes_ahead(learns=learns)
        return self.ahead and self._is_one("reduce_scatter", self.steps(learns=learns)[1])

    def once(self, *, learns: bool) -> _Both:
        """Return the steps once per step: to gather an unsharded copy, and with ZeRO-1 to reduce its
        gradient."""
        if not self.unsharded:
            return (), ()
        forward, backward = edge_steps(self.atoms, self.mesh, self.shard, self.source)
        return forward, backward if learns and self.reduced_last else ()

    def _is_one(self, kind: StepKind, steps: Sequence[ReshardingStep]) -> bool:
        """Return whether ``steps`` is one collective of this kind; uneven shards must be along one axis."""
        if [step.kind for step in steps] != [kind]:
            return False
        (step,) = steps
        # Axes with one rank send nothing.
        if prod(self.mesh[axis] for axis in step.axes) == 1:
            return False
        whole = step.after if kind == "all_gather" else step.before
        alone = len(step.axes) == 1 and whole[step.atom] == self.atoms[step.atom]
        return alone or step.payload(self.mesh) == prod(whole)


def stored_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return a stored layout's placements, then ``held`` (ZeRO-2), ``held/P`` (ZeRO-1), ``ahead`` or none."""
    shown = tuple(map(layouts.placement_name, (*_ONCE, layouts.GATHERED_AHEAD)))
    return (*names[1:], *(name for name in names[:1] if name in shown))


def stored_layout(tensor: Tensor, use: layouts.Layout) -> layouts.Layout:
    """Return the layout in which a parameter is stored if it is never gathered: that of its use.

    A bias that a contraction reads as a partial sum (``P/R``) is stored whole; all ranks but one use zeros.
    """
    return tuple(canonical(tensor, layouts.REPLICATE if code == layouts.PARTIAL else code) for code in use)


def whole_layout(tensor: Tensor, mesh: tuple[int, ...]) -> layouts.Layout:
    """Return the layout of a parameter that is whole on every device and whose gradients are summed."""
    return stored_layout(
        tensor, tuple(layouts.PARTIAL_GRAD if size > 1 else layouts.REPLICATE for size in mesh)
    )


def way(
    tensor: Tensor,
    stored: layouts.Layout,
    use: layouts.Layout,
    atoms: tuple[int, ...],
    mesh: tuple[int, ...],
    *,
    shared: bool,
) -> Way:
    """Return how a parameter that is ``stored`` so is resharded for a use, and its gradient back.

    An unsharded copy has its only reader's layout, or is whole if ``shared`` by several. A parameter stored
    in that layout needs no copy.
    """
    storage = Storage.of(stored)
    if storage.gathered_ahead:
        shard = (stored_layout(tensor, use)[0], *stored[1:])
        return Way(shard, shard, use, shard, atoms, mesh, ahead=True)
    if not storage.gathered_once:
        return Way(stored, stored, use, stored, atoms, mesh)
    copy = whole_layout(tensor, mesh) if shared else stored_layout(tensor, use)
    # The code occupied the micro-batch axis of `stored`; whether gradients add up over that axis is taken
    # from the copy.
    shard = (copy[0], *stored[1:])
    # Gradient placements may still differ; the edge to the use handles them, without a copy.
    if forward_placements(copy) == forward_placements(shard):
        return Way(shard, shard, use, shard, atoms, mesh)
    back = copy if storage.reduced_last else shard
    return Way(shard, copy, use, back, atoms, mesh, ahead=True)
