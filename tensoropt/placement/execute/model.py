"""A user's model run by a placed plan: the parameters this rank holds, and those it must fetch."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tensoropt.capture import Capture
from tensoropt.engine.parallel_model import UncompiledModel
from tensoropt.engine.script_values import spread, spread_value
from tensoropt.errors import PlanError
from tensoropt.placement.execute.engine import PlacedEngine
from tensoropt.placement.points import PlacedStrategy


def _all_devices(strategy: PlacedStrategy, like: torch.device) -> list[torch.device] | None:
    """Return the devices on which one process runs all devices of a plan; None in a job of several processes.

    Raises:
        PlanError: the model is to run on a GPU, and there are fewer of them than the plan needs.
    """
    if dist.is_initialized():
        return None
    if like.type != "cuda":
        return [like] * strategy.devices
    gpu_count = torch.cuda.device_count()
    if gpu_count < strategy.devices:
        raise PlanError(
            f"the plan is for {strategy.devices} devices, but this process sees {gpu_count} "
            f"{'GPU' if gpu_count == 1 else 'GPUs'}; start one process per device with torchrun "
            f'--nproc-per-node {strategy.devices}, or run it on the CPU (device="cpu")'
        )
    return [torch.device("cuda", i) for i in range(strategy.devices)]


class PlacedModel(UncompiledModel[PlacedEngine]):
    """The connection between a model and its placed plan.

    A rank keeps the parameters on its device; each other parameter becomes an empty tensor, so that
    optimizers and gradient clipping do the same on all ranks. State dicts hold whole parameters on every
    rank.
    """

    uncompiled = "a placed plan runs every operator, forward and backward, when the plan says"

    def __init__(
        self,
        model: nn.Module,
        captured: Capture,
        strategy: PlacedStrategy,
        values: Mapping[str, torch.Tensor],
        device: torch.device,
        seed: int,
    ):
        devices = _all_devices(strategy, device)
        engine = PlacedEngine(strategy, values, devices=devices, seed=seed, device=device)
        mesh = None
        if engine.runtime.distributed:
            mesh = init_device_mesh(device.type, (strategy.devices,), mesh_dim_names=("device",))
        super().__init__(model, captured, engine, mesh)
        self.engine.after_backward = self._show_absent

    # -- parameters -------------------------------------------------------------------------------

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        if self.together is None:
            return local
        # One that no operator reads is on every rank.
        copies = 1 if name in self.engine.shards.device else self.together.world
        tensor = self.source.tensors[name]
        cut = functools.partial(self._part, name)
        return spread_value(local, self.together, copies, str(tensor.key), tensor.shape, cut)

    def _part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is laid out like a parameter, in its own type."""
        if name not in self.engine.shards.leaves:
            return self._absent(name).to(whole.dtype)
        return self.engine.shards.shard(name, whole).to(whole.dtype)

    def shown_gradient(self, name: str, local: torch.Tensor) -> torch.Tensor:
        return local if self.mesh is None else spread(local)

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
                # Optimizers skip parameters without a gradient, and their states would then differ by rank.
                parameter.grad = spread(torch.empty_like(parameter))

    def shown_otherwise(self) -> str:
        return ""  # a parameter is whole where it is, and empty elsewhere

    # -- state dicts ------------------------------------------------------------------------------

    def gathers_state(self) -> bool:
        return self.mesh is not None

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return, on every rank, the value on the rank that owns the parameter; all ranks must call it."""
        if self.mesh is None:
            return value
        name = self.names[key]
        if name in self.engine.shards.leaves:
            whole = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            # A buffer for the broadcast; its contents do not matter.
            whole = torch.empty(self.shapes[key], dtype=value.dtype, device=value.device)
        device = self.engine.shards.device.get(name)
        if device is not None:  # one that no operator reads is on every rank already
            whole = self.engine.transport.broadcast(whole, device)
        return self._replicated(whole, self.mesh)

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        name = self.names[key]
        whole = self._whole(key, value)  # all ranks take part in it, those that drop the result too
        if name not in self.engine.shards.leaves:
            return self._absent(name).to(whole.dtype)
        return self.engine.shards.shard(name, whole)

    def lies_right(self, key: str, value: torch.Tensor) -> bool:
        return False
