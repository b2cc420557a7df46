"""The rows of a global batch that each rank loads, for other libraries' loaders.

All ranks follow the batch sampler of rank 0's loader, so that together they train on the rows that a single
process would load with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sized
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from tensoropt.engine.batch_share import BatchShare
from tensoropt.engine.parallel_model import ParallelModel, parallel_of
from tensoropt.errors import PlanError
from tensoropt.execute.sampling import PlanSampler, part_of_rank
from tensoropt.integrations.padding import padded

_DRAWS = "the beginning of an epoch, in which all ranks draw its batches; iterate the loader on every rank"


def divided(loader: DataLoader[Any], model: nn.Module, *, parts: bool = False) -> DataLoader[Any]:
    """Return a loader of this rank's rows of the batches that the loader's own batch sampler draws.

    The loader's batches have the size of the plan's global batch or of a rank's share. In the second case,
    consecutive batches are joined to a global batch. For evaluation in the data's order, global batches may
    have any size. A loader without samplers (``IterableDataset``), or whose sampler gives this rank its
    share, is returned unchanged.

    Args:
        parts: whether each of the loader's batches is a rank's share, whatever its size.

    Raises:
        PlanError: the batch size is not the plan's, batches cannot be divided, or the sampler's shares are
            not the plan's.
    """
    parallel = parallel_of(model)
    whole, share = parallel.global_rows, parallel.engine.share
    world = share.world
    if not whole or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.batch_sampler
    if batches is None:
        if world == 1:
            return loader
        raise PlanError(
            f"this loader has batch_size=None, so that its data set makes the batches, and their rows cannot "
            f"be divided among {world} ranks; pass a batch_size or a batch_sampler"
        )
    order, size = getattr(batches, "sampler", None), getattr(batches, "batch_size", None)
    if any(_is_share(each, share, size) for each in (batches, order)):
        return loader
    if not hasattr(batches, "__len__"):
        raise PlanError(
            f"{type(batches).__name__} of this loader has no length, so ranks cannot agree about an epoch's "
            "batches; give it a __len__"
        )
    in_order = type(order) is SequentialSampler
    if not (parts or in_order or size in (None, whole, whole // world)):
        raise PlanError(
            f"the plan is for global batches of {whole} rows, divided among {world} data-parallel ranks, but "
            f"this loader has batch_size={size}; pass batch_size="
            f"{' or '.join(map(str, sorted({whole, whole // world})))}, or evaluate in the data's order"
        )
    joined = world if parts or size == whole // world else 1
    own = copy.copy(loader)
    # A loader's batch sampler cannot be reassigned.
    own.__dict__ |= {"batch_sampler": _RankBatches(batches, parallel, joined, in_order), "_iterator": None}
    return own


def _is_share(order: Any, share: BatchShare, size: int | None) -> bool:
    if not (hasattr(order, "num_replicas") and hasattr(order, "rank")):
        return False
    if (order.num_replicas, order.rank) != (share.world, share.index):
        raise PlanError(
            f"the sampler of this loader gives rank {order.rank} of {order.num_replicas} its rows, but the "
            f"plan asks this rank for share {share.index} of {share.world}; pass a plain loader, or one with "
            "tensoropt.sampler(model, dataset)"
        )
    if isinstance(order, PlanSampler) and size != order.batch_size:
        raise PlanError(
            f"the sampler of this loader gives this rank {order.batch_size} rows of each global batch, but "
            f"the loader has batch_size={size}; pass batch_size={order.batch_size}"
        )
    return True


class _RankBatches(Sampler[list[Any]]):
    """This rank's rows of the batches that another batch sampler draws.

    Args:
        batches: the batch sampler, which draws the rows of all ranks.
        parallel: the model that runs by the plan.
        joined: the number of consecutive batches that form one global batch.
        in_order: whether batches are in the data's order; a rank's rows are then consecutive.

    Raises:
        PlanError: a batch has too few rows for all ranks, if sizes are known before batches are drawn.

    Attributes:
        batch_sampler, sampler: the batch sampler and its sampler, under the names that trainers use to set an
            epoch.
    """

    def __init__(self, batches: Any, parallel: ParallelModel, joined: int, in_order: bool):
        self.batch_sampler: Any = batches
        self.sampler: Any = getattr(batches, "sampler", None)
        self.joined, self.drop_last = joined, bool(getattr(batches, "drop_last", False))
        self._share, self._together = parallel.engine.share, parallel.together
        self._whole = None if in_order else parallel.global_rows
        size = getattr(batches, "batch_size", None)
        if size is not None and isinstance(self.sampler, Sized):
            size, rows = size * joined, len(self.sampler)
            self._check({size, 0 if self.drop_last else rows % size})

    def _check(self, sizes: Collection[int]) -> None:
        """Refuse global batches that would leave a rank without rows."""
        if few := [size for size in sizes if 0 < size < self._share.world]:
            raise PlanError(
                f"a batch of this loader has {few[0]} rows, which cannot be divided among the "
                f"{self._share.world} data-parallel ranks; pass drop_last=True (dataloader_drop_last of a "
                "Trainer) if it is the last one, or another batch_size"
            )

    def __len__(self) -> int:
        own = len(self.batch_sampler)
        return own // self.joined if self.drop_last else ceil(own / self.joined)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        drawn = self._drawn()
        groups = [drawn[first : first + self.joined] for first in range(0, len(drawn), self.joined)]
        if self.drop_last and groups and len(groups[-1]) < self.joined:
            groups.pop()
        batches = [[x for batch in group for x in batch] for group in groups]
        self._check({len(batch) for batch in batches})
        for batch in batches:
            yield [batch[row] for row in self._rows(len(batch))]

    def _rows(self, count: int) -> Collection[int]:
        # As in the plan's micro-batches, or for evaluation in the data's order when joined.
        return self._share.rows(count) if count == self._whole else part_of_rank(count, self._share)

    def _drawn(self) -> list[list[Any]]:
        """Return the batches of an epoch, as rank 0 draws them."""
        # Every rank draws, so that random states stay equal.
        own = [[int(x) if isinstance(x, torch.Tensor) else x for x in batch] for batch in self.batch_sampler]
        if self._together is None:
            return own
        drawn: list[list[Any]] = self._together.of_first(own, _DRAWS)
        apart = {x for batch in own for x in batch}.isdisjoint(x for batch in drawn for x in batch)
        if self._together.summed(torch.tensor(float(apart and len(drawn) > 0)), _DRAWS):
            raise PlanError(
                f"{type(self.sampler or self.batch_sampler).__name__} of this loader draws on one rank rows "
                "that it does not draw on another, but all ranks follow rank 0's; let it draw the rows of "
                "all ranks, from one seed, or give it attributes rank and num_replicas (model.data_rank and "
                "model.data_world) if it divides them itself"
            )
        return drawn


def prepared_by(accelerator: Any, loader: DataLoader[Any], model: nn.Module) -> DataLoader[Any]:
    """Wrap a loader of this rank's rows in accelerate's loader, and pad batches to the plan's length."""
    from accelerate.data_loader import prepare_data_loader

    stream = isinstance(loader.dataset, IterableDataset)
    prepared: DataLoader[Any] = prepare_data_loader(
        padded(loader, model),
        accelerator.device,
        num_processes=model.__dict__["data_world"] if stream else 1,
        process_index=model.__dict__["data_rank"] if stream else 0,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        rng_types=accelerator.rng_types.copy(),
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def rows_of_all(model: nn.Module, values: Any) -> Any:
    """Return tensors with the rows of all data-parallel ranks, one share after another; scalars unchanged.

    Args:
        values: a tensor with this rank's rows, or a structure of tensors, the same structure on all ranks.
    """
    share = parallel_of(model).engine.share

    def joined(value: torch.Tensor) -> torch.Tensor:
        return share.rows_of_all(value) if value.dim() else value

    return tree_map_only(torch.Tensor, joined, values)
