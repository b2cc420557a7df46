"""What a rank has of the model's parameters, for plans of every kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Tensor
from tensoropt.sharding.buckets import Bucket


class LocalParameters(ABC):
    """This rank's part of the parameters, and the gradients of what of it is trained.

    A subclass says what this rank's part of a whole parameter is (:meth:`shard`) and how gradients are put
    together for reduction (:meth:`_buckets`).

    Args:
        tensors: the parameters that this rank has a part of, in the graph's order.
        values: whole parameters by graph name, read in the mapping's own order, one at a time: where it makes
            them as they are asked for, no more than one is there at once. They are copied.

    Attributes:
        leaves: per parameter this rank's part, a leaf that requires a gradient where the parameter is
            trained.
        accumulated: the buckets in which gradients accumulate.
    """

    def __init__(self, runtime: Runtime, tensors: Iterable[Tensor], values: Mapping[str, torch.Tensor]):
        self.runtime = runtime
        trained = {tensor.name: tensor.requires_grad for tensor in tensors}
        # In one expression: a name for the whole value would keep it while the next one is made.
        parts = {name: self.shard(name, values[name].detach()) for name in values if name in trained}
        self.leaves: dict[str, torch.Tensor] = {
            name: parts[name].requires_grad_(grad) for name, grad in trained.items()
        }
        # After the leaves: the buckets put hooks on them.
        self.accumulated = Gradients(runtime, self._buckets(), self.leaves)

    @abstractmethod
    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part of a whole parameter, in the type it is stored in."""

    @abstractmethod
    def _buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets of :attr:`leaves`."""

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Which part of a parameter this rank has: ranks with equal indices have equal values."""
        return ()

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """The mesh axes along which ranks have the same part of a parameter."""
        return ()

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to whole values."""
        for name, leaf in self.leaves.items():
            leaf.copy_(self.shard(name, values[name]))

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Per trained parameter its gradient."""
        return self.accumulated.views

    def clear(self) -> None:
        """Forget all gradients, as ``zero_grad`` does."""
        self.accumulated.clear()
