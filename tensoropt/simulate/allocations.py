"""What a strategy's step asks an allocator for, in order: the simulator's effects as requests.

The simulator counts bytes; an allocator serves blocks. Every effect that takes memory is taken to ask for one
block, and every one that gives back ends blocks of the same owner, of equal size where there is one. What a
moment needs for itself (its workspace) is asked for as it runs and given back at its end; results that the
moment leaves behind are among it. At every moment as many bytes are asked for as the simulator counts.

Assumed: what an effect sums up (a group's saved tensors, all that is alive at the peak of its kernels) is
one block, though kernels ask for its parts at different moments; all is asked for on one stream; two
micro-batches and two steps reserve as much as more of them do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensoropt.profiling.optimizers import OPTIMIZERS
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.caching_allocator import AllocatorPeaks, Block, CachingAllocator
from tensoropt.simulate.recording import ALLOCATOR
from tensoropt.simulate.reductions import reductions_of

REPEATS = 2
"""Micro-batches of a step, and steps, that are replayed: in the second one gaps of the first are reused."""


@dataclass
class Moment:
    """What is asked for and given back at one moment, as (owner, bytes).

    Attributes:
        ended, begun: as it starts.
        left: results that it leaves behind.
        ending: as it ends.
        workspace: of each owner, while it lasts; ``left`` is among it.
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
        lasting: bytes of the blocks that are there before the first step: parameters, gradients.
        state: of the optimizer's state, which the end of the first step makes.
        moments: of one micro-batch, then of the step's end.
        last: the number of moments in a micro-batch.
        micro_batches: in a step.
    """

    lasting: Sequence[int]
    state: Sequence[int]
    moments: Sequence[Moment]
    last: int
    micro_batches: int

    def replay(self, *, expandable: bool = False, beside: Sequence[int] = ()) -> AllocatorPeaks:
        """What an allocator does with them.

        Args:
            beside: bytes of further blocks that are there all the time.
        """
        allocator = CachingAllocator(expandable=expandable)
        for size in (*beside, *self.lasting):
            allocator.allocate(size)
        owned: dict[int, list[Block]] = {}
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
    """The allocator's peaks in strategy ``row`` of a batch, with what the process itself has there.

    By the names of :data:`~tensoropt.simulate.recording.ALLOCATOR`; nothing of strategies whose process
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
    moments = [Moment([], [], [], [], []) for _ in range(count)]
    lasting: list[int] = []
    state: list[int] = []
    for number, owner in enumerate(batch.owners):
        effects = owner.effects.at(row)
        lasting += [effects.parameters] if effects.parameters else []
        # Gradients that are reduced lie in flat buckets, which are added below.
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


def _pass(allocator: CachingAllocator, owned: dict[int, list[Block]], moment: Moment) -> None:
    """Ask for and give back what one moment does."""
    for owner, size in moment.ended:
        _end(allocator, owned.setdefault(owner, []), -size)
    for owner, size in moment.begun:
        owned.setdefault(owner, []).append(allocator.allocate(size))
    workspace = sorted(moment.workspace, reverse=True)
    waiting = []
    for owner, size in moment.left:
        # A result is made while the moment runs, and counted there; what is not only begins when it ends.
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


def _end(allocator: CachingAllocator, blocks: list[Block], size: int) -> None:
    """Give back so many bytes of an owner's blocks: one of that size, else the oldest first."""
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
        if rest > 0:  # what was one sum is given back in parts
            blocks.insert(0, allocator.allocate(rest))
