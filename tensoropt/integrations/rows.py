"""The rows of a global batch that each rank loads, for loaders that other libraries hand over."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from tensoropt.engine.parallel_model import parallel_of
from tensoropt.errors import PlanError
from tensoropt.execute.sampling import PlanSampler, rows_of_rank


def order_of_loader(loader: DataLoader[Any], model: nn.Module, *, seed: int) -> PlanSampler | None:
    """Return the sampler of this rank's rows for a loader that reads a data set in order or shuffled, by
    batches of the plan's global size or of a rank's, or in order by global batches of any size, for
    evaluation; None for a loader that does it itself already, or whose batches are not made by a size.

    Args:
        seed: of the order of a loader that shuffles.

    Raises:
        PlanError: its shuffled batches have another size than the plan's, or its sampler is for other shares
            of the batch.
    """
    parallel, order = parallel_of(model), loader.sampler
    whole, world, rank = parallel.global_rows, model.__dict__["data_world"], model.__dict__["data_rank"]
    rows = loader.batch_size
    if not whole or rows is None or isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(order, DistributedSampler) and (order.num_replicas, order.rank) != (world, rank):
        raise PlanError(
            f"the sampler of this loader gives rank {order.rank} of {order.num_replicas} its rows, but the "
            f"plan asks this rank for share {rank} of {world}; pass a plain loader, or one with "
            "tensoropt.sampler(model, dataset)"
        )
    if isinstance(order, PlanSampler) and rows != order.batch_size:
        raise PlanError(
            f"the sampler of this loader gives this rank {order.batch_size} rows of each global batch, but "
            f"the loader has batch_size={rows}; pass batch_size={order.batch_size}"
        )
    if type(order) not in (SequentialSampler, RandomSampler, DistributedSampler):
        return None
    shuffle = order.shuffle if isinstance(order, DistributedSampler) else isinstance(order, RandomSampler)
    sizes = {whole, whole // world}
    if shuffle and rows not in sizes:
        raise PlanError(
            f"the plan is for global batches of {whole} rows, divided among {world} data-parallel ranks, but "
            f"this loader shuffles batches of batch_size={rows}; pass batch_size="
            f"{' or '.join(map(str, sorted(sizes)))}, or evaluate without shuffling"
        )
    return rows_of_rank(
        model,
        loader.dataset,
        shuffle=shuffle,
        seed=order.seed if isinstance(order, DistributedSampler) else seed,
        drop_last=loader.drop_last,
        remedy="drop_last=True to the loader",
        batch_size=whole if rows in sizes else rows,
    )


def prepared_by(accelerator: Any, loader: DataLoader[Any], model: nn.Module) -> DataLoader[Any]:
    """Return accelerate's loader of this rank's rows; it divides only data that has no sampler."""
    from accelerate.data_loader import prepare_data_loader

    stream = isinstance(loader.dataset, IterableDataset)
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=model.__dict__["data_world"] if stream else 1,
        process_index=model.__dict__["data_rank"] if stream else 0,
        put_on_device=accelerator.device_placement,
        dispatch_batches=False,
        rng_types=accelerator.rng_types.copy(),
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def rows_of_all(model: nn.Module, values: Any) -> Any:
    """Return tensors with the rows of the ranks that pass other rows than each other, in the order in which
    :func:`tensoropt.sampler` divides them; scalars as they are.

    Args:
        values: a tensor with this rank's rows, or a structure of such; all ranks pass the same structure.
    """
    share = parallel_of(model).engine.share
    if share is None:
        return values

    def joined(value: torch.Tensor) -> torch.Tensor:
        return share.rows_of_all(value) if value.dim() else value

    return tree_map_only(torch.Tensor, joined, values)


def loader_of_rank(loader: DataLoader[Any], order: PlanSampler) -> DataLoader[Any]:
    """Return a copy of a loader that reads the rows of ``order``."""
    own = copy.copy(loader)
    # A loader takes no others by assignment.
    own.__dict__ |= {
        "sampler": order,
        "batch_sampler": BatchSampler(order, order.batch_size, loader.drop_last),
        "batch_size": order.batch_size,
        "_iterator": None,
    }
    return own
