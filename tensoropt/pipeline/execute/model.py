"""A user's model run by a pipelined plan: each rank has only the parameters of its own stages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tensoropt.capture import Capture
from tensoropt.engine.parallel_model import UncompiledModel
from tensoropt.engine.parameters import as_dtensor, own_placements
from tensoropt.engine.script_values import spread, spread_value
from tensoropt.ops.layouts import REPLICATE
from tensoropt.pipeline.execute.engine import PipelinedEngine
from tensoropt.pipeline.execute.stage import StageEngine
from tensoropt.pipeline.strategy import PipelinedStrategy


class PipelinedModel(UncompiledModel[PipelinedEngine]):
    """The connection between a model and its pipelined plan.

    A rank keeps its shards of its stages' parameters as plain tensors; each other parameter becomes an empty
    tensor, so that optimizers and gradient clipping do the same on all ranks. A rank's state dict has the
    parameters of its stages, distributed over the ranks of each stage, and no others.
    """

    uncompiled = "a pipeline runs stages and micro-batches in the order of its schedule"

    def __init__(
        self,
        model: nn.Module,
        captured: Capture,
        strategy: PipelinedStrategy,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ):
        self.strategy = strategy
        engine = PipelinedEngine(strategy, values, seed=seed, device=device)
        axes = tuple(f"axis{i}" for i in range(1, len(strategy.mesh) - 1))
        mesh = init_device_mesh(device.type, strategy.mesh[1:], mesh_dim_names=("stage", *axes))
        # The mesh of this rank's place; a stage on a single device needs none.
        self.place_mesh: DeviceMesh | None = mesh[axes] if axes else None
        super().__init__(model, captured, engine, mesh)
        self.engine.after_backward = self._show_absent

    # -- parameters -------------------------------------------------------------------------------

    def has_local(self, key: str) -> bool:
        return self.names[key] in self.engine.shards.leaves

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        if self.together is None:
            return local
        tensor = self.source.tensors[name]
        copies = self._copies(name) if name in self.engine.shards.leaves else 1
        cut = functools.partial(self._part, name)
        return spread_value(local, self.together, copies, str(tensor.key), tensor.shape, cut)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is laid out like a parameter, in its own type."""
        if name not in self.engine.shards.leaves:
            return self._absent(name).to(whole.dtype)
        return self.engine.shards.shard(name, whole).to(whole.dtype)

    def shown_gradient(self, name: str, local: torch.Tensor) -> torch.Tensor:
        return spread(local, self._copies(name))

    def _copies(self, name: str) -> int:
        """Return the number of ranks that have the same part of a parameter of a stage here."""
        stages = len(self.strategy.holders(name))
        mesh = self.engine.runtime.mesh
        return stages * prod(mesh[axis] for axis in self.engine.shards.replica_axes(name))

    def local(self, name: str) -> torch.Tensor:
        leaves = self.engine.shards.leaves
        if name in leaves:
            return leaves[name].detach()
        return self._absent(name)

    def _show_absent(self) -> None:
        """Give the parameters of other ranks an empty gradient, so that they are treated like the rest."""
        for tensor in self.source.parameters:
            if tensor.requires_grad and tensor.name not in self.engine.shards.leaves:
                parameter = self.parameters[tensor.name]
                # Optimizers skip parameters without a gradient, so their states would differ between ranks.
                parameter.grad = spread(torch.empty_like(parameter))

    def shown_otherwise(self) -> str:
        split = [
            tensor.key
            for tensor in self.source.parameters
            if tensor.requires_grad and len(tensor.shape) > 1 and self._is_split(tensor.name)
        ]
        if not split:
            return ""
        return (
            "a pipeline shows parameters as the shards that a rank has of them, which are parts of "
            f"{len(split)} matrices ({split[0]} first): optimizers that work on single elements (SGD, Adam, "
            "Lion) are right, those that look at whole matrices (Muon, Shampoo, Adafactor, LAMB) are not; "
            "tensoropt.original_shape(p) is the model's own shape"
        )

    def _is_split(self, name: str) -> bool:
        """Return whether the ranks of a stage share a parameter, rather than each having all of it."""
        stages = (self.strategy.stages[number] for number in self.strategy.holders(name))
        return any(
            code > REPLICATE and stage.mesh[axis] > 1
            for stage in stages
            for axis, code in enumerate(stage.stored[name])
            if axis > 0
        )

    def _stage_of(self, name: str) -> StageEngine:
        return next(stage for stage in self.engine.stages.values() if name in stage.shards.leaves)

    # -- state dicts ------------------------------------------------------------------------------

    def gathers_state(self) -> bool:
        if self.source.mutations:
            return True
        own = (key for key in self.shapes if self.has_local(key))
        return self.place_mesh is not None and any(not self._has_own_shape(key) for key in own)

    def _has_own_shape(self, key: str) -> bool:
        stage, name = self._stage_of(self.names[key]), self.names[key]
        strategy = stage.strategy
        return own_placements(strategy.atoms(name), strategy.stored[name], stage.runtime.mesh) is not None

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of one of its stages' parameters, as a part of the whole parameter in the
        model's own shape.
        """
        name, shape = self.names[key], self.shapes[key]
        if self.place_mesh is None:
            return value.detach().reshape(shape)
        stage = self._stage_of(name)
        atoms, layout = stage.strategy.atoms(name), stage.strategy.stored[name]
        dtensor = as_dtensor(value.detach(), atoms, layout, self.place_mesh, stage.runtime)
        if tuple(dtensor.shape) == shape:
            return dtensor
        # A fused projection that is split by heads: its shards are not slices of the flat shape.
        return self._replicated(dtensor.full_tensor().view(shape), self.place_mesh)

    def _to_own_shapes(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        for key in self.names:
            if not self.has_local(key):
                state.pop(prefix + key, None)
        super()._to_own_shapes(module, state, prefix, metadata)

    def _to_stored(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._to_stored(module, state, prefix, *rest)
        for key, name in self.names.items():
            if not self.has_local(key):
                # Other ranks load this parameter.
                state[prefix + key] = self.local(name)

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        if not self.has_local(key):
            return self.local(self.names[key])
        return self.engine.shards.shard(self.names[key], self._whole(key, value))

    def lies_right(self, key: str, value: torch.Tensor) -> bool:
        return not isinstance(value, DTensor) and not self.has_local(key) and not value.numel()
