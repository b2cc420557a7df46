"""Collectives of several tensors at once, under way until they are waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Registers the coalesced collectives, and what the compiler has to know of them.
from torch.distributed import _functional_collectives as _  # noqa: F401


def gather(values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return, for each of the given flat values, those of all ranks one after another; under way."""
    found: list[torch.Tensor] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
        list(values), group.size(), group.group_name
    )
    return found


def scatter(values: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return, for each of the given flat values, this rank's part of the sum over all ranks; under way.

    Args:
        values: the list of values; afterwards it holds what must stay alive until then.
    """
    # Gloo reduces what is coalesced one value after the other; NCCL does it together, without a copy.
    if len(values) == 1 or values[0].device.type != "cpu":
        return _scatter(values, group)
    sizes = [value.numel() // group.size() for value in values]
    packed = _packed(values, sizes, group.size())
    values.append(packed)
    (found,) = _scatter([packed], group)
    # All values lie in one storage, for which it waits.
    return list(found.split(sizes))


def _packed(values: list[torch.Tensor], sizes: Sequence[int], ranks: int) -> torch.Tensor:
    """Pack values side by side, rank after rank; each is released as it is packed."""
    packed = values[0].new_empty(ranks, sum(sizes))
    for place in packed.split(list(sizes), 1):
        place.copy_(values.pop(0).view(place.shape))
    return packed.flatten()


def _scatter(values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    found: list[torch.Tensor] = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(
        list(values), "sum", group.size(), group.group_name
    )
    return found


def wait(value: torch.Tensor) -> torch.Tensor:
    """Wait for a value, and return it."""
    arrived: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return arrived
