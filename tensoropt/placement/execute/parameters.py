"""The parameters of a placed plan: whole, each on the device of the operator it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.placement.plans import PlacedStrategy
from tensoropt.sharding.buckets import Bucket


def parameter_devices(strategy: PlacedStrategy) -> dict[str, int]:
    """Return the device of each parameter that an operator reads, by position among the plan's devices."""
    device = {op.name: strategy.placement.device[i] for i, op in enumerate(strategy.graph.operators)}
    return {name: device[operator] for name, operator in strategy.graph.holder.items()}


@dataclass(frozen=True)
class LocalDevices:
    """The devices of the plan that this process runs, and their PyTorch devices.

    Attributes:
        own: their positions among the plan's devices.
        devices: for each device of the plan, where its tensors lie; only those in ``own`` matter.
    """

    own: tuple[int, ...]
    devices: tuple[torch.device, ...]

    @property
    def first(self) -> torch.device:
        """The device for whatever belongs to no operator."""
        return self.devices[self.own[0]]


class PlacedParameters(LocalParameters):
    """The parameters on this process's devices, whole.

    Attributes:
        device: the device in the plan of every parameter of the model that an operator reads.
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
        """Return the device of a parameter; a parameter that no operator reads is on every process."""
        return self.device.get(name, self.local.own[0])

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a parameter's whole value on its device, in the type in which it is stored."""
        device = self.local.devices[self._device(name)]
        dtype = getattr(torch, self.source.tensors[name].stored_dtype)
        return value.detach().to(device=device, dtype=dtype, copy=True).contiguous()

    def _buckets(self) -> tuple[Bucket, ...]:
        """Return one bucket per device and type; nothing reduces them, as each parameter is on one device
        only."""
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
