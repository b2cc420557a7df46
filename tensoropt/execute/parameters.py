"""Parameters of a running plan: local shards for the graph, DTensors for everybody else.

The lowered graph differentiates with respect to plain local leaves. Their gradients are views into
flat, persistent buckets; a gradient that is a partial sum stays one over all micro-batches and is
reduced once per step, bucket by bucket. The same storage is shown to optimizers and checkpoints as
DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tensoropt.execute.redistribute import EdgeSpec, take_shard
from tensoropt.execute.runtime import Runtime
from tensoropt.sharding.buckets import Bucket, gradient_buckets
from tensoropt.sharding.placement import Atoms, Layout
from tensoropt.sharding.strategy import Strategy


def shard_of(runtime: Runtime, name: str, atoms: Atoms, layout: Layout, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor, as a copy of its own."""
    spec = EdgeSpec(name, atoms, runtime.mesh, layout, layout, (), ())
    return take_shard(runtime, spec, value).clone(memory_format=torch.contiguous_format)


class ParameterShards:
    """Local leaves and their gradient buckets.

    Attributes:
        leaves: per graph parameter this rank's shard, a leaf that requires grad.
        gradients: per parameter its view into a bucket.
    """

    def __init__(self, strategy: Strategy, runtime: Runtime, values: Mapping[str, torch.Tensor]):
        self.strategy = strategy
        self.runtime = runtime
        self.leaves: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        self.buckets: list[tuple[Bucket, torch.Tensor]] = []
        for tensor in strategy.graph.atoms.graph.parameters:
            layout = strategy.stored[tensor.name]
            shard = shard_of(runtime, tensor.name, strategy.atoms(tensor.name), layout, values[tensor.name])
            self.leaves[tensor.name] = shard.requires_grad_(tensor.requires_grad)
        for bucket in gradient_buckets(strategy):
            sizes = [self.leaves[name].numel() for name in bucket.parameters]
            flat = torch.zeros(sum(sizes), dtype=self.leaves[bucket.parameters[0]].dtype)
            self.buckets.append((bucket, flat))
            for name, piece in zip(bucket.parameters, flat.split(sizes), strict=True):
                self.gradients[name] = piece.view(self.leaves[name].shape)

    def start(self) -> None:
        """Clear the buckets and let backward accumulate into them."""
        for _, flat in self.buckets:
            flat.zero_()
        for name, gradient in self.gradients.items():
            self.leaves[name].grad = gradient

    def scale(self, factor: torch.Tensor) -> None:
        for _, flat in self.buckets:
            flat.mul_(factor)

    def reduce(self) -> None:
        """Sum every partial gradient over its axes: one all-reduce per bucket."""
        pending = []
        for bucket, flat in self.buckets:
            group = self.runtime.group(bucket.axes)
            if group is not None:
                pending.append(dist.all_reduce(flat, group=group, async_op=True))
        for work in pending:
            assert work is not None
            work.wait()


def view_shape(atoms: Atoms, layout: Layout) -> tuple[int, ...]:
    """Shape in which DTensor can express the layout.

    The tensor's own shape when only outermost atoms are sharded; otherwise every dim with an inner
    sharded atom is unflattened into its atoms (a fused ``qkv`` split on heads).
    """
    shape: list[int] = []
    position = 0
    for dim in atoms:
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        shape += dim if sharded - {0} else (prod(dim),)
        position += len(dim)
    return tuple(shape)


def dtensor_placements(atoms: Atoms, layout: Layout, *, gradient: bool = False) -> tuple[Placement, ...]:
    """PyTorch placements of the real axes for a tensor shown in :func:`view_shape`."""
    dims: dict[int, int] = {}
    position = shown = 0
    for dim in atoms:
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        inner = bool(sharded - {0})
        for i in range(len(dim)):
            dims[position + i] = shown + i if inner else shown
        shown += len(dim) if inner else 1
        position += len(dim)
    placements: list[Placement] = []
    for code in layout[1:]:
        if code >= 0:
            placements.append(Shard(dims[code]))
        else:
            placements.append(Partial() if gradient and code == -2 else Replicate())
    return tuple(placements)


def as_dtensor(
    local: torch.Tensor, atoms: Atoms, layout: Layout, mesh: DeviceMesh, runtime: Runtime
) -> DTensor:
    """A local shard as the DTensor it is part of; the storage is shared."""
    shape = view_shape(atoms, layout)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    placements = dtensor_placements(atoms, layout)
    local_view = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local_view[placement.dim] = -(-local_view[placement.dim] // mesh.size(axis))
    if prod(local_view) != local.numel():
        # Uneven shards: the dim that was cut has what this rank holds.
        (dim,) = {p.dim for p in placements if isinstance(p, Shard)}
        rest = prod(n for i, n in enumerate(local_view) if i != dim)
        local_view[dim] = local.numel() // rest
    return DTensor.from_local(
        local.view(local_view), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
