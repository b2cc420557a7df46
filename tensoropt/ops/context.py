"""The information that a kernel has about where it runs."""

from __future__ import annotations

from typing import Protocol

import torch


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

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """This rank's index within the flattened group of ``axes`` (first axis outermost)."""
        ...

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """``value`` reduced over the group of ``axes``; not differentiable."""
        ...

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """A count summed over ``axes``, including all micro-batches."""
        ...


class SingleDevice:
    """The context of an unsplit run, and of a measurement on a single rank."""

    def __init__(self, seed: int = 0, step: int = 0):
        self.seed = seed
        self.step = step

    @property
    def device(self) -> torch.device:
        """PyTorch's default device, which a measurement sets to the measured device."""
        return torch.get_default_device()

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """Always 0, because there is one rank."""
        return 0

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """Return ``value``, because there is no other rank to reduce with."""
        return value

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """Return ``value``, because the whole batch is on this rank."""
        return value
