"""Parameters of a placed plan: whole, each on the device of the operator it lives with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tensoropt.engine.gradients import Gradients
from tensoropt.engine.runtime import Runtime
from tensoropt.placement.plans import PlacedStrategy
from tensoropt.sharding.buckets import Bucket


def homes(strategy: PlacedStrategy) -> dict[str, int]:
    """Parameter -> its device."""
    device = {op.name: strategy.placement.device[i] for i, op in enumerate(strategy.graph.operators)}
    return {name: device[operator] for name, operator in strategy.graph.holder.items()}


@dataclass(frozen=True)
class Placing:
    """Which of the plan's devices this process plays, and what they are here.

    Attributes:
        here: positions among the plan's devices.
        devices: per device of the plan where its tensors lie; only those in ``here`` matter.
    """

    here: tuple[int, ...]
    devices: tuple[torch.device, ...]


class HomeParameters:
    """Parameters that live here, and their gradients; the face of
    :class:`~tensoropt.engine.parameters.ParameterShards`.

    Attributes:
        home: of every parameter of the model, its device in the plan.
        leaves: per parameter that lives here its value, a leaf.
        book: the buckets in which gradients accumulate, one per device and type.
    """

    def __init__(
        self,
        strategy: PlacedStrategy,
        placing: Placing,
        runtime: Runtime,
        values: Mapping[str, torch.Tensor],
    ):
        self.tensors = strategy.graph.groups.atoms.graph.tensors
        self.placing = placing
        self.home = homes(strategy)
        self.leaves: dict[str, torch.Tensor] = {}
        buckets: dict[tuple[int, str], list[str]] = {}
        for tensor in strategy.graph.groups.atoms.graph.parameters:
            if self.home.get(tensor.name, placing.here[0]) not in placing.here:
                continue
            leaf = self.shard(tensor.name, values[tensor.name])
            self.leaves[tensor.name] = leaf.requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                where = self.home.get(tensor.name, placing.here[0])
                buckets.setdefault((where, tensor.stored_dtype), []).append(tensor.name)
        found = tuple(
            Bucket((), dtype, tuple(names), sum(self.leaves[n].numel() for n in names))
            for (_, dtype), names in buckets.items()
        )
        self.book = Gradients(runtime, found, self.leaves)

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter's whole value as it lies on its device, a copy."""
        device = self.placing.devices[self.home.get(name, self.placing.here[0])]
        dtype = getattr(torch, self.tensors[name].stored_dtype)
        copied = value.detach().to(device=device, dtype=dtype, copy=True)
        return copied.contiguous()

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to the model's values."""
        for name, leaf in self.leaves.items():
            leaf.copy_(values[name])

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Per trained parameter its gradient."""
        return self.book.views

    def clear(self) -> None:
        self.book.clear()
