"""Kernels that operators of several families share: averages computed as parts that add up.

The module also defines the information that a kernel has about where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from tensoropt.ops.overloads import resolve_overload


class ShardContext(Protocol):
    """A rank as its kernels see it: its coordinates, and the collectives that they use internally."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """The device for tensors that a kernel creates from nothing."""
        ...

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks, although the kernel may be that of one among many."""
        ...

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """Return this rank's index within the flattened group of ``axes`` (first axis outermost)."""
        ...

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value`` reduced over the group of ``axes``; not differentiable."""
        ...

    def all_to_all(
        self,
        value: torch.Tensor,
        axes: tuple[int, ...],
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the rows that the ranks of the group of ``axes`` send to this one, in their order; not
        differentiable.

        Args:
            sent, received: how many rows of ``value`` go to each of them, and how many come from each; by
                default the same number.
        """
        ...

    def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """Begin to send ``value`` to the next rank of the group of ``axes``, the last one's to the first;
        return a function that waits for what the rank before this one sends, of the same shape, and returns
        it. Until it is called ``value`` must not change; not differentiable.
        """
        ...

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return a count summed over ``axes``, including all micro-batches."""
        ...


def _received(received: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return received


def start_of(context: ShardContext, axes: tuple[int, ...], steps: int | Sequence[int]) -> int:
    """Return where a rank's shard of a loop begins, given how far apart shards are: all alike, or those of
    each axis."""
    if isinstance(steps, int):
        return context.coordinate(axes) * steps
    return sum(context.coordinate((axis,)) * step for axis, step in zip(axes, steps, strict=True))


class SingleDevice:
    """The context of an unsplit run, and of a measurement on a single rank."""

    def __init__(self, seed: int = 0, step: int = 0):
        self.seed = seed
        self.step = step

        self.alone = True

    @property
    def device(self) -> torch.device:
        """PyTorch's default device, which a measurement sets to the measured device."""
        return torch.get_default_device()

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """Return 0, because there is one rank."""
        return 0

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value``, because there is no other rank to reduce with."""
        return value

    def all_to_all(
        self,
        value: torch.Tensor,
        axes: tuple[int, ...],
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        return value.clone()

    def send_around(self, value: torch.Tensor, axes: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        """Return a function that returns a copy of ``value``, as if the others sent what this rank sends. It
        holds ``value``, which a rank would still be sending."""
        return partial(_received, value.clone(), value)

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return ``value``, because the whole batch is on this rank."""
        return value


def _mean_as_sum(
    context: ShardContext, name: str, target: str, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return a mean over split dims: the sum (``target``) divided by the global count, so that shards add
    up.
    """
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
