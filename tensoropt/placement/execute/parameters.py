"""Parameters of a placed plan: whole, each on the device of the operator it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.placement.plans import PlacedStrategy
from tensoropt.sharding.buckets import Bucket


def parameter_devices(strategy: PlacedStrategy) -> dict[str, int]:
    """The device of each parameter that an operator reads, by position among the plan's devices."""
    device = {op.name: strategy.placement.device[i] for i, op in enumerate(strategy.graph.operators)}
    return {name: device[operator] for name, operator in strategy.graph.holder.items()}


@dataclass(frozen=True)
class LocalDevices:
    """Which of the plan's devices this process runs, and what they are here.

    Attributes:
        own: positions among the plan's devices.
        devices: per device of the plan where its tensors lie; only those in ``own`` matter.
    """

    own: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The device of whatever belongs to no operator."""
        return self.devices[self.own[0]]


class PlacedParameters(LocalParameters):
    """The parameters on this process's devices, whole.

    Attributes:
        device: of every parameter of the model that an operator reads, its device in the plan.
    """

    def __init__(
        self,
        strategy: PlacedStrategy,
        local: LocalDevices,
        runtime: Runtime,
        values: Mapping[str, torch.Tensor],
    ):
        self.source = strategy.graph.groups.atoms.graph
        self.local = local
        self.device = parameter_devices(strategy)
        own = [t for t in self.source.parameters if self._device(t.name) in local.own]
        super().__init__(runtime, own, values)

    def _device(self, name: str) -> int:
        """The device of a parameter; one that no operator reads is on every process."""
        return self.device.get(name, self.local.own[0])

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's whole value on its device, in the type it is stored in."""
        device = self.local.devices[self._device(name)]
        dtype = getattr(torch, self.source.tensors[name].stored_dtype)
        return value.detach().to(device=device, dtype=dtype, copy=True).contiguous()

    def _buckets(self) -> tuple[Bucket, ...]:
        """One per device and type; nothing reduces them, as each parameter is on one device only."""
        names: dict[tuple[int, str], list[str]] = {}
        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                # A bucket is one flat tensor, which lies on one device and has one type.
                key = self._device(name), self.source.tensors[name].stored_dtype
                names.setdefault(key, []).append(name)
        return tuple(
            Bucket((), dtype, tuple(of_bucket), sum(self.leaves[n].numel() for n in of_bucket))
            for (_, dtype), of_bucket in names.items()
        )
