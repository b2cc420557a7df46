"""Stored parameters on their way to a use: brought anew each time, or held as a copy for the whole step.

A parameter that is stored sharded can be gathered for each use (ZeRO stage 3), or once per step, after the
optimizer changed it: the copy is *held* for all micro-batches, forward and backward. Its gradient leaves in
every micro-batch (reduce-scattered, stage 2: ``HELD``), or *waits* whole until the last one (stage 1:
``WAITING``). Which of these is said by the stored layout's code on the micro-batch axis.

S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020,
section 5; what a step sends: section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.graph import Tensor
from tensoropt.ops.atom_graph import canonical
from tensoropt.ops.layouts import HELD, PARTIAL, PARTIAL_GRAD, REPLICATE, WAITING, Layout, placement_name
from tensoropt.sharding.reshard.steps import Step, edge_steps, forward_placements

Both = tuple[tuple[Step, ...], tuple[Step, ...]]
"""(forward, backward) steps."""


@dataclass(frozen=True, slots=True)
class Way:
    """From where a parameter lives to one use of it, and its gradient's way back.

    Attributes:
        home: where the shard lives that the optimizer changes.
        source: what a use starts from: the home, or the held copy.
        use: the layout that the group reads.
        back: where a use's gradient goes to in every micro-batch: the home, or beside the held copy.
    """

    home: Layout
    source: Layout
    use: Layout
    back: Layout

    @property
    def held(self) -> bool:
        """Whether a use starts from a held copy, which nothing has to be gathered or cast for."""
        return self.source != self.home

    @property
    def waits(self) -> bool:
        """Whether the gradient waits beside the held copy for the last micro-batch."""
        return self.held and self.back == self.source

    def steps(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> Both:
        """What every use takes; no backward steps without a gradient."""
        forward = edge_steps(atoms, mesh, self.source, self.use)[0] if self.source != self.use else ()
        backward = edge_steps(atoms, mesh, self.back, self.use)[1] if self.back != self.use else ()
        return forward, backward if learns else ()

    def once(self, atoms: tuple[int, ...], mesh: tuple[int, ...], *, learns: bool) -> Both:
        """What a held copy takes once per step: its gathering, and what becomes of a gradient that waited."""
        if not self.held:
            return (), ()
        forward, backward = edge_steps(atoms, mesh, self.home, self.source)
        return forward, backward if learns and self.waits else ()


def is_held(stored: Layout) -> bool:
    """Whether a gathered copy of a parameter stored so is held for the whole step."""
    return stored[0] in (HELD, WAITING)


def stored_words(names: Sequence[str]) -> tuple[str, ...]:
    """What people are told of a stored layout, given by its names: per mesh axis, and whether its copy is
    held."""
    held = placement_name(HELD), placement_name(WAITING)
    return (*names[1:], *(name for name in names[:1] if name in held))


def stored_layout(tensor: Tensor, use: Layout) -> Layout:
    """How a parameter is stored when nothing is gathered for it: as it is used.

    A bias that enters a contraction as ``P/R`` is stored whole and masked where it is used.
    """
    return tuple(canonical(tensor, REPLICATE if code == PARTIAL else code) for code in use)


def whole_layout(tensor: Tensor, mesh: tuple[int, ...]) -> Layout:
    """The whole parameter on every device, its gradient a sum over all: how a copy lies that several groups
    share."""
    return stored_layout(tensor, tuple(PARTIAL_GRAD if size > 1 else REPLICATE for size in mesh))


def way(tensor: Tensor, stored: Layout, use: Layout, mesh: tuple[int, ...], *, shared: bool) -> Way:
    """The way of a parameter stored so to a use.

    A held copy lies as its only reader would have the parameter stored, or whole where it has several. What
    lies like that already needs no copy.
    """
    if not is_held(stored):
        return Way(stored, stored, use, stored)
    copy = whole_layout(tensor, mesh) if shared else stored_layout(tensor, use)
    home = (copy[0], *stored[1:])
    if forward_placements(copy) == forward_placements(home):
        return Way(home, home, use, home)
    return Way(home, copy, use, copy if stored[0] == WAITING else home)
