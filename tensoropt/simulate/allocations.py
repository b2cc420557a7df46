"""The requests that a strategy's step makes to an allocator, in order, derived from the simulator's effects.

The simulator counts bytes; an allocator serves blocks. Every effect that takes memory is assumed to request
one block, and every effect that gives memory back ends blocks of the same owner, of equal size if there is
one. The workspace of a moment is requested when it runs and freed at its end; it includes the results that
the moment leaves behind. At every moment the requested bytes equal those that the simulator counts.

Assumptions: the sum in an effect (a group's saved tensors, everything alive at the peak of its kernels) is
one block, although kernels request its parts at different moments; all requests are on one stream; two
micro-batches and two steps reserve as much as more of them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.caching_allocator import AllocatorBlock, AllocatorPeaks, CachingAllocator
from tensoropt.simulate.recording import ALLOCATOR
from tensoropt.simulate.reductions import reductions_of

REPEATS = 2
"""The number of replayed micro-batches per step, and of replayed steps: the second one reuses gaps of the
first."""


@dataclass
class MomentRequests:
    """The requests and frees of one moment, as (owner, bytes).

    Attributes:
        ended, begun: when it starts.
        left: results that it leaves behind.
        ending: when it ends.
        workspace: of each owner, for the duration of the moment; it includes ``left``.
    """

    ended: list[tuple[int, int]]
    begun: list[tuple[int, int]]
    left: list[tuple[int, int]]
    ending: list[tuple[int, int]]
    workspace: list[int]


@dataclass(frozen=True)
class StepRequests:
    """The requests of one strategy's step on one rank.

    Attributes:
        lasting: bytes of the blocks that exist before the first step: parameters, gradients.
        state: bytes of the optimizer's state, which is created at the end of the first step.
        moments: those of one micro-batch, followed by those of the step's end.
        last: the number of moments in a micro-batch.
        micro_batches: the number per step.
    """

    lasting: Sequence[int]
    state: Sequence[int]
    moments: Sequence[MomentRequests]
    last: int
    micro_batches: int

    def replay(self, *, expandable: bool = False, beside: Sequence[int] = ()) -> AllocatorPeaks:
        """Replay the requests in an allocator and return its peaks.

        Args:
            beside: bytes of additional blocks that exist all the time.
        """
        allocator = CachingAllocator(expandable=expandable)
        for size in (*beside, *self.lasting):
            allocator.allocate(size)
        owned: dict[int, list[AllocatorBlock]] = {}
        for step in range(REPEATS):
            for _ in range(min(self.micro_batches, REPEATS)):
                for moment in self.moments[: self.last]:
                    _pass(allocator, owned, moment)
            if step == 0:
                for size in self.state:
                    allocator.allocate(size)
            for moment in self.moments[self.last :]:
                _pass(allocator, owned, moment)
        return allocator.peaks


def replayed(batch: Batch, row: int) -> dict[str, float]:
    """The allocator's peaks in strategy ``row`` of a batch, including the process's own blocks.

    The names are those of :data:`~tensoropt.simulate.recording.ALLOCATOR`; empty for strategies whose process
    memory is not counted.
    """
    process = batch.prices.process
    if not process.of_process:
        return {}
    requests = step_requests(batch, row)
    native, grown = (requests.replay(expandable=way, beside=process.blocks) for way in (False, True))
    figures = (native.requested, native.allocated, native.reserved, grown.reserved)
    return dict(zip(ALLOCATOR, map(float, figures), strict=True))


def step_requests(batch: Batch, row: int) -> StepRequests:
    """The requests of strategy ``row`` of a batch."""
    count = len(batch.schedule.moments)
    moments = [MomentRequests([], [], [], [], []) for _ in range(count)]
    lasting: list[int] = []
    state: list[int] = []
    for number, owner in enumerate(batch.owners):
        effects = owner.effects.at(row)
        lasting += [effects.parameters] if effects.parameters else []
        # Gradients that are reduced are stored in flat buckets, which are added below.
        own = effects.gradients - sum(e.share.bytes for e in effects.effects if e.share is not None)
        lasting += [own] if own else []
        if effects.optimizer:
            tensors = OPTIMIZERS[batch.prices.optimizer].state
            state += [effects.optimizer // tensors] * tensors
        for effect in effects.effects:
            position, size = owner.position(effect.when), effect.kept + effect.transient
            if not 0 <= position < count:
                continue
            at = moments[position]
            if size:
                late = (at.left if size > 0 else at.ending) if effect.after else None
                (late if late is not None else at.begun if size > 0 else at.ended).append((number, size))
            if effect.workspace_bytes:
                at.workspace.append(effect.workspace_bytes)
    lasting += [send.bytes for send in reductions_of(batch, row)]
    return StepRequests(lasting, state, moments, batch.schedule.last, batch.mesh[0])


def _pass(
    allocator: CachingAllocator, owned: dict[int, list[AllocatorBlock]], moment: MomentRequests
) -> None:
    """Make the requests and frees of one moment."""
    for owner, size in moment.ended:
        _end(allocator, owned.setdefault(owner, []), -size)
    for owner, size in moment.begun:
        owned.setdefault(owner, []).append(allocator.allocate(size))
    workspace = sorted(moment.workspace, reverse=True)
    waiting = []
    for owner, size in moment.left:
        # A result is created while the moment runs, and is counted there; any other memory only begins when
        # it ends.
        if workspace and workspace[0] >= size:
            workspace[0] -= size
            workspace.sort(reverse=True)
            owned.setdefault(owner, []).append(allocator.allocate(size))
        else:
            waiting.append((owner, size))
    used = [allocator.allocate(size) for size in workspace if size]
    for block in used:
        allocator.free(block)
    for owner, size in moment.ending:
        _end(allocator, owned.setdefault(owner, []), -size)
    for owner, size in waiting:
        owned.setdefault(owner, []).append(allocator.allocate(size))


def _end(allocator: CachingAllocator, blocks: list[AllocatorBlock], size: int) -> None:
    """Free ``size`` bytes of an owner's blocks: one of that size, otherwise the oldest first."""
    same = next((block for block in blocks if block.requested == size), None)
    if same is not None:
        blocks.remove(same)
        allocator.free(same)
        return
    while size > 0:
        assert blocks, "nothing gives back more than it has taken"
        block = blocks.pop(0)
        rest = block.requested - size
        size -= block.requested
        allocator.free(block)
        if rest > 0:  # a single sum is given back in parts
            blocks.insert(0, allocator.allocate(rest))
