"""Effects: what a choice computes, sends and allocates at moments of a step. All costs follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from tensoropt.costs.prices import NO_WORK, Prices, Queues, Send
from tensoropt.graph import DTYPE_BYTES, Tensor
from tensoropt.ops.layouts import Layout, local_shape
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.workload import Workload, memory_orders
from tensoropt.sharding.buckets import BUCKET_BYTES
from tensoropt.sharding.groups import Group, LinearProduct, is_one_reduction, reader_product
from tensoropt.sharding.reshard.steps import (
    ReshardingStep,
    edge_steps,
    forward_placements,
    gradient_placements,
    move_pattern,
    permuted_atoms,
    permuted_steps,
    resharding_elements,
    resharding_steps,
)
from tensoropt.sharding.strategy import output_layout

Phase = Literal["first", "forward", "again", "backward", "last", "reduction", "optimizer"]
"""The phases of a step: ``first`` and ``last`` are the first micro-batch's forward and the last one's
backward; ``again`` is a recomputed region's second forward."""


class When(NamedTuple):
    """A moment of a step, relative to the group, tensor or parameter to which an effect belongs.

    Attributes:
        what: the kind of moment; :mod:`tensoropt.simulate.step_schedule` finds its position in the step.
        number: the index of a part of a group's forward, or of a tensor's reader; 0 for other moments.
    """

    phase: Phase
    what: str
    number: int = 0

    @property
    def once(self) -> bool:
        """Whether the moment occurs once per step, not in each micro-batch."""
        return self.phase in ("first", "last", "reduction", "optimizer")

    @property
    def at_once(self) -> bool:
        """Whether a coalesced collective is waited for as soon as it is issued, as nothing can hide it."""
        return self.what == "begin"


# Moments of a group. COMPUTE stands for the first part of its forward; see part_of.
GATHER, COMPUTE, INNER = (When("forward", what) for what in ("gather", "compute", "inner"))
GATHER_AGAIN, COMPUTE_AGAIN, INNER_AGAIN = (When("again", what) for what in ("gather", "compute", "inner"))
GATHER_BACK, COMPUTE_BACK, INNER_BACK = (When("backward", what) for what in ("gather", "compute", "inner"))
PARAMETERS = When("backward", "parameters")
# Moments of a group whose parameters are gathered ahead: when the block before begins, when its own begins,
# and the same in backward; then, once backward begins, the next block and the one after it.
BEGIN_BEFORE, BEGIN = When("forward", "before"), When("forward", "begin")
BACK_BEFORE, BACK_BEGIN, BACK_NEXT, BACK_LEFT = (
    When("backward", what) for what in ("before", "begin", "next", "left")
)
# The same, once per step: a copy that stays gathered is made, and the gradient that waited with it is sent.
FIRST_BEFORE, FIRST_BEGIN = When("first", "before"), When("first", "begin")
LAST_NEXT, LAST_LEFT = When("last", "next"), When("last", "left")
# Moments of a group or a parameter: what is done once with a copy that stays gathered.
REDUCE_LAST, GATHER_ONCE = When("optimizer", "reduce"), When("optimizer", "unshard")
# Moments of a tensor.
MADE, HUB, OUTPUT = (When("forward", what) for what in ("made", "hub", "output"))
FORWARD_END, BACKWARD_END = When("forward", "end"), When("backward", "over")
MADE_AGAIN, HUB_AGAIN = When("again", "made"), When("again", "hub")
OUTPUT_BACK, HUB_BACK, GRADIENT = (When("backward", what) for what in ("output", "hub", "made"))
# Moments of a tensor's reader; see reader.
READ, USED = When("forward", "read"), When("forward", "used")
READ_AGAIN, USED_AGAIN = When("again", "read"), When("again", "used")
READ_BACK, USED_BACK = When("backward", "read"), When("backward", "used")
# Another tensor's gradient, which is the same tensor as the last reader's, is used up.
SAME_USED = When("backward", "same")
# A copy is made again for its backward, or for its second forward.
READ_ANEW, READ_ANEW_AGAIN = When("backward", "anew"), When("again", "anew")
# Moments of a parameter.
# StepSchedule.of_parameter resolves their positions: the two differ only for a tied parameter.
ARRIVED, FIRST_ARRIVED = When("backward", "arrived"), When("backward", "first arrived")
REDUCED, STEP = When("reduction", "bucket"), When("optimizer", "step")

COMPLETE = (ARRIVED, BACK_LEFT, REDUCE_LAST)
"""The moments at which a gradient may be complete: in backward, after scattering, after backward."""


def part_of(part: int, *, again: bool = False) -> When:
    """Return the moment when part number ``part`` of a group's forward runs, or is recomputed."""
    return (COMPUTE_AGAIN if again else COMPUTE)._replace(number=part)


def reader(number: int, when: When) -> When:
    """Return the moment ``when`` of the tensor's reader number ``number``."""
    return when._replace(number=number)


class GradientShare(NamedTuple):
    """A gradient, all-reduced in a bucket over mesh ``axes`` (0: micro-batches) after moment ``complete``."""

    axes: tuple[int, ...]
    dtype: str
    elements: int
    complete: When = ARRIVED

    @property
    def bytes(self) -> int:
        """The gradient's size in bytes, in the dtype in which it is reduced."""
        return self.elements * DTYPE_BYTES[self.dtype]


class SharedCollective(NamedTuple):
    """A parameter's part in a coalesced collective.

    Attributes:
        send: the collective for this parameter alone.
        dtype: the dtype of the collective.
        stays: whether the sent data stays allocated, so that packing copies it.
    """

    send: Send
    dtype: str
    stays: bool = False


class Allocation(NamedTuple):
    """A named allocation, which one effect begins and another ends.

    Attributes:
        what: ``activation``, ``gathered parameters``, ``gradient``,...
        key: distinguishes allocations of the same group, tensor or parameter with equal ``what``.
        kept: whether it is saved from forward to backward.
        parameter: the short name of the parameter, if it holds one or its gradient; "" otherwise.
    """

    what: str
    key: str
    bytes: int
    kept: bool = False
    parameter: str = ""


def allocations(*named: Allocation | None) -> tuple[Allocation, ...]:
    return tuple(each for each in named if each is not None and each.bytes)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one choice does at one moment of a micro-batch, or of the step.

    Attributes:
        after: whether it takes place at the moment's end.
        begins, ends: allocations that begin, or end. One in both stays allocated, and is saved for backward
            from this moment on.
        workspace_bytes: memory in bytes that is allocated during this moment only.
        local_s: the duration on the device in seconds, from ``source`` (such as ``measured``).
        sends: blocking collectives.
        beside_work_s: the last seconds of the moment's computation, which overlap with ``sends``.
        beside: coalesced collectives that overlap with computation until the next block.
        moves: whether it is a resharding, whose ``local_s`` counts as communication.
        share: a gradient reduced in a bucket.
        host_s: the duration on the host of launching it, in seconds; 0 on CPUs.
        passing: autograd's seconds to hand the tensor on in backward if only forward reshards it, or vice
            versa; the search counts them if ``sums_passing``.
    """

    when: When
    after: bool = False
    begins: tuple[Allocation, ...] = ()
    ends: tuple[Allocation, ...] = ()
    workspace_bytes: int = 0
    local_s: float = 0.0
    source: str = ""
    sends: tuple[Send, ...] = ()
    beside_work_s: float = 0.0
    beside: tuple[SharedCollective, ...] = ()
    moves: bool = False
    share: GradientShare | None = None
    host_s: float = 0.0
    passing: Queues = NO_WORK
    sums_passing: bool = True

    @property
    def kept(self) -> int:
        """The change in bytes of memory that is saved for backward."""
        return self._grows(kept=True)

    @property
    def transient(self) -> int:
        """The change in bytes of memory that stays allocated, but is not saved for backward."""
        return self._grows(kept=False)

    def _grows(self, *, kept: bool) -> int:
        if not (self.begins or self.ends):
            return 0
        begun = sum(each.bytes for each in self.begins if each.kept is kept)
        return begun - sum(each.bytes for each in self.ends if each.kept is kept)


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects of a choice for a group, tensor or parameter, and the bytes it holds during the step."""

    effects: tuple[Effect, ...]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


class Cost(NamedTuple):
    """Totals of one step: memory in bytes, duration of computing and of communication in seconds."""

    memory: float
    compute: float
    communication: float

    def plus(self, *others: Cost) -> Cost:
        """Return the sum with other costs, added in order."""
        return Cost(*(sum(column) for column in zip(self, *others, strict=True)))


NOTHING = Cost(0.0, 0.0, 0.0)


def additive(effects: Effects, prices: Prices) -> Cost:
    """Return the costs of effects as the search counts them: memory that lasts, and all durations.

    Each effect counts the slower of device and host, an upper bound as the host runs ahead. Memory lasts if
    it is allocated during the whole step or saved from forward to backward. Workspaces and tensors that a
    recomputed region saves are left out: only their maximum counts, which no sum can express.
    """
    # The order of the additions is part of the result to the last bit; see TableBuilder._options.
    memory, compute, communication = effects.parameters + effects.gradients + effects.optimizer, 0.0, 0.0
    for effect in effects.effects:
        # The first axis is the micro-batch axis: an effect that occurs in each micro-batch counts that often.
        times = 1 if effect.when.once else prices.mesh[0]
        # All that forward keeps is alive together when forward ends, so its sum is a peak; the effects that
        # free it belong to backward and are not subtracted. Bytes are not multiplied by ``times``, because a
        # micro-batch frees them before the next one begins.
        if effect.when.phase == "forward":
            memory += effect.kept * prices.in_flight
        # Combined with others, a collective takes no longer than by itself.
        communication += sum(one.send.seconds for one in effect.beside) * times
        if effect.moves or effect.sends:
            sent_s = sum(send.seconds for send in effect.sends)
            device_s = effect.local_s + sent_s
            if effect.beside_work_s:
                device_s -= float(prices.hidden_s(sent_s, effect.beside_work_s))
            seconds = max(device_s, effect.host_s)
            communication += (seconds + (max(effect.passing) if effect.sums_passing else 0.0)) * times
        else:
            compute += max(effect.local_s, effect.host_s) * times
        share = effect.share
        if share is not None and (bucket := prices.send("all_reduce", share.axes, BUCKET_BYTES)):
            # A single parameter does not know which gradients share its bucket, so it pays in proportion to
            # its bytes.
            communication += share.bytes / BUCKET_BYTES * bucket.seconds
    return Cost(memory, compute, communication)


@dataclass(frozen=True, slots=True)
class Reading:
    """How one group writes or reads a tensor.

    Attributes:
        layout: the layout in which the group writes or reads it.
        kept: whether the writer saves the tensor, or the reader's backward needs it.
        again: whether the group is recomputed.
        lies_in: for a writer: the short name of the tensor whose storage it shares.
        extent: for a reader: the bytes of the gradient's storage; None if they equal the tensor's.
        product_s: for a linear reader: the duration in seconds of computing its weight's gradient, which may
            overlap with reducing the tensor's gradient.
        given: for a writer: whether another pipeline stage made the tensor, which lives until forward ends.
    """

    layout: Layout
    kept: bool
    again: bool = False
    lies_in: str = ""
    extent: int | None = None
    product_s: float | None = None
    given: bool = False


class Keeps(Enum):
    """What is saved from forward to backward for one reader of a tensor."""

    NOTHING = 0
    SOURCE = 1
    COPY = 2


def kept_for(*, kept: bool, again: bool, remade: bool, moved: bool) -> Keeps:
    """Return what is saved of a tensor for a reader: its producer's shard, the reader's copy or nothing.

    Args:
        kept: whether the reader's backward needs the tensor.
        again: whether the reader is recomputed, and then reshards the producer's shard again.
        remade: whether the reader's region (recomputed block) makes the tensor again.
        moved: whether the reader has its own resharded copy.
    """
    if remade:
        return Keeps.NOTHING
    # Checked before ``kept``: a recomputed reader needs its input for the second forward even if its backward
    # does not.
    if again:
        return Keeps.SOURCE
    if not kept:
        return Keeps.NOTHING
    return Keeps.COPY if moved else Keeps.SOURCE


def joined(parts: Sequence[Effects]) -> Effects:
    return Effects(
        tuple(effect for part in parts for effect in part.effects),
        sum(part.parameters for part in parts),
        sum(part.gradients for part in parts),
        sum(part.optimizer for part in parts),
    )


_Both = tuple[tuple[ReshardingStep, ...], tuple[ReshardingStep, ...]]
"""(forward, backward) steps of a resharding."""


class MoveEffects:
    """The effects of resharding on one mesh."""

    def __init__(self, prices: Prices):
        self.prices, self.graph, self.mesh = prices, prices.graph, prices.mesh
        self.tensors: Mapping[str, Tensor] = self.graph.atoms.graph.tensors
        self.training = prices.training
        self.orders = memory_orders(self.graph)
        # Cached per instance, that is per mesh and prices, which the key does not contain.
        self._elements: dict[tuple[str, Layout], int] = {}
        self._steps: dict[object, _Both] = {}
        self._moved: dict[object, Effect] = {}
        self._products: dict[tuple[str, str], LinearProduct | None] = {}
        self._one_way: dict[tuple[int, int], dict[object, tuple[float, float, float, bool]]] = {}

    # -- sizes ------------------------------------------------------------------------------------

    def elements(self, name: str, layout: Layout) -> int:
        """Return the number of elements of a tensor's largest shard in a layout."""
        key = name, layout
        if key not in self._elements:
            self._elements[key] = prod(local_shape(self.graph.atoms.atoms[name], layout, self.mesh))
        return self._elements[key]

    def bytes(self, name: str, layout: Layout) -> int:
        """Return the size in bytes of a tensor's largest shard, in the dtype that readers see."""
        return self.elements(name, layout) * self.tensors[name].element_bytes

    def stored_bytes(self, name: str, layout: Layout) -> int:
        """Return the size in bytes of a parameter's largest shard between steps, or of its gradient's."""
        return self.elements(name, layout) * self.tensors[name].stored_element_bytes

    def learns(self, name: str) -> bool:
        return self.training and self.tensors[name].requires_grad

    # -- moves ------------------------------------------------------------------------------------

    def steps(self, name: str, source: Layout, target: Layout) -> _Both:
        """Return the (forward, backward) steps of a resharding (collectives and local operations); backward
        has none for a tensor without a gradient."""
        # Layers repeat, and all tensors with the same moves share them.
        atoms, learns = self.graph.atoms.atom_sizes(name), self.learns(name)
        key = atoms, learns, source, target
        if key not in self._steps:
            forward, backward = edge_steps(atoms, self.mesh, source, target) if source != target else ((), ())
            self._steps[key] = forward, backward if learns else ()
        return self._steps[key]

    def moved(
        self,
        when: When,
        name: str,
        source: Layout,
        target: Layout,
        *,
        workspace_bytes: int = 0,
    ) -> Effect:
        """Return the effect of resharding a tensor or, if ``when`` is in backward, its gradient back."""
        tensor, atoms = self.tensors[name], self.graph.atoms.atom_sizes(name)
        # Layers repeat: the same move of a similar tensor costs the same.
        key = (when, atoms, tensor.element_bytes, tensor.requires_grad, source, target, workspace_bytes)
        if key not in self._moved:
            ways = self.steps(name, source, target)
            back = when.phase == "backward"
            # If nothing moves in the other direction, autograd still passes the tensor on. That time is
            # counted here, because an edge without any steps does not exist at all.
            passes = not ways[not back] and self.learns(name)
            self._moved[key] = self.stepped(
                when, name, ways[back], passes=passes, workspace_bytes=workspace_bytes
            )
        return self._moved[key]

    def stepped(
        self,
        when: When,
        name: str,
        steps: Sequence[ReshardingStep],
        *,
        passes: bool = False,
        workspace_bytes: int = 0,
    ) -> Effect:
        """Return the effect of running the resharding ``steps`` at the moment ``when``.

        Args:
            passes: whether to add autograd's time to hand the tensor on unchanged in backward if ``steps``
                belong to forward, or in forward if they belong to backward.
        """
        local, sends = self.prices.steps(steps, self.tensors[name].element_bytes)
        return Effect(
            when,
            workspace_bytes=workspace_bytes,
            local_s=local.device_s,
            host_s=local.host_s,
            source=self.overheads_source,
            sends=sends,
            moves=True,
            passing=self.prices.passing if steps and passes else NO_WORK,
        )

    def moving_s(
        self,
        name: str,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        products_s: Sequence[float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays (sources, targets): seconds of resharding a tensor, and its gradient back.

        The seconds equal those of :meth:`moved` to the last bit. All pairs, perhaps millions, are computed at
        once.

        Args:
            products_s: for each target, the seconds of the product that overlaps with a gradient's reduction.
        """
        forward_s, goes = self._one_way_s(
            name, [*map(forward_placements, sources)], [*map(forward_placements, targets)]
        )
        if not self.learns(name):
            return forward_s, np.zeros_like(forward_s)
        back_s, comes = (
            part.T
            for part in self._one_way_s(
                name, [*map(gradient_placements, targets)], [*map(gradient_placements, sources)], products_s
            )
        )
        pass_s = max(self.prices.passing)
        return forward_s + np.where(goes & ~comes, pass_s, 0.0), back_s + np.where(comes & ~goes, pass_s, 0.0)

    def _one_way_s(
        self,
        name: str,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        products_s: Sequence[float] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays (sources, targets): the seconds of resharding, and whether any step is needed."""
        atoms, element_bytes = self.graph.atoms.atom_sizes(name), self.tensors[name].element_bytes
        known = self._one_way.setdefault((prod(atoms), element_bytes), {})
        # Layouts that differ only in the other direction are merged: far fewer remain.
        rows, cols = ({p: i for i, p in enumerate(dict.fromkeys(ends))} for ends in (sources, targets))
        found = []
        for source, target in itertools.product(rows, cols):
            key = move_pattern(atoms, self.mesh, source, target)
            cost = known.get(key)
            if cost is None:
                steps = resharding_steps(atoms, self.mesh, source, target)
                cost = known[key] = self._steps_s(steps, element_bytes)
            found.append(cost)
        at = np.ix_([rows[p] for p in sources], [cols[p] for p in targets])
        device_s, host_s, reduced_s, moves = (
            np.array(part).reshape(len(rows), len(cols))[at] for part in zip(*found, strict=True)
        )
        if products_s is not None:
            device_s = device_s - self.prices.hidden_s(reduced_s, np.array(products_s)[:, None])
        return np.maximum(device_s, host_s), moves

    def _steps_s(
        self, steps: Sequence[ReshardingStep], element_bytes: int
    ) -> tuple[float, float, float, bool]:
        if not steps:
            return 0.0, 0.0, 0.0, False
        local, sends = self.prices.steps(steps, element_bytes)
        sent_s = sum(send.seconds for send in sends)
        reduced_s = sent_s if is_one_reduction(steps, self.mesh) else 0.0
        return local.device_s + sent_s, local.host_s, reduced_s, True

    def product_s(self, group: Group, name: str, work: Workload, facts: Facts) -> float | None:
        """Return the seconds of the group's weight-gradient product that may hide reducing the gradient of
        ``name``; None if it has no such product."""
        key = group.name, name
        if key not in self._products:
            self._products[key] = reader_product(self.graph.atoms.graph, group, name)
        return None if self._products[key] is None else self.prices.compute.weight_gradient_s(work, facts)

    def output(self, name: str, source: Layout) -> tuple[Effect, Effect]:
        """Return the effects of making a model output whole on each rank, and of moving its gradient back."""
        whole = output_layout(source)
        return self.moved(OUTPUT, name, source, whole), self.moved(OUTPUT_BACK, name, source, whole)

    @property
    def overheads_source(self) -> str:
        """The source of the durations of copies, casts and launches."""
        return self.prices.compute.source

    def resharding_bytes(self, steps: Sequence[ReshardingStep], name: str) -> int:
        """Return the peak memory of a resharding in bytes, without its input."""
        if (order := self.orders.get(name)) is not None:
            # Buffers depend on which dim is outermost in memory: gathering along that one needs no copy, and
            # resharding lays out tensors as the unsplit model does.
            steps = permuted_steps(steps, permuted_atoms(self.graph.atoms.atoms[name], order))
        return resharding_elements(steps, self.mesh) * self.tensors[name].element_bytes
