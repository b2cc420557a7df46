"""A rank's part of the model's parameters, for plans of every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Tensor
from tensoropt.sharding.buckets import Bucket


class LocalParameters(ABC):
    """This rank's part of the parameters, and the gradients of those that are trained.

    A subclass says what this rank's part of a whole parameter is (:meth:`shard`) and how gradients are
    combined for reduction (:meth:`_buckets`).

    Args:
        tensors: the parameters that this rank has a part of, in the graph's order.
        values: whole parameters by graph name, read in the mapping's own order, one at a time: if it makes
            them on demand, no more than one exists at once. They are copied.

    Attributes:
        leaves: this rank's part of each parameter, a leaf that requires a gradient if the parameter is
            trained.
        accumulated: the buckets in which gradients accumulate.
    """

    def __init__(self, runtime: Runtime, tensors: Iterable[Tensor], values: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        trained = {tensor.name: tensor.requires_grad for tensor in tensors}
        # In one expression: a name for the whole value would keep it alive while the next one is made.
        parts = {name: self.shard(name, values[name].detach()) for name in values if name in trained}
        self.leaves: dict[str, torch.Tensor] = {
            name: parts[name].requires_grad_(grad) for name, grad in trained.items()
        }
        # After the leaves: the buckets put hooks on them.
        self.accumulated = Gradients(runtime, self._buckets(), self.leaves)

    @abstractmethod
    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a whole parameter, in the type in which it is stored."""

    @abstractmethod
    def _buckets(self) -> tuple[Bucket, ...]:
        """Return the gradient buckets of :attr:`leaves`."""

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Return the index of this rank's part of a parameter: ranks with equal indices have equal values."""
        return ()

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """Return the mesh axes along which ranks have the same part of a parameter."""
        return ()

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to whole values."""
        for name, leaf in self.leaves.items():
            leaf.copy_(self.shard(name, values[name]))

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The gradient of each trained parameter."""
        return self.accumulated.views

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        self.accumulated.clear()
