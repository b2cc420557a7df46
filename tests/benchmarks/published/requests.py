"""What a rank asks PyTorch's caching allocator for in a step, and how much of it is there at a time.

The requests are the named allocations of a strategy's step, in order (:mod:`tensoropt.simulate.step`). The
workspace of an instruction is requested when it runs and freed at its end; it includes the results that the
instruction leaves behind. At every moment the requested bytes equal those that the simulator counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensoropt.profiling.optimizers import kind_of
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.collectives import reductions_of
from tensoropt.simulate.step import Instruction, NamedBytes, Step, lower

ALLOCATED, RESERVED, RESERVED_EXPANDABLE = 1.0, 1.056, 1.016
"""What used blocks take over what was requested, and what is taken from the device without and with
``expandable_segments``: the middle of replays of 21 published jobs (results/published/2026-11-27-fits.json:
at most 1.002, 1.024 to 1.175, 1.001 to 1.047)."""


class Request(NamedTuple):
    """Memory that a rank asks for under a name; with 0 bytes, that it returns the oldest of this name."""

    name: Hashable
    bytes: int


@dataclass(frozen=True)
class RankRequests:
    """The requests of a step on one rank.

    Attributes:
        lasting: bytes of the blocks that exist before the first step: parameters, gradients.
        state: bytes of the optimizer's state, which is created at the end of the first step.
        step: the requests of all micro-batches.
        end: the requests of the step's end, where the optimizer's state is first created.
    """

    lasting: Sequence[int]
    state: Sequence[int]
    step: Sequence[Request]
    end: Sequence[Request] = ()

    @classmethod
    def of(cls, lasting: Sequence[int], state: Sequence[int], step: Step) -> RankRequests:
        """Return the requests of a step whose micro-batches run one after another: of two of them, as more
        have no higher peak."""
        micro_batch, end = (
            requests_of(step.instructions[part]) for part in (slice(step.last), slice(step.last, None))
        )
        return cls(lasting, state, micro_batch * min(step.micro_batches, 2), end)

    def peak_bytes(self, beside: Iterable[int] = ()) -> int:
        """Return the most bytes that are requested at a time, once the optimizer's state is there.

        Args:
            beside: bytes of additional blocks that exist all the time.
        """
        now = most = sum((*beside, *self.lasting, *self.state))
        alive: dict[Hashable, list[int]] = defaultdict(list)
        for name, size in (*self.step, *self.end):
            if size:
                alive[name].append(size)
            now += size or -alive[name].pop(0)
            most = max(most, now)
        return most


def requests_of(instructions: Iterable[Instruction]) -> list[Request]:
    """Return the requests of a step's instructions, in order."""
    return [request for now in instructions for request in _requests(now)]


def _requests(now: Instruction) -> Iterator[Request]:
    begins, ends = _requested(now.begins, now.ends)
    yield from (Request(named.name, 0) for named in ends)
    yield from (Request(named.name, named.bytes) for named in begins)
    begins, ends = _requested(now.leaves, now.releases)
    workspace = sorted((named.bytes for named in now.workspace), reverse=True)
    waiting = []
    for named in begins:
        # A result is created while the instruction runs, and is counted there; any other memory only begins
        # when it ends.
        if workspace and workspace[0] >= named.bytes:
            workspace[0] -= named.bytes
            workspace.sort(reverse=True)
            yield Request(named.name, named.bytes)
        else:
            waiting.append(named)
    used = [Request(WORKSPACE, size) for size in workspace if size]
    yield from used
    yield from (Request(WORKSPACE, 0) for _ in used)
    yield from (Request(named.name, 0) for named in ends)
    yield from (Request(named.name, named.bytes) for named in waiting)


WORKSPACE = "workspace"
"""The name of what is alive only while an instruction runs."""


def _requested(
    begins: Sequence[NamedBytes], ends: Sequence[NamedBytes]
) -> tuple[list[NamedBytes], list[NamedBytes]]:
    """Return the allocations that begin, and that end, at one time; one that does both stays where it is, or
    is never there."""
    both = {named.name for named in begins} & {named.name for named in ends}
    left = ([named for named in of if named.name not in both] for of in (begins, ends))
    begun, ended = left
    return begun, ended


def stored_blocks(batch: Batch, row: int) -> tuple[list[int], list[int]]:
    """Return the bytes of the blocks that strategy ``row`` of a batch stores, and of its optimizer's
    state."""
    lasting: list[int] = []
    state: list[int] = []
    for owner in batch.owners:
        effects = owner.effects.at(row)
        lasting += [effects.parameters] if effects.parameters else []
        # Gradients that are reduced are stored in flat buckets, which are added below.
        own = effects.gradients - sum(e.share.bytes for e in effects.effects if e.share is not None)
        lasting += [own] if own else []
        state += state_blocks(effects.optimizer, batch.prices.optimizer)
    lasting += [send.bytes for send in reductions_of(batch, row)]
    return lasting, state


def state_blocks(size: int, optimizer: str) -> list[int]:
    """Return the bytes of each tensor of ``size`` bytes of an optimizer's state."""
    tensors = kind_of(optimizer).state_tensors
    return [size // tensors for _ in range(tensors if size else 0)]


def step_requests(batch: Batch, row: int) -> RankRequests:
    """Return the requests of strategy ``row`` of a batch."""
    return RankRequests.of(*stored_blocks(batch, row), lower(batch, row))
