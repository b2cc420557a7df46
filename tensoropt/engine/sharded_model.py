"""A user's model run by a sharded plan: its parameters are DTensors over the engine's shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tensoropt.capture import Capture
from tensoropt.engine.parallel_model import ParallelModel
from tensoropt.engine.parameters import as_dtensor
from tensoropt.engine.partial_values import read_whole
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.sharding.strategy import Strategy


class ShardedModel(ParallelModel[ShardedEngine]):
    """The connection between a model and its sharded plan."""

    def __init__(
        self,
        model: nn.Module,
        captured: Capture,
        strategy: Strategy,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ):
        self.strategy = strategy
        engine = ShardedEngine(strategy, values, seed=seed, device=device)
        mesh: DeviceMesh | None = None
        if engine.runtime.distributed:
            names = tuple(f"axis{i}" for i in range(1, len(strategy.mesh)))
            mesh = init_device_mesh(engine.runtime.device.type, strategy.mesh[1:], mesh_dim_names=names)
        super().__init__(model, captured, engine, mesh)
        if mesh is not None and self.together is not None:
            read_whole(mesh, self.together)

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        # One process: plain tensors, so that scripts without a job need nothing of `torch.distributed`.
        if self.mesh is None:
            return local
        layout = self.strategy.stored[name]
        return as_dtensor(local, self.strategy.atoms(name), layout, self.mesh, self.engine.runtime)

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value that is laid out like the parameter ``key``, in the model's own shape.

        It already has that shape, unless PyTorch cannot express the layout in it; then it is gathered.
        """
        shape = self.shapes[key]
        if tuple(value.shape) == shape or not isinstance(value, DTensor):
            return value
        return self._replicated(value.full_tensor().detach().view(shape), value.device_mesh)

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        name = self.names[key]
        return self.shown(name, self.engine.shards.shard(name, self._whole(key, value)))

    def lies_right(self, key: str, value: torch.Tensor) -> bool:
        parameter = self.parameters[self.names[key]]
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.placements == parameter.placements
            and value.device_mesh == parameter.device_mesh
        )
