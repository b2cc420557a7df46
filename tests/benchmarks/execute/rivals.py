"""One training step of a model, done by each method, as somebody who uses PyTorch alone would write it.

Every maker returns ``step()``: forward, backward and optimizer on this rank's part of one global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from tensoropt import parallelize
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.sharding.strategy import Strategy

Step = Callable[[], Any]
LEARNING_RATE = 1e-4


def stepper(model: nn.Module, args: tuple, kwargs: dict) -> Step:
    """A step with multi-tensor Adam, which takes DTensors and others as groups of their own."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    of_groups = [{"params": group} for group in groups if group]
    optimizer = torch.optim.Adam(of_groups, lr=LEARNING_RATE, foreach=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def part(inputs: Any) -> Any:
    """This rank's share of the global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(world)[rank].contiguous(), inputs)


def plain(spec: ModelSpec) -> Step:
    """The model as it is, whole batch, one rank."""
    model, args, kwargs = spec.build()
    return stepper(model.train(), args, kwargs)


def plan(spec: ModelSpec, strategy: Any) -> Step:
    model, args, kwargs = spec.build()
    chosen = Strategy.from_data(strategy, load_model(spec).graph)
    return stepper(parallelize(model.train(), chosen, args, kwargs), args, kwargs)


def ddp(spec: ModelSpec) -> Step:
    model, args, kwargs = spec.build()
    wrapped = DistributedDataParallel(model.train(), gradient_as_bucket_view=True)
    return stepper(wrapped, *part((args, kwargs)))


def fsdp2(spec: ModelSpec) -> Step:
    model, args, kwargs = spec.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model.train(), *part((args, kwargs)))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts: children of every module list, and of a chain's features and classifier."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    outer = [m for m in lists if not any(m is not o and m in list(o.modules()) for o in lists)]
    found = [child for m in outer for child in m]
    if not found:
        chains = [m for m in model.children() if isinstance(m, nn.Sequential)]
        found = [c for m in chains for c in m if any(True for _ in c.parameters())]
    return found
