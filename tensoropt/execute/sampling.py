"""A sampler that gives each rank its share of the data, as the rank's plan divides batches.

Scripts use this sampler like ``torch.utils.data.DistributedSampler``, which divides by rank and world size.
That is wrong where ranks share rows (tensor parallelism). The sampler can resume at any step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError


def part_of_rank(rows: int, share: BatchShare) -> Sequence[int]:
    """Return this rank's consecutive row indices in a batch; none if the batch has fewer rows than shares."""
    if rows < share.world:
        return range(0)
    return range(rows * share.index // share.world, rows * (share.index + 1) // share.world)


class PlanSampler(Sampler[int]):
    """Yields this rank's indices of a data set, one global batch after the other.

    With ``DataLoader(dataset, sampler.batch_size, sampler=sampler)`` all ranks together read the batches of a
    single process that shuffles with the same seed. A smaller last batch is spread over the ranks. Without
    shuffling, a rank's rows of a batch are consecutive, so that all ranks' rows, joined, are in the data's
    order.

    Args:
        model: the parallelized model.
        dataset: the data, or anything with a length.
        shuffle: whether to draw a new order in each epoch, from ``seed`` and the epoch.
        seed: the seed of the order, the same on every rank.
        drop_last: whether to leave out rows that do not fill a global batch.
        batch_size: the number of rows of a global batch; by default the plan's. Any number in evaluation.

    Raises:
        PlanError: the model is not parallelized, none of its inputs has a batch dim, or a batch has fewer
            rows than there are shares.

    Attributes:
        global_batch_size: the number of rows of a global batch.
        batch_size: the number of rows that this rank passes per call.
        rank, num_replicas: the number of this rank's share, and the number of shares.
        epoch: the number of the epoch (:meth:`set_epoch`).
        start: the number of global batches to skip, to resume within an epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batch_size: int | None = None,
    ):
        parallel = parallel_of(model)
        if not parallel.global_rows:
            raise PlanError(
                "no input of this plan has a batch dim, so there are no rows to divide; pass inputs as they "
                "are"
            )
        self.share = parallel.engine.share
        self.global_batch_size = batch_size or parallel.global_rows
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.rank, self.num_replicas = self.share.index, self.share.world
        plans = self.global_batch_size == parallel.global_rows
        self._rows = part_of_rank(self.global_batch_size, self.share)
        if shuffle and plans:
            self._rows = self.share.rows(parallel.global_rows)  # the rows in the plan's micro-batches
        self.batch_size = len(self._rows)
        self.epoch = self.start = 0
        world, rows, last = self.num_replicas, self.global_batch_size, self._last()
        if not self.batch_size:
            raise PlanError(
                f"batches of {rows} rows cannot be divided among the {world} data-parallel ranks; pass "
                f"batch_size={world} or more"
            )
        if 0 < last < world:
            raise PlanError(
                f"the last of the batches of {rows} rows from {len(dataset)} samples has {last}, which "
                f"cannot be divided among {world} ranks; pass drop_last=True, or another number of samples"
            )

    def set_epoch(self, epoch: int) -> None:
        """Draw a new order and begin at its start, unless :meth:`load_state_dict` resumes in this very epoch.

        Every rank calls it before each epoch with the same number.
        """
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data: the epoch, and the number of batches to skip."""
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at a position that :meth:`state_dict` returned."""
        self.epoch, self.start = state["epoch"], state["start"]

    def _last(self) -> int:
        return 0 if self.drop_last else len(self.dataset) % self.global_batch_size

    def _of_last(self) -> Sequence[int]:
        return part_of_rank(self._last(), self.share)

    def __len__(self) -> int:
        batches = len(self.dataset) // self.global_batch_size - self.start
        return max(batches, 0) * self.batch_size + len(self._of_last())

    def __iter__(self) -> Iterator[int]:
        count, size = len(self.dataset), self.global_batch_size
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        else:
            order = list(range(count))
        for first in range(self.start * size, count - count % size, size):
            yield from (order[first + row] for row in self._rows)
        yield from (order[count - self._last() + row] for row in self._of_last())


def sampler(model: nn.Module, dataset: Sized, **settings: Any) -> PlanSampler:
    """Return a :class:`PlanSampler` of this rank's rows of a data set; ``settings`` are its arguments."""
    return PlanSampler(model, dataset, **settings)
