"""What one group, one tensor or one parameter does at the moments of a step, for one choice.

A step is the sum of such pieces: all bytes and seconds add up, so pieces are worked out once per distinct
choice and shared by strategies and by layers that look alike. Moments are given as *slots* of the piece's
owner (:mod:`tensoropt.simulate.batch` knows where they lie). Pieces of groups and parameters are made in
:mod:`tensoropt.simulate.group_effects`, those of activations in :mod:`tensoropt.simulate.tensor_effects`.

A tensor is followed by its storage: an edge whose forward moves nothing gives its reader the very storage
of its source. All ranks do the same; the largest shard is played. Inputs, constants and buffers, the same
for every strategy, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tensoropt.costs.prices import Prices, Send
from tensoropt.graph import Tensor
from tensoropt.profiling.workload import memory_orders
from tensoropt.sharding.configurations import Mesh
from tensoropt.sharding.groups import GroupGraph
from tensoropt.sharding.placement import Layout, local_shape
from tensoropt.sharding.reshard.buffers import resharding_elements
from tensoropt.sharding.reshard.steps import Step, edge_steps, permuted_atoms, permuted_steps
from tensoropt.sharding.storage import Both, Way, way


@dataclass(frozen=True, slots=True)
class Effect:
    """What happens at one moment of one micro-batch.

    Attributes:
        slot: of the owner; ``later`` moves it to the moment that follows.
        kept, transient: bytes that begin (or, below 0, have ended) to be alive as the moment starts.
        spot: bytes alive during this moment only.
        local_s: seconds on the device, of ``source``.
        sends: collectives the device waits for.
    """

    slot: int
    later: bool = False
    kept: int = 0
    transient: int = 0
    spot: int = 0
    local_s: float = 0.0
    source: str = ""
    sends: tuple[Send, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Effects of one owner for one choice; bytes held all through the step."""

    effects: tuple[Effect, ...]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How a group sees a tensor.

    Attributes:
        layout: as it writes or reads it.
        kept: of a writer: the tensor lies in what the group keeps; of a reader: its backward needs it.
        again: the group is recomputed.
        lies_in: of a writer: the tensor, by its short name there, in whose storage this one lies.
        extent: bytes of the storage where these are not the tensor's own; of a reader that of its gradient.
    """

    layout: Layout
    kept: bool
    again: bool = False
    lies_in: str = ""
    extent: int | None = None


SOURCE = -1


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who finds a storage.

    Attributes:
        number: of its slots among the readers'.
        kept: its backward needs what it reads.
        again: it is recomputed.
        inside: what it reads is made in its region.
        moved: it reads a copy of its own, made at its slot ``READ``.
        turn: when it comes in forward, compared with other users.
        stays: it is no group: the storage is let go of when forward is over.
        lodges: of one that reads a view: the reader that made it, in whose copy the view lies where it has
            one; :data:`SOURCE` where the tensor's own group made it.
    """

    number: int
    kept: bool
    again: bool
    inside: bool
    moved: bool
    turn: int
    stays: bool = False
    lodges: int = SOURCE


GATHER, COMPUTE, INNER, GATHER_BACK, COMPUTE_BACK, INNER_BACK, PARAMETERS = range(7)
GATHER_AGAIN, COMPUTE_AGAIN, INNER_AGAIN, GIVE, HOLD = range(7, 12)
MADE, HOME, OUTPUT, FORWARD_END, OUTPUT_BACK, HOME_BACK, GRADIENT, MADE_AGAIN, HOME_AGAIN = range(9)
READ, USED, USED_BACK, READ_BACK, READ_AGAIN, USED_AGAIN = range(6)
ARRIVED, FIRST_ARRIVED, GIVE_SHARED, STEP, HOLD_SHARED = range(5)


def part_slot(part: int, *, again: bool = False) -> int:
    """Slot of a part of a group's operators, forward or forward again."""
    if part == 0:
        return COMPUTE_AGAIN if again else COMPUTE
    return HOLD + 2 * part - (0 if again else 1)


def reader_slot(reader: int, which: int) -> int:
    """Slot of a tensor's ``reader``-th reader."""
    return 9 + 6 * reader + which


class PieceMaker:
    """What pieces of groups and of tensors are worked out from, on one mesh.

    Args:
        prices: where seconds come from; None to follow bytes only.
    """

    def __init__(self, graph: GroupGraph, mesh: Mesh, optimizer: str, prices: Prices | None):
        self.graph, self.mesh, self.prices = graph, mesh, prices
        self.optimizer = optimizer
        self.tensors: Mapping[str, Tensor] = graph.atoms.graph.tensors
        self.training = graph.atoms.graph.training
        self.orders = memory_orders(graph)

    def elements(self, name: str, layout: Layout) -> int:
        return prod(local_shape(self.graph.atoms.atoms[name], layout, self.mesh))

    def bytes(self, name: str, layout: Layout) -> int:
        return self.elements(name, layout) * self.tensors[name].element_bytes

    def stored_bytes(self, name: str, layout: Layout) -> int:
        """Of a parameter between steps, or of its gradient."""
        return self.elements(name, layout) * self.tensors[name].stored_element_bytes

    def steps(self, name: str, source: Layout, target: Layout) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """(forward, backward) steps of an edge; no backward steps without a gradient."""
        if source == target:
            return (), ()
        forward, backward = edge_steps(self.graph.atoms.atom_sizes(name), self.mesh, source, target)
        return forward, backward if self.learns(name) else ()

    def way(self, name: str, stored: Layout, use: Layout) -> Way:
        """From where a parameter lives to a use of it."""
        return way(self.tensors[name], stored, use, self.mesh, shared=name in self.graph.shared)

    def use_steps(self, name: str, way: Way) -> Both:
        """(forward, backward) steps of every use of a parameter."""
        return way.steps(self.graph.atoms.atom_sizes(name), self.mesh, learns=self.learns(name))

    def move(self, name: str, steps: Sequence[Step]) -> tuple[float, tuple[Send, ...]]:
        if self.prices is None or not steps:
            return 0.0, ()
        return self.prices.steps(steps, self.tensors[name].element_bytes)

    def moved(self, slot: int, name: str, steps: Sequence[Step], spot: int, other: Sequence[Step]) -> Effect:
        """An edge's steps one way; where it has none the ``other`` way, passing on what comes counts too."""
        local_s, sends = self.move(name, steps)
        if self.prices is not None:
            local_s += self.prices.passed_s(steps, other, learns=self.learns(name))
        return Effect(slot, spot=spot, local_s=local_s, source=self.upkeep_source, sends=sends)

    @property
    def upkeep_source(self) -> str:
        return self.prices.compute.source if self.prices is not None else ""

    def resharding(self, steps: Sequence[Step], name: str) -> int:
        """The most that is alive of a resharding beside its input."""
        if (order := self.orders.get(name)) is not None:
            steps = permuted_steps(steps, permuted_atoms(self.graph.atoms.atoms[name], order))
        return resharding_elements(steps, self.mesh) * self.tensors[name].element_bytes

    def learns(self, name: str) -> bool:
        return self.training and self.tensors[name].requires_grad
