"""Collectives of several tensors at once, under way until they are waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# Registers the coalesced collectives, and what the compiler has to know of them.
from torch.distributed import _functional_collectives as _  # noqa: F401


def gather(values: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The flat values of all ranks, one after the other, of each that is given; under way."""
    found: list[torch.Tensor] = torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
        list(values), group.size(), group.group_name
    )
    return found


def scatter(values: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's part of the sums of flat values over all ranks, of each that is given; under way.

    Args:
        values: afterwards it holds what has to stay until then.
    """
    # Gloo reduces what is coalesced one value after the other; NCCL does it together, without a copy.
    if len(values) == 1 or values[0].device.type != "cpu":
        return _scatter(values, group)
    sizes = [value.numel() // group.size() for value in values]
    packed = _packed(values, sizes, group.size())
    values.append(packed)
    (found,) = _scatter([packed], group)
    # All lie in one storage, which is what is waited for.
    return list(found.split(sizes))


def _packed(values: list[torch.Tensor], sizes: Sequence[int], ranks: int) -> torch.Tensor:
    """Values side by side, rank after rank; each is let go of as it is packed."""
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
    """A value that has arrived."""
    arrived: torch.Tensor = torch.ops._c10d_functional.wait_tensor(value)
    return arrived
