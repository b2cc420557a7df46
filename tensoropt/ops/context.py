"""What a kernel may know about where it runs."""

from __future__ import annotations

from typing import Protocol

import torch


class ShardContext(Protocol):
    """A rank as its kernels see it: its coordinates, and the collectives that they need inside."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where tensors belong that a kernel makes from nothing."""
        ...

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """This rank's index within the flattened group of ``axes`` (first axis outermost)."""
        ...

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """``value`` reduced over the group of ``axes``; not differentiable."""
        ...

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """A count summed over ``axes``, micro-batches included."""
        ...


class SingleDevice:
    """The context of an unsplit run, and of a measurement without neighbours."""

    def __init__(self, seed: int = 0, step: int = 0):
        self.seed = seed
        self.step = step

    @property
    def device(self) -> torch.device:
        """PyTorch's default, which who measures a device sets to that."""
        return torch.get_default_device()

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """0: there is one rank."""
        return 0

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """``value``: there is nobody to reduce with."""
        return value

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """``value``: all of the batch is on this rank."""
        return value
