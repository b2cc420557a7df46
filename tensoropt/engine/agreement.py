"""The data on which the ranks of a job must agree, compared by hashes before anything depends on it.

Every rank reads its part of the global batch from what its script passes, and its part of the weights from
those that its script made. Ranks that differ in them train a meaningless mixture, whose loss falls all the
same.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tensoropt.errors import PlanError

CHUNK = 1 << 18
"""Words that are hashed at once: 2 MiB, so that intermediate results stay in a core's cache."""
FIRST, EVERY = 3, 1000
"""The calls in which inputs are compared: so many at first, then one in so many."""
_STEP = 6364136223846793005  # Knuth's multiplier of a linear congruence modulo 2^64 (MMIX)


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device, count: int) -> torch.Tensor:
    """Return odd multipliers, one for each word of a chunk: a change of a single word changes the sum.

    They are kept, and there are only as many as the largest tensors hashed so far need.
    """
    generator = torch.Generator().manual_seed(44)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator)
    return (drawn | 1).to(device)


@torch.no_grad()
def content_hash(value: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits, type and shape: an int64 scalar on its device, made without waiting
    for it.

    The hash is a sum of words times odd numbers, modulo 2^64, over chunks; it is the same on every device.
    """
    data = value.detach()
    if data.is_quantized or data.layout is not torch.strided:
        data = data.dequantize() if data.is_quantized else data.to_dense()
    data = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    # A view needs its start at a multiple of eight bytes, which a slice of a larger tensor may not have.
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    about = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    total = torch.full((), about, dtype=torch.int64, device=data.device)
    # A power of two, and enough for what remains after the last whole word.
    multipliers = _weights(data.device, min(CHUNK, 1 << max(words.numel() - 1, 7).bit_length()))
    for chunk in words.split(CHUNK):
        total = total * _STEP + (chunk * multipliers[: chunk.numel()]).sum()
    if whole < data.numel():
        rest = data[whole:].to(torch.int64)
        total = total * _STEP + (rest * multipliers[: rest.numel()]).sum()
    return total


def text_hash(text: str) -> int:
    """Return a number of 62 bits that identifies a text, equal on every rank."""
    data = text.encode()
    return zlib.crc32(data) << 30 ^ zlib.adler32(data)


def gathered(row: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks on the host; every rank's row has the same length."""
    rows = torch.empty(dist.get_world_size() * row.numel(), dtype=row.dtype, device=row.device)
    dist.all_gather_single(rows, row)
    return rows.view(-1, row.numel()).cpu()


class SameCalls:
    """Compares what ranks pass to the model, in the first calls and every so often.

    Args:
        names: the names of the inputs, in order.
        reads: whether this rank's part of the plan reads each of them: a rank may pass zeros for inputs that
            it does not read.
        device: this rank's device.
    """

    def __init__(self, names: Sequence[str], reads: Sequence[bool], device: torch.device):
        self.names, self.reads, self.device = list(names), list(reads), device
        self.calls = 0

    def due(self) -> bool:
        """Return whether this call is compared; every rank's answer is the same in the same call."""
        self.calls += 1
        return self.calls <= FIRST or self.calls % EVERY == 0

    def compare(self, inputs: Sequence[torch.Tensor] | None, mode: int) -> None:
        """Compare a call with that of the other ranks; all ranks must call this before they send anything
        else.

        Args:
            inputs: the graph's inputs; None if this rank refuses its call.
            mode: what else must be the same on all ranks: training or evaluation, with or without gradients.

        Raises:
            PlanError: another rank passes something else, or refuses its call.
        """
        count = len(self.names)
        row = torch.zeros(2 + 2 * count, dtype=torch.int64, device=self.device)
        row[:2] = torch.tensor([inputs is None, mode])
        for index, (value, read) in enumerate(zip(inputs or (), self.reads, strict=False)):
            row[2 + index] = 1 if read else value.detach().any()
            row[2 + count + index] = content_hash(value)
        rows = gathered(row).tolist()
        if inputs is None:
            return  # this rank's own refusal says more
        refused = [rank for rank, other in enumerate(rows) if other[0]]
        if refused:
            raise PlanError(f"rank {refused[0]} refused this call of the model, and says why itself")
        for rank, other in enumerate(rows):
            if other[1] != rows[0][1]:
                raise PlanError(
                    f"rank {rank} calls the model {MODES[other[1]]}, but rank 0 {MODES[rows[0][1]]}; every "
                    "rank makes the same calls"
                )
        for index, name in enumerate(self.names):
            given = [rank for rank, other in enumerate(rows) if other[2 + index]]
            for rank in given[1:]:
                if rows[rank][2 + count + index] != rows[given[0]][2 + count + index]:
                    raise PlanError(
                        f"rank {rank} passed another batch than rank {given[0]} in {name}; every rank "
                        "passes the same global batch: use one sampler with one seed on all ranks, and no "
                        "DistributedSampler"
                    )


MODES = ("in evaluation under no_grad", "in evaluation", "in training under no_grad", "in training")


def mode_of(training: bool, gradients: bool) -> int:
    """Return the number of a mode in :data:`MODES`."""
    return 2 * training + gradients


def first_differing(hashes: Mapping[str, torch.Tensor], device: torch.device) -> tuple[str, int] | None:
    """Return the first tensor that differs between ranks, and a rank whose tensor differs from rank 0's.

    Args:
        hashes: the hashes of all tensors by name; every rank has the same names, in the same order.
        device: this rank's device.
    """
    if not hashes:
        return None
    rows = gathered(torch.stack([value.to(device) for value in hashes.values()]))
    different = (rows != rows[0]).nonzero()
    if not len(different):
        return None
    # By tensor first: the one that comes first in the model is the most informative.
    column = int(different[:, 1].min())
    rank = int(different[different[:, 1] == column][0, 0])
    return list(hashes)[column], rank
