"""Parameters of a running plan: local shards for the graph, DTensors for everything else.

The lowered graph differentiates with respect to plain local leaves. Their gradients are views into flat,
persistent buckets; a gradient that is a partial sum remains so over all micro-batches and is reduced once per
step, bucket by bucket. The same storage is shown to optimizers and checkpoints as DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tensoropt.engine.gradients import storage_key
from tensoropt.engine.local_parameters import LocalParameters
from tensoropt.engine.runtime import Runtime
from tensoropt.engine.strided import is_strided, own_placements, teach_checkpoints
from tensoropt.ops.layouts import REPLICATE, Atoms, Layout, local_atoms, local_shape
from tensoropt.sharding.buckets import Bucket, gradient_buckets
from tensoropt.sharding.reshard.redistribute import EdgeSpec, take_shard
from tensoropt.sharding.strategy import Strategy


def shard_of(runtime: Runtime, name: str, atoms: Atoms, layout: Layout, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, as a separate copy on this rank's device."""
    spec = EdgeSpec(name, atoms, runtime.mesh, layout, layout, (), ())
    shard = take_shard(runtime, spec, value)
    # If cutting had to copy (an inner atom), this is a copy already.
    own = storage_key(shard) != storage_key(value)
    if own and shard.is_contiguous() and shard.device == runtime.device:
        return shard
    # Cut where the value is, so that never more than the shard is on the device.
    place = torch.empty_like(shard, device=runtime.device, memory_format=torch.contiguous_format)
    return place.copy_(shard)


class ParameterShards(LocalParameters):
    """The shards of a sharded plan's parameters, as the plan stores them."""

    def __init__(self, strategy: Strategy, runtime: Runtime, values: Mapping[str, torch.Tensor]):
        self.strategy = strategy
        super().__init__(runtime, strategy.graph.atoms.graph.parameters, values)

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard of a whole parameter, in the type in which it is stored."""
        layout = self.strategy.stored[name]
        shard = shard_of(self.runtime, name, self.strategy.atoms(name), layout, value)
        return shard.to(getattr(torch, self.strategy.tensor(name).stored_dtype))

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Return this rank's coordinates on the axes that shard a parameter."""
        place, stored = self.runtime.place, self.strategy.stored[name]
        return tuple(place[a] for a, code in enumerate(stored) if a > 0 and code > REPLICATE)

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """Return the mesh axes that do not shard a parameter."""
        return tuple(a for a, code in enumerate(self.strategy.stored[name]) if a > 0 and code <= REPLICATE)

    def _buckets(self) -> tuple[Bucket, ...]:
        return gradient_buckets(self.strategy)


def view_shape(atoms: Atoms, layout: Layout) -> tuple[int, ...]:
    """Return a shape in which DTensor can express a layout that it cannot express in the tensor's own shape
    (:func:`~tensoropt.engine.strided.own_placements`): every dim with an inner sharded atom is unflattened
    into its atoms."""
    shape: list[int] = []
    position = 0
    for dim in atoms:
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        # Cutting an outermost atom makes contiguous slices, which `Shard` of the whole dim also expresses.
        shape += dim if sharded - {0} else (prod(dim),)
        position += len(dim)
    return tuple(shape)


def dtensor_placements(atoms: Atoms, layout: Layout) -> tuple[Placement, ...]:
    """Return PyTorch placements on the real axes for a tensor shown in :func:`view_shape`."""
    dims: dict[int, int] = {}
    position = shown = 0
    for dim in atoms:
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        inner = bool(sharded - {0})
        for i in range(len(dim)):
            dims[position + i] = shown + i if inner else shown
        shown += len(dim) if inner else 1
        position += len(dim)
    # From 1 on: a DTensor knows nothing of micro-batches, and a parameter is not split by them.
    return tuple(Shard(dims[code]) if code >= 0 else Replicate() for code in layout[1:])


def as_dtensor(
    local: torch.Tensor, atoms: Atoms, layout: Layout, mesh: DeviceMesh, runtime: Runtime
) -> DTensor:
    """Return the DTensor of which a local shard is a part, in the tensor's own shape wherever PyTorch can
    express it; the storage is shared."""
    shape = tuple(map(prod, atoms))
    placements = own_placements(atoms, layout, runtime.mesh)
    local_view = local_shape(atoms, layout, runtime.mesh, runtime.place)
    if placements is None:
        shape, placements = view_shape(atoms, layout), dtensor_placements(atoms, layout)
        local_view = _local_view(atoms, layout, runtime)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    found: DTensor = DTensor.from_local(
        local.view(local_view),
        mesh,
        placements,
        # The check would communicate; shape and stride are given, as uneven shards do not determine the
        # whole.
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    if is_strided(found):
        teach_checkpoints()
    return found


def _local_view(atoms: Atoms, layout: Layout, runtime: Runtime) -> tuple[int, ...]:
    """Return this rank's part of :func:`view_shape`."""
    shape: list[int] = []
    position = 0
    for dim, local in zip(atoms, local_atoms(atoms, layout, runtime.mesh, runtime.place), strict=True):
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        shape += local if sharded - {0} else (prod(local),)
        position += len(dim)
    return tuple(shape)
