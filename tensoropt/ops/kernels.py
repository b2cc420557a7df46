"""The context in which a rank's kernels run, and kernels for means, which several families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from tensoropt.ops.overloads import resolve_overload


class ShardContext(Protocol):
    """The rank on which kernels run: its coordinates and collectives, by default those of a single rank."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """The device of tensors that a kernel creates."""

    @property
    def alone(self) -> bool:
        """Whether this process runs without other ranks, even if a kernel computes one shard of many."""

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """Return this rank's index among the ranks along ``axes``; the first axis is outermost."""
        return 0

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value`` reduced over the ranks along ``axes``; not differentiable."""
        return value

    def all_to_all(
        self,
        value: torch.Tensor,
        axes: tuple[int, ...],
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Exchange rows of ``value`` among the ranks along ``axes``, in rank order; not differentiable.

        Args:
            sent, received: number of rows to each rank, and from each rank; by default equal.
        """
        return value.clone()

    def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """Begin to send ``value`` to the next rank of a ring along ``axes``; not differentiable.

        Return a function that waits for the previous rank's value of equal shape; until then ``value`` must
        not change.
        """
        # The copy arrives; the function holds `value` as a sending rank would.
        return partial(_received, value.clone(), value)

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a count, such as a loss's number of targets, summed over the ranks along ``axes`` and over
        all micro-batches. ``name`` is the name of the operator that needs the count."""
        return value


def _received(received: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return received


def start_of(context: ShardContext, axes: tuple[int, ...], steps: int | Sequence[int]) -> int:
    """Return a shard's first index; ``steps`` is the distance between shards' starts, or one per axis."""
    if isinstance(steps, int):
        return context.coordinate(axes) * steps
    return sum(context.coordinate((axis,)) * step for axis, step in zip(axes, steps, strict=True))


@dataclass(eq=False)
class SingleDevice(ShardContext):
    """The context of a rank without others: an unsplit run, or a measurement."""

    seed: int = 0
    step: int = 0
    alone: bool = True

    @property
    def device(self) -> torch.device:
        """PyTorch's default device, which measurements set."""
        return torch.get_default_device()


def _mean_as_sum(
    context: ShardContext, name: str, target: str, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return a shard's part of a mean over split dims: the sum by ``target``, over the global count."""
    total: torch.Tensor = resolve_overload(target)(*args, **kwargs)
    return total / count


def _divided(
    context: ShardContext, name: str, target: str, parts: tuple[int, ...], *args: Any, **kwargs: Any
) -> Any:
    result = resolve_overload(target)(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return result / parts[0]
    return tuple(value / count if count > 1 else value for value, count in zip(result, parts, strict=True))


SHARED_KERNELS: dict[str, Callable[..., Any]] = {
    "kernels.mean_as_sum": _mean_as_sum,
    "kernels.divided": _divided,
}
