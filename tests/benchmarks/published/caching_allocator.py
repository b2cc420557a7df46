"""PyTorch's caching allocator for CUDA memory, simulated without memory: what a sequence of requests
reserves.

Written after ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` (PyTorch 2.13), for the
default settings and one stream. A request is rounded up to 512 bytes. Requests of up to 1 MiB and larger ones
have separate pools; a pool returns its smallest free block that is large enough, of equals the one with the
lowest address, and cuts off the rest if that is worth it. If no block fits:

- *native*: a segment is allocated on the device, of 2 MiB for small requests, of 20 MiB for those below 10
  MiB, otherwise of the request rounded up to 2 MiB. A segment is never joined with another one.
- *expandable* (``expandable_segments:True``): a pool has one address range, and maps pages where it is used:
  of 2 MiB for small requests, of 20 MiB for others. Free space at the end of the pages can grow.

Freed blocks join their free neighbours. Nothing is returned to the device: PyTorch does that only if the
device has no more memory.

The requests are the named allocations of a strategy's step, in order (:mod:`tensoropt.simulate.step`). The
workspace of an instruction is requested when it runs and freed at its end; it includes the results that the
instruction leaves behind. At every moment the requested bytes equal those that the simulator counts.

Assumptions: each allocation (a group's saved tensors, everything alive at the peak of its kernels) is
one block, although kernels request its parts at different moments; all requests are on one stream; two
micro-batches and two steps reserve as much as more of them do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensoropt.profiling.optimizers import kind_of
from tensoropt.simulate.batch import Batch
from tensoropt.simulate.collectives import reductions_of
from tensoropt.simulate.step import Instruction, NamedBytes, Step, lower

ALLOCATOR = ("requested", "allocated", "reserved", "reserved_expandable")
"""The figures of a replay of PyTorch's allocator: the peaks of what was requested, what blocks occupied, and
what was taken from the device, without and with expandable segments; in bytes."""

MIB = 2**20
_LEAST_BYTES = 512
"""``kMinBlockSize``: requests are rounded up to multiples of it."""
_SMALL_BYTES = MIB
"""``kSmallSize``: the largest request of the small pool."""
_SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``."""
_LARGE_SEGMENT_BYTES = 20 * MIB
"""``large_segment_size``, formerly ``kLargeBuffer``."""
_LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""``kMinLargeAlloc``: from this size on, a request has a segment of its own size."""
_ROUNDED_SEGMENT_BYTES = 2 * MIB
"""``kRoundLarge``: such segments are multiples of it."""


def rounded_bytes(size: int) -> int:
    """Return the size that the allocator serves for a request (``round_size``)."""
    return max(-(-size // _LEAST_BYTES), 1) * _LEAST_BYTES


def segment_bytes(rounded: int) -> int:
    """Return the bytes allocated on the device for a rounded request that no block serves
    (``get_allocation_size``)."""
    if rounded <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if rounded < _LEAST_OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-rounded // _ROUNDED_SEGMENT_BYTES) * _ROUNDED_SEGMENT_BYTES


class _AllocatorBlock:
    """A piece of a segment, used or free.

    Attributes:
        size: bytes; for a used block, those that the request occupies.
        requested: for a used block, the requested bytes.
        mapped: whether it has memory, rather than only addresses.
        before, behind: its neighbours in the segment.
    """

    __slots__ = ("address", "before", "behind", "mapped", "pool", "requested", "size", "used")

    def __init__(self, pool: _Pool, address: int, size: int, *, mapped: bool = True):
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.used, self.requested = False, 0
        self.before: _AllocatorBlock | None = None
        self.behind: _AllocatorBlock | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The order of free blocks: by size, and of equals by address."""
        return self.size, self.address


class _Pool:
    """The free blocks for small requests, or for others; ``page`` bytes are mapped at once."""

    def __init__(self, *, small: bool):
        self.small = small
        self.page = _SMALL_SEGMENT_BYTES if small else _LARGE_SEGMENT_BYTES
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], _AllocatorBlock] = {}
        self.unmapped: _AllocatorBlock | None = None

    def add(self, block: _AllocatorBlock) -> None:
        insort(self.order, block.key)
        self.blocks[block.key] = block

    def take(self, block: _AllocatorBlock) -> None:
        del self.order[bisect_left(self.order, block.key)]
        del self.blocks[block.key]

    def fitting(self, size: int) -> _AllocatorBlock | None:
        """Return the smallest free block with that many bytes; one that can grow counts with all that it can
        grow to."""
        at = bisect_left(self.order, (size, -1))
        if at == len(self.order):
            return None
        found = self.blocks[self.order[at]]
        while at + 1 < len(self.order) and _growing(self.blocks[self.order[at + 1]]) < _growing(found):
            at += 1
            found = self.blocks[self.order[at]]
        return found


def _growing(block: _AllocatorBlock) -> int:
    behind = block.behind
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


@dataclass(frozen=True)
class _AllocatorPeaks:
    """The most bytes at any time.

    Attributes:
        requested: the requested bytes.
        allocated: the bytes of used blocks: ``torch.cuda.max_memory_allocated``.
        reserved: the bytes taken from the device: ``torch.cuda.max_memory_reserved``.
    """

    requested: int
    allocated: int
    reserved: int


class CachingAllocator:
    """One device's allocator.

    Args:
        expandable: with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Attributes:
        requested, allocated, reserved: current bytes, as in :class:`_AllocatorPeaks`.
    """

    ADDRESSES = 2**50
    """The addresses of an expandable segment: more than any device has."""

    def __init__(self, *, expandable: bool = False):
        self.expandable = expandable
        self.requested = self.allocated = self.reserved = 0
        self._most_requested = self._most_allocated = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        # The addresses of segments on a device are unknown: they follow one another, as on an empty device.
        self._next_address = 0

    @property
    def peaks(self) -> _AllocatorPeaks:
        """The peaks so far."""
        return _AllocatorPeaks(self._most_requested, self._most_allocated, self.reserved)

    def allocate(self, size: int) -> _AllocatorBlock:
        """Return a block of at least ``size`` bytes, which must be above 0."""
        assert size > 0, "PyTorch asks its allocator for no memory for an empty tensor"
        rounded = rounded_bytes(size)
        pool = self._small if rounded <= _SMALL_BYTES else self._large
        block = pool.fitting(rounded)
        if block is not None:
            pool.take(block)
        elif self.expandable:
            block = self._grown(pool, rounded)
        else:
            block = self._segment(pool, segment_bytes(rounded))
        if self._is_worth_cutting(pool, block.size - rounded):
            self._cut(block, rounded)
        block.used, block.requested = True, size
        self.requested, self.allocated = self.requested + size, self.allocated + block.size
        self._most_requested = max(self._most_requested, self.requested)
        self._most_allocated = max(self._most_allocated, self.allocated)
        return block

    def free(self, block: _AllocatorBlock) -> None:
        """Free a block."""
        assert block.used, "a block can be given back only once"
        self.requested, self.allocated = self.requested - block.requested, self.allocated - block.size
        block.used, block.requested = False, 0
        for neighbour in (block.before, block.behind):
            if neighbour is not None and neighbour.mapped and not neighbour.used:
                block.pool.take(neighbour)
                _join(block, neighbour)
        block.pool.add(block)

    # -- segments -----------------------------------------------------------------------------------

    def _is_worth_cutting(self, pool: _Pool, rest: int) -> bool:
        """Return whether the rest of a block is worth cutting off (``should_split``)."""
        return rest >= _LEAST_BYTES if pool.small or self.expandable else rest > _SMALL_BYTES

    def _cut(self, block: _AllocatorBlock, size: int) -> None:
        """Return everything after the first ``size`` bytes to the pool."""
        rest = _AllocatorBlock(block.pool, block.address + size, block.size - size)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        block.pool.add(rest)

    def _segment(self, pool: _Pool, size: int) -> _AllocatorBlock:
        """Return a native segment."""
        block = _AllocatorBlock(pool, self._next_address, size)
        self._next_address += size
        self.reserved += size
        return block

    def _grown(self, pool: _Pool, size: int) -> _AllocatorBlock:
        """Return memory at the end of the pool's pages, joined with the free space before it
        (``try_allocate_expandable_block``)."""
        if pool.unmapped is None:
            pool.unmapped = _AllocatorBlock(pool, self._next_address, self.ADDRESSES, mapped=False)
            self._next_address += self.ADDRESSES
        end = pool.unmapped
        free = end.before if end.before is not None and not end.before.used else None
        there = 0
        if free is not None:
            pool.take(free)
            there = free.size
        mapped = -(-(size - there) // pool.page) * pool.page
        block = _AllocatorBlock(pool, end.address, mapped)
        block.before, block.behind = end.before, end
        if end.before is not None:
            end.before.behind = block
        end.before = block
        end.address, end.size = end.address + mapped, end.size - mapped
        self.reserved += mapped
        if free is not None:
            _join(block, free)
        return block


def _join(block: _AllocatorBlock, neighbour: _AllocatorBlock) -> None:
    """Make a free neighbour part of a block."""
    if block.before is neighbour:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.behind = block
    else:
        block.behind = neighbour.behind
        if block.behind is not None:
            block.behind.before = block
    block.size += neighbour.size


_REPEATS = 2
"""The number of replayed micro-batches of a sharded plan's step, and of replayed steps of any plan: the
second one reuses gaps of the first."""


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
        """Return the requests of a step whose micro-batches run one after another."""
        micro_batch, end = (
            requests_of(step.instructions[part]) for part in (slice(step.last), slice(step.last, None))
        )
        return cls(lasting, state, micro_batch * min(step.micro_batches, _REPEATS), end)

    def replay(self, *, expandable: bool = False, beside: Sequence[int] = ()) -> _AllocatorPeaks:
        """Replay the requests in an allocator and return its peaks.

        Args:
            beside: bytes of additional blocks that exist all the time.
        """
        allocator = CachingAllocator(expandable=expandable)
        for size in (*beside, *self.lasting):
            allocator.allocate(size)
        alive: dict[Hashable, list[_AllocatorBlock]] = defaultdict(list)
        for number in range(_REPEATS):
            _serve(self.step, allocator, alive)
            for size in () if number else self.state:
                allocator.allocate(size)
            _serve(self.end, allocator, alive)
        return allocator.peaks


def _serve(
    requests: Iterable[Request], allocator: CachingAllocator, alive: dict[Hashable, list[_AllocatorBlock]]
) -> None:
    for name, size in requests:
        if size:
            alive[name].append(allocator.allocate(size))
        else:
            allocator.free(alive[name].pop(0))


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
