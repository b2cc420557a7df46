"""The effects of a choice in a step, each with the moment at which it takes place.

This is the only description of what anything costs. A choice is a group's configuration with the storage of
its parameters, the layouts between which a tensor moves, or the layout in which a parameter is stored. Its
effects are computation, collectives with their group and bytes, and memory that is allocated and freed.

The search adds effects up (:func:`additive`): its tables hold their sums. The simulator lays the same effects
out in time, and derives a strategy's step time, memory curve, collectives and timeline from them.

All ranks do the same; the description is of the rank with the largest shards. Inputs, constants and buffers,
which are the same for every strategy, are left out; constants are a term of the reported memory
(:mod:`tensoropt.costs.process_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from tensoropt.costs.prices import NO_WORK, Prices, Queues, Send
from tensoropt.graph import DTYPE_BYTES
from tensoropt.ops.layouts import Layout
from tensoropt.sharding.buckets import BUCKET_BYTES

Phase = Literal["first", "forward", "again", "backward", "last", "reduction", "optimizer"]
"""``again``: the second forward of a recomputed region, in its backward; ``first``: the forward of the first
micro-batch, ``last``: the backward of the last one."""


class When(NamedTuple):
    """A moment of a step as named by the owner of an effect: the group, the tensor or the parameter.

    Attributes:
        what: the kind of moment; :mod:`tensoropt.simulate.step_schedule` determines its position in a step.
        number: the number of a part of a group's forward, of a tensor's reader, or of the end of a gradient's
            storage.
    """

    phase: Phase
    what: str
    number: int = 0

    @property
    def once(self) -> bool:
        """Whether it occurs once per step, however many micro-batches there are."""
        return self.phase in ("first", "last", "reduction", "optimizer")

    @property
    def at_once(self) -> bool:
        """Whether a collective sent together with others is waited for at once, because there is no block
        that it could overlap with."""
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
FORWARD_END = When("forward", "end")
BACKWARD_END = When("backward", "over")
MADE_AGAIN, HUB_AGAIN = When("again", "made"), When("again", "hub")
OUTPUT_BACK, HUB_BACK, GRADIENT = (When("backward", what) for what in ("output", "hub", "made"))
# Moments of a tensor's reader; see reader.
READ, USED = When("forward", "read"), When("forward", "used")
READ_AGAIN, USED_AGAIN = When("again", "read"), When("again", "used")
READ_BACK, USED_BACK = When("backward", "read"), When("backward", "used")
# Moments of a parameter.
# StepSchedule.of_parameter resolves their positions: the two differ only for a tied parameter.
ARRIVED, FIRST_ARRIVED = When("backward", "arrived"), When("backward", "first arrived")
REDUCED, STEP = When("reduction", "bucket"), When("optimizer", "step")

COMPLETE = (ARRIVED, BACK_LEFT, REDUCE_LAST)
"""The moments at which a gradient is complete where its parameter is stored: in backward, after it was
scattered behind, or after backward; moments of the parameter or of its only group."""


def part_of(part: int, *, again: bool = False) -> When:
    """The moment of part ``part`` of a group's forward, or of its second forward."""
    return (COMPUTE_AGAIN if again else COMPUTE)._replace(number=part)


def reader(number: int, when: When) -> When:
    """The moment ``when`` of reader ``number`` of a tensor."""
    return when._replace(number=number)


def storage_end(number: int) -> When:
    """The moment at which the storage of some gradients is freed: end ``number`` of the tensor."""
    return When("backward", "end", number)


class GradientShare(NamedTuple):
    """A gradient that is all-reduced in a bucket with others, over the mesh's ``axes`` (numbered with the
    micro-batch axis in front).

    Attributes:
        complete: the moment after which the gradient is complete; one of ``COMPLETE``.
    """

    axes: tuple[int, ...]
    dtype: str
    elements: int
    complete: When = ARRIVED

    @property
    def bytes(self) -> int:
        """The gradient's bytes, in the dtype in which it is reduced."""
        return self.elements * DTYPE_BYTES[self.dtype]


class SharedCollective(NamedTuple):
    """A parameter's part in a collective that several parameters share.

    Attributes:
        send: the collective as it would be for this parameter alone.
        dtype: the dtype in which it is sent; one collective has one dtype.
        stays: the data that is sent is no copy and stays in place: packing it with others makes another copy.
    """

    send: Send
    dtype: str
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """An event at one moment of one micro-batch, or of the step if the moment occurs once.

    Attributes:
        after: it takes place when the moment ends, which is when the next one starts.
        kept, transient: bytes allocated (or, if negative, freed) when the moment starts; kept for backward,
            or until another effect frees them.
        workspace_bytes: bytes that are alive during this moment only.
        local_s: seconds on the device, with source ``source``.
        sends: collectives that the device waits for.
        beside_work_s: the last seconds of the moment's own work, which begin together with the sends and do
            not depend on them.
        beside: collectives that overlap with what follows, combined with others of the same moment, until the
            next block begins.
        moves: it moves data from one layout to another; its local seconds count as communication in figures
            that separate compute from communication.
        share: a gradient that is reduced together with others. The bucket has the collective.
        host_s: seconds in which the host issues the effect to a separate device; 0 if the host is the device.
        passing: seconds in which autograd passes on a tensor that moves only in the other direction. They
            belong to the edge's overheads, and the search counts them if ``sums_passing``. They leave out the
            time for a parameter that does not move to its use but whose gradient moves back, about 10 us per
            use.
    """

    when: When
    after: bool = False
    kept: int = 0
    transient: int = 0
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


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects of one owner for one choice, and the bytes that are alive during the whole step."""

    effects: tuple[Effect, ...]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


class Cost(NamedTuple):
    """The totals of effects in one step: bytes, seconds of computing, seconds of communication."""

    memory: float
    compute: float
    communication: float

    def plus(self, *others: Cost) -> Cost:
        """The sum with other costs, added one after another."""
        return Cost(*(sum(column) for column in zip(self, *others, strict=True)))


NOTHING = Cost(0.0, 0.0, 0.0)


def additive(effects: Effects, prices: Prices) -> Cost:
    """Add up effects as the search counts them: the bytes that last, and all seconds as if nothing
    overlapped.

    For each effect it counts the slower of device and host. This is exact for a step whose effects are all
    slower on the same one, and otherwise too much, because the host runs ahead during effects that are slower
    on the device. The simulator, which adds up each of them separately, gives the actual step time.

    Bytes last if they are alive during the whole step or kept from forward to backward. What a recomputed
    region keeps while its own backward runs does not last, nor does workspace: only their maximum over all
    moments counts, which no sum can express (:mod:`tensoropt.costs.move_effects`).
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
            device_s = prices.amid_work(effect.local_s, effect.sends)
            if effect.beside_work_s:
                sent_s = sum(send.seconds for send in effect.sends)
                device_s -= float(prices.hidden_s(sent_s, effect.beside_work_s))
            seconds = max(device_s, effect.host_s)
            communication += (seconds + (max(effect.passing) if effect.sums_passing else 0.0)) * times
        else:
            compute += max(effect.local_s, effect.host_s) * times
        if effect.share is not None:
            # A single parameter does not know which gradients share its bucket, so it pays in proportion to
            # its bytes.
            part = effect.share.bytes / BUCKET_BYTES
            communication += part * prices.collective_s("all_reduce", effect.share.axes, BUCKET_BYTES)
    return Cost(memory, compute, communication)


class WeightProduct(NamedTuple):
    """The product that computes a weight's gradient, in the backward of a linear operator.

    Attributes:
        seconds: the product's duration.
        bytes: size of the weight's gradient.
        spare_bytes: the most by which other parts of the group's backward exceed its live memory.
    """

    seconds: float
    bytes: int = 0
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A group's view of a tensor.

    Attributes:
        layout: the layout in which the group writes or reads it.
        kept: for a writer: the tensor is part of what the group keeps; for a reader: its backward needs the
            tensor.
        again: the group is recomputed.
        lies_in: for a writer: the tensor, by its short name there, in whose storage this one lies.
        extent: bytes of the storage if they differ from the tensor's own; for a reader, those of its
            gradient's storage.
        product: for a linear operator that reads the tensor: the product for its weight's gradient, with
            which the reduction of the tensor's gradient may overlap.
        given: for a writer: another stage of a pipeline has produced the tensor, and it is held until forward
            is over.
    """

    layout: Layout
    kept: bool
    again: bool = False
    lies_in: str = ""
    extent: int | None = None
    product: WeightProduct | None = None
    given: bool = False


class Keeps(Enum):
    """The part of a tensor that is kept from forward to backward for one reader."""

    NOTHING = 0
    SOURCE = 1
    """The storage from which the reader reads the tensor."""
    COPY = 2
    """The reader's own copy, in the reader's layout."""


def kept_for(*, kept: bool, again: bool, inside: bool, moved: bool) -> Keeps:
    """Return what is kept of a tensor for a reader.

    A tensor that enters a recomputed region is kept as it comes, and is moved into the region a second time
    in backward. A tensor that passes between two groups of one recomputed region is not kept at all.

    Args:
        kept: the reader's backward needs the tensor.
        again: the reader is recomputed.
        inside: the tensor is produced in the reader's region.
        moved: the reader has its own copy.
    """
    # Checked before ``kept``: a recomputed reader needs its input for the second forward even if its backward
    # does not.
    if again:
        return Keeps.NOTHING if inside else Keeps.SOURCE
    if not kept:
        return Keeps.NOTHING
    return Keeps.COPY if moved else Keeps.SOURCE


def joined(parts: Iterable[Effects]) -> Effects:
    """The effects of several owners combined into one."""
    effects: list[Effect] = []
    parameters = gradients = optimizer = 0
    for part in parts:
        effects += part.effects
        parameters, gradients = parameters + part.parameters, gradients + part.gradients
        optimizer += part.optimizer
    return Effects(tuple(effects), parameters, gradients, optimizer)
