"""What a choice does in a step: its effects, each with the moment at which it takes place.

This is the one description of what anything costs. A choice is a group's configuration with the storage of
its parameters, the layouts between which a tensor moves, or the layout in which a parameter is stored. Its
effects are computation, collectives with their group and bytes, and memory that is taken and given back.

The search adds effects up (:func:`additive`): its tables hold their sums. The simulator lays them out in
time: step time, memory curve, collectives and timeline of a strategy are what it sees of the same effects.

All ranks do the same; the rank with the largest shards is described. Inputs, constants and buffers, which are
the same for every strategy, are left out; constants are a term of what is reported
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
    """A moment of a step as the owner of an effect names it: the group, the tensor or the parameter.

    Attributes:
        what: the kind of moment; :mod:`tensoropt.simulate.step_schedule` says where in a step it lies.
        number: which part of a group's forward, which reader of a tensor, which end of a gradient's storage.
    """

    phase: Phase
    what: str
    number: int = 0

    @property
    def once(self) -> bool:
        """Whether it comes once in a step, however many micro-batches there are."""
        return self.phase in ("first", "last", "reduction", "optimizer")

    @property
    def at_once(self) -> bool:
        """Whether what is sent together is waited for at once, as there is no block beside which it could
        run."""
        return self.what == "begin"


# Of a group. COMPUTE stands for the first part of its forward; see part_of.
GATHER, COMPUTE, INNER = (When("forward", what) for what in ("gather", "compute", "inner"))
GATHER_AGAIN, COMPUTE_AGAIN, INNER_AGAIN = (When("again", what) for what in ("gather", "compute", "inner"))
GATHER_BACK, COMPUTE_BACK, INNER_BACK = (When("backward", what) for what in ("gather", "compute", "inner"))
PARAMETERS = When("backward", "parameters")
# Of a group whose parameters are gathered ahead: as the block before begins, as its own does, and the same in
# backward; then as backward begins the next block, and the one after it.
BEGIN_BEFORE, BEGIN = When("forward", "before"), When("forward", "begin")
BACK_BEFORE, BACK_BEGIN, BACK_NEXT, BACK_LEFT = (
    When("backward", what) for what in ("before", "begin", "next", "left")
)
# The same, once in a step: a copy that stays gathered is made, and a gradient that waited beside it goes.
FIRST_BEFORE, FIRST_BEGIN = When("first", "before"), When("first", "begin")
LAST_NEXT, LAST_LEFT = When("last", "next"), When("last", "left")
# Of a group or a parameter: what is done once with a copy that stays gathered.
REDUCE_LAST, GATHER_ONCE = When("optimizer", "reduce"), When("optimizer", "unshard")
# Of a tensor.
MADE, HUB, OUTPUT = (When("forward", what) for what in ("made", "hub", "output"))
FORWARD_END = When("forward", "end")
BACKWARD_END = When("backward", "over")
MADE_AGAIN, HUB_AGAIN = When("again", "made"), When("again", "hub")
OUTPUT_BACK, HUB_BACK, GRADIENT = (When("backward", what) for what in ("output", "hub", "made"))
# Of a tensor's reader; see reader.
READ, USED = When("forward", "read"), When("forward", "used")
READ_AGAIN, USED_AGAIN = When("again", "read"), When("again", "used")
READ_BACK, USED_BACK = When("backward", "read"), When("backward", "used")
# Of a parameter.
# Their places are resolved by StepSchedule.of_parameter: the two differ for a tied parameter only.
ARRIVED, FIRST_ARRIVED = When("backward", "arrived"), When("backward", "first arrived")
REDUCED, STEP = When("reduction", "bucket"), When("optimizer", "step")

COMPLETE = (ARRIVED, BACK_LEFT, REDUCE_LAST)
"""When a gradient is complete where its parameter is stored: in backward, once it was scattered behind, or
after backward; of the parameter or of its only group."""


def part_of(part: int, *, again: bool = False) -> When:
    """Part ``part`` of a group's forward, or of its forward again."""
    return (COMPUTE_AGAIN if again else COMPUTE)._replace(number=part)


def reader(number: int, when: When) -> When:
    """The moment ``when`` of a tensor's reader ``number``."""
    return when._replace(number=number)


def storage_end(number: int) -> When:
    """The moment at which the storage of some gradients is let go of: the tensor's end ``number``."""
    return When("backward", "end", number)


class GradientShare(NamedTuple):
    """A gradient that is all-reduced in a bucket with others, over the mesh's ``axes`` (counted with the
    micro-batch axis in front).

    Attributes:
        complete: the moment after which it is; one of ``COMPLETE``.
    """

    axes: tuple[int, ...]
    dtype: str
    elements: int
    complete: When = ARRIVED

    @property
    def bytes(self) -> int:
        """Bytes of the gradient, in the dtype in which it is reduced."""
        return self.elements * DTYPE_BYTES[self.dtype]


class Together(NamedTuple):
    """What a parameter has in a collective with others.

    Attributes:
        send: the collective, were it for this parameter alone.
        dtype: in which it is sent; one collective has one.
        stays: what is sent is no copy, and stays where it is: packed with others it is one more.
    """

    send: Send
    dtype: str
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """What happens at one moment of one micro-batch, or of the step where the moment comes once.

    Attributes:
        after: it takes place as the moment ends, which is when the next one starts.
        kept, transient: bytes that begin (or, below 0, have ended) to be alive as the moment starts; kept for
            backward, or until somebody lets go of them.
        workspace_bytes: bytes alive during this moment only.
        local_s: seconds on the device, of ``source``.
        sends: collectives that the device waits for.
        beside_work_s: seconds of the moment's own work, its last, that begin when the sends do and need
            nothing of them.
        beside: those that run beside what follows, put together with others of the same moment, until the
            next block begins.
        moves: it brings data from one layout to another; its local seconds count as communication where
            compute and communication are told apart.
        share: a gradient that is reduced with others. Its collective is the bucket's.
        host_s: seconds of the host in which it issues the effect to a device of its own; 0 where the host is
            the device.
        passing: seconds in which autograd passes on what moves only the other way; of the edge's
            overheads, and counted by the search where ``sums_passing``. It leaves out what a parameter takes
            that does not move to its use but whose gradient moves back, some 10 us a use.
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
    beside: tuple[Together, ...] = ()
    moves: bool = False
    share: GradientShare | None = None
    host_s: float = 0.0
    passing: Queues = NO_WORK
    sums_passing: bool = True


@dataclass(frozen=True, slots=True)
class Effects:
    """All effects of one owner for one choice, and the bytes that are there all through the step."""

    effects: tuple[Effect, ...]
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0


class Cost(NamedTuple):
    """What effects add up to in one step: bytes, seconds of computing, seconds of communication."""

    memory: float
    compute: float
    communication: float

    def plus(self, *others: Cost) -> Cost:
        """The sum with others, one after the other."""
        return Cost(*(sum(column) for column in zip(self, *others, strict=True)))


NOTHING = Cost(0.0, 0.0, 0.0)


def additive(effects: Effects, prices: Prices) -> Cost:
    """What the search counts of effects: the bytes that last, and all seconds as if nothing overlapped.

    Of each effect it counts the slower of device and host. That is what a step takes whose effects are all
    slower on the same one, and else too much: the host runs ahead through what is slower on the device. The
    simulator, which adds each up by itself, says what the step takes.

    Bytes last that are there all through the step, or kept from forward to backward. What a recomputed region
    keeps while its own backward runs does not last, nor does workspace: of these only the most at any moment
    counts, which no sum can tell (:mod:`tensoropt.costs.working_sets`).
    """
    # The order of the additions is part of the result to the last bit; see TableBuilder._options.
    memory, compute, communication = effects.parameters + effects.gradients + effects.optimizer, 0.0, 0.0
    for effect in effects.effects:
        # The first axis is the micro-batches': what comes in each of them counts as often.
        times = 1 if effect.when.once else prices.mesh[0]
        # All that forward keeps is alive together when forward ends, so that its sum is a peak; what gives it
        # back is an effect of backward and not subtracted. Bytes are not multiplied by ``times``: a
        # micro-batch has given them back before the next one begins.
        if effect.when.phase == "forward":
            memory += effect.kept * prices.in_flight
        # Put together with others a collective takes no longer than by itself.
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
            # Which gradients meet in a bucket is not known to a single parameter: it pays by its bytes.
            part = effect.share.bytes / BUCKET_BYTES
            communication += part * prices.collective_s("all_reduce", effect.share.axes, BUCKET_BYTES)
    return Cost(memory, compute, communication)


class WeightProduct(NamedTuple):
    """The product of a weight's gradient, in the backward of a linear operator.

    Attributes:
        seconds: that it takes.
        bytes: of the weight's gradient.
        spare_bytes: what other parts of the group's backward have more alive at most.
    """

    seconds: float
    bytes: int = 0
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How a group sees a tensor.

    Attributes:
        layout: as it writes or reads it.
        kept: of a writer: the tensor lies in what the group keeps; of a reader: its backward needs it.
        again: the group is recomputed.
        lies_in: of a writer: the tensor, by its short name there, in whose storage this one lies.
        extent: bytes of the storage where these are not the tensor's own; of a reader that of its gradient.
        product: of a linear operator that reads the tensor: that of its weight's gradient, beside which the
            tensor's may be reduced.
        given: of a writer: another stage of a pipeline has made the tensor, and it is held until forward is
            over.
    """

    layout: Layout
    kept: bool
    again: bool = False
    lies_in: str = ""
    extent: int | None = None
    product: WeightProduct | None = None
    given: bool = False


class Keeps(Enum):
    """What has to be kept of a tensor, from forward to backward, for one reader."""

    NOTHING = 0
    SOURCE = 1
    """The storage in which the reader finds the tensor."""
    COPY = 2
    """The reader's own copy, brought to its layout."""


def kept_for(*, kept: bool, again: bool, inside: bool, moved: bool) -> Keeps:
    """What is kept for a reader.

    What enters a recomputed region is kept as it comes, and goes its way into the region again in backward.
    What passes between two groups of one recomputed region is not kept at all.

    Args:
        kept: the reader's backward needs the tensor.
        again: the reader is recomputed.
        inside: the tensor is made in the reader's region.
        moved: the reader has a copy of its own.
    """
    # Asked before ``kept``: a recomputed reader needs its input for the second forward even where its
    # backward would not.
    if again:
        return Keeps.NOTHING if inside else Keeps.SOURCE
    if not kept:
        return Keeps.NOTHING
    return Keeps.COPY if moved else Keeps.SOURCE


def joined(parts: Iterable[Effects]) -> Effects:
    """Effects of several owners as those of one."""
    effects: list[Effect] = []
    parameters = gradients = optimizer = 0
    for part in parts:
        effects += part.effects
        parameters, gradients = parameters + part.parameters, gradients + part.gradients
        optimizer += part.optimizer
    return Effects(tuple(effects), parameters, gradients, optimizer)
