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
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
LEAST_BYTES = 512
"""``kMinBlockSize``: requests are rounded up to multiples of it."""
SMALL_BYTES = MIB
"""``kSmallSize``: the largest request of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""``large_segment_size``, formerly ``kLargeBuffer``."""
LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""``kMinLargeAlloc``: from this size on, a request has a segment of its own size."""
ROUNDED_SEGMENT_BYTES = 2 * MIB
"""``kRoundLarge``: such segments are multiples of it."""


def rounded_bytes(size: int) -> int:
    """The size that the allocator serves for a request (``round_size``)."""
    return max(-(-size // LEAST_BYTES), 1) * LEAST_BYTES


def segment_bytes(rounded: int) -> int:
    """Bytes allocated on the device for a rounded request that no block serves (``get_allocation_size``)."""
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LEAST_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // ROUNDED_SEGMENT_BYTES) * ROUNDED_SEGMENT_BYTES


class AllocatorBlock:
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
        self.before: AllocatorBlock | None = None
        self.behind: AllocatorBlock | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The order of free blocks: by size, and of equals by address."""
        return self.size, self.address


class _Pool:
    """The free blocks for small requests, or for others; ``page`` bytes are mapped at once."""

    def __init__(self, *, small: bool):
        self.small = small
        self.page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.order: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], AllocatorBlock] = {}
        self.unmapped: AllocatorBlock | None = None

    def add(self, block: AllocatorBlock) -> None:
        insort(self.order, block.key)
        self.blocks[block.key] = block

    def take(self, block: AllocatorBlock) -> None:
        del self.order[bisect_left(self.order, block.key)]
        del self.blocks[block.key]

    def fitting(self, size: int) -> AllocatorBlock | None:
        """Smallest free block with that many bytes; one that can grow counts with all that it can grow to."""
        at = bisect_left(self.order, (size, -1))
        if at == len(self.order):
            return None
        found = self.blocks[self.order[at]]
        while at + 1 < len(self.order) and _growing(self.blocks[self.order[at + 1]]) < _growing(found):
            at += 1
            found = self.blocks[self.order[at]]
        return found


def _growing(block: AllocatorBlock) -> int:
    behind = block.behind
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


@dataclass(frozen=True)
class AllocatorPeaks:
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
        requested, allocated, reserved: current bytes, as in :class:`AllocatorPeaks`.
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
    def peaks(self) -> AllocatorPeaks:
        """The peaks so far."""
        return AllocatorPeaks(self._most_requested, self._most_allocated, self.reserved)

    def allocate(self, size: int) -> AllocatorBlock:
        """Return a block of at least ``size`` bytes, which must be above 0."""
        assert size > 0, "PyTorch asks its allocator for no memory for an empty tensor"
        rounded = rounded_bytes(size)
        pool = self._small if rounded <= SMALL_BYTES else self._large
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

    def free(self, block: AllocatorBlock) -> None:
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
        """``should_split``."""
        return rest >= LEAST_BYTES if pool.small or self.expandable else rest > SMALL_BYTES

    def _cut(self, block: AllocatorBlock, size: int) -> None:
        """Return everything after the first ``size`` bytes to the pool."""
        rest = AllocatorBlock(block.pool, block.address + size, block.size - size)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        block.pool.add(rest)

    def _segment(self, pool: _Pool, size: int) -> AllocatorBlock:
        """A native segment."""
        block = AllocatorBlock(pool, self._next_address, size)
        self._next_address += size
        self.reserved += size
        return block

    def _grown(self, pool: _Pool, size: int) -> AllocatorBlock:
        """Memory at the end of the pool's pages, joined with the free space before it
        (``try_allocate_expandable_block``)."""
        if pool.unmapped is None:
            pool.unmapped = AllocatorBlock(pool, self._next_address, self.ADDRESSES, mapped=False)
            self._next_address += self.ADDRESSES
        end = pool.unmapped
        free = end.before if end.before is not None and not end.before.used else None
        there = 0
        if free is not None:
            pool.take(free)
            there = free.size
        mapped = -(-(size - there) // pool.page) * pool.page
        block = AllocatorBlock(pool, end.address, mapped)
        block.before, block.behind = end.before, end
        if end.before is not None:
            end.before.behind = block
        end.before = block
        end.address, end.size = end.address + mapped, end.size - mapped
        self.reserved += mapped
        if free is not None:
            _join(block, free)
        return block


def _join(block: AllocatorBlock, neighbour: AllocatorBlock) -> None:
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
