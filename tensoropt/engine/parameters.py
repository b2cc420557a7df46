"""Parameters of a running plan: shards for the lowered graph, DTensors for scripts and checkpoints."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tensoropt.engine.gradients import Gradients, storage_key
from tensoropt.engine.runtime import Runtime
from tensoropt.graph import Tensor
from tensoropt.ops.layouts import REPLICATE, Atoms, Layout, local_atoms, local_shape
from tensoropt.sharding.buckets import gradient_buckets
from tensoropt.sharding.reshard.redistribute import EdgeSpec, take_shard
from tensoropt.sharding.strategy import Strategy


class LocalParameters(ABC):
    """This rank's part of the parameters, and the gradients of the trained ones.

    Attributes:
        leaves: parameter -> this rank's part, an autograd leaf.
        buckets: the gradient buckets, one set per pipeline stage of this rank.
    """

    leaves: dict[str, torch.Tensor]
    buckets: Sequence[Gradients]

    @abstractmethod
    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of a whole parameter, in the dtype in which it is stored."""

    @abstractmethod
    def copies(self, name: str) -> int:
        """Return the number of ranks with the same part of a parameter."""

    def shard_index(self, name: str) -> tuple[int, ...]:
        """Return the mesh coordinates of this rank's part; ranks with equal ones have equal parts."""
        return ()

    def replica_axes(self, name: str) -> tuple[int, ...]:
        """Return the mesh axes along which a parameter is replicated."""
        return ()

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's parts of whole values into the parameters."""
        for name, leaf in self.leaves.items():
            leaf.copy_(self.shard(name, values[name]))

    # -- gradients --------------------------------------------------------------------------------

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter, by name."""
        return {name: view for part in self.buckets for name, view in part.views.items()}

    def clear(self) -> None:
        for part in self.buckets:
            part.clear()

    def show_gradients(
        self, owners: Mapping[str, torch.Tensor], wrap: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Let scripts find gradients in the ``.grad`` of ``owners``, each as ``wrap(name, gradient)``."""
        for part in self.buckets:
            part.show_as(owners, wrap)

    # -- as scripts and state dicts see them ------------------------------------------------------

    def distributed(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part as a DTensor if every rank has a shard; otherwise unchanged."""
        return part

    def in_state(self, name: str) -> bool:
        return name in self.leaves

    @property
    @abstractmethod
    def gathers_state(self) -> bool:
        """Whether making a state dict is a collective; equal on all ranks."""

    @abstractmethod
    def in_own_shape(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor with a parameter's layout in the model's shape; with several ranks, a DTensor."""


def local_leaves(
    tensors: Iterable[Tensor],
    values: Mapping[str, torch.Tensor],
    shard: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return a rank's parts of some parameters, as autograd leaves.

    Args:
        tensors: the parameters, in the graph's order.
        values: whole parameters by graph name; read one at a time, in the mapping's order, and copied.
        shard: a function from a parameter's name and whole value to this rank's part.
    """
    trained = {tensor.name: tensor.requires_grad for tensor in tensors}
    # In one expression: a name for the whole value would keep it alive while the next one is made.
    parts = {name: shard(name, values[name].detach()) for name in values if name in trained}
    return {name: parts[name].requires_grad_(grad) for name, grad in trained.items()}


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor as a replicated DTensor, which only one rank writes to a distributed checkpoint."""
    # run_check would broadcast what is the same everywhere.
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


_Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A block of a tensor: (start in the whole tensor, size, start in the shard), by dim."""


def _own_placements(atoms: Atoms, layout: Layout, mesh: Sequence[int]) -> tuple[Placement, ...] | None:
    """Return DTensor placements, one per mesh axis, that split a tensor of the model's shape by ``layout``.

    None if placements cannot express the layout (an uneven split of a factor inside a dim), or if PyTorch
    would silently concatenate the shards in another order (``_StridedShard``). ``mesh`` begins with the
    number of micro-batches.
    """
    sizes = [size for dim in atoms for size in dim]
    ends = list(itertools.accumulate(len(dim) for dim in atoms))
    placements: list[Placement] = [Replicate() for _ in layout[1:]]
    # Left to right, as DTensors are read: each axis cuts what the previous axes have left.
    for axis, code in enumerate(layout):
        if axis == 0 or code < 0:
            continue
        dim = next(d for d, end in enumerate(ends) if code < end)
        if any(isinstance(placed, _StridedShard) and placed.dim == dim for placed in placements):
            return None
        outer = prod(sizes[ends[dim] - len(atoms[dim]) : code])
        inner = prod(sizes[code + 1 : ends[dim]])
        if sizes[code] % mesh[axis]:
            # In an uneven cut, pieces are whole atoms here but any number of rows in a DTensor.
            if outer > 1 or inner > 1:
                return None
            placements[axis - 1] = Shard(dim)
            continue
        placements[axis - 1] = _StridedShard(dim, split_factor=outer) if outer > 1 else Shard(dim)
        sizes[code] //= mesh[axis]
    return tuple(placements)


def blocks(value: DTensor) -> list[_Block]:
    """Return the blocks of the whole tensor that this rank's part consists of, in order."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    runs: list[list[tuple[int, int, int]]] = []
    for dim, size in enumerate(value.shape):
        rows = torch.arange(size)
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
                rows = _part(rows, placement, value.device_mesh.size(axis), coordinate[axis])
        runs.append(_runs(rows.tolist()))
    return [
        tuple(tuple(column) for column in zip(*parts, strict=True))  # type: ignore[misc]
        for parts in itertools.product(*runs)
    ]


def _part(rows: torch.Tensor, placement: Placement, parts: int, index: int) -> torch.Tensor:
    pieces = rows.chunk(int(placement.split_factor)) if isinstance(placement, _StridedShard) else (rows,)
    chunks = [piece.chunk(parts) for piece in pieces]
    return torch.cat([sliced[index] if index < len(sliced) else rows[:0] for sliced in chunks])


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for position, row in enumerate(rows):
        if runs and runs[-1][0] + runs[-1][1] == row:
            start, length, offset = runs[-1]
            runs[-1] = (start, length + 1, offset)
        else:
            runs.append((row, 1, position))
    return runs


# -- distributed checkpoints -------------------------------------------------------------------------------


def _is_strided(value: DTensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in value.placements)


def _teach_checkpoints() -> None:
    """Patch ``torch.distributed.checkpoint`` to save, load and broadcast strided shards."""
    if getattr(DTensor, "_tells_blocks", False):
        return
    write, chunks, shard = (
        DTensor.__create_write_items__,
        DTensor.__create_chunk_list__,
        DTensor.__get_tensor_shard__,
    )

    def write_items(self: DTensor, fqn: str, value: Any) -> list[WriteItem]:
        if not _is_strided(self):
            return write(self, fqn, value)
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in chunk_list(self)
        ]

    def chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        if not _is_strided(self):
            return chunks(self)
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))
            for start, size, _ in blocks(self)
        ]

    def tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not _is_strided(self):
            return shard(self, index)
        for start, size, offset in blocks(self):
            if torch.Size(start) == index.offset:
                return _narrowed(self.to_local(), offset, size)
        raise AssertionError(f"{index} is no block of this rank")

    DTensor.__create_write_items__ = write_items  # type: ignore[assignment, method-assign]
    DTensor.__create_chunk_list__ = chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[method-assign]
    state_dict_utils._distribute_tensors = functools.partial(
        _fill_strided, state_dict_utils._distribute_tensors
    )
    DTensor._tells_blocks = True  # type: ignore[attr-defined]


def _fill_strided(
    original: Callable[..., None], state: dict[str, Any], keys: Sequence[str], *more: Any, **named: Any
) -> None:
    """Copy the parts of whole tensors into strided shards; replaces PyTorch's ``_distribute_tensors``."""
    for key in keys:
        pair = state.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], DTensor) and _is_strided(pair[0]):
            place, whole = pair
            if place.is_meta:
                place = torch.empty_like(place, device=whole.device)
            local = place.to_local()
            for start, size, offset in blocks(place):
                _narrowed(local, offset, size).copy_(_narrowed(whole, start, size))
            state[key] = place
    # It leaves tensors alone.
    original(state, keys, *more, **named)


def _narrowed(value: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (position, length) in enumerate(zip(start, size, strict=True)):
        value = value.narrow(dim, position, length)
    return value


def shard_of(runtime: Runtime, name: str, atoms: Atoms, layout: Layout, value: torch.Tensor) -> torch.Tensor:
    """Copy this rank's shard of a whole tensor to this rank's device."""
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
    """This rank's shards of the parameters of a sharded plan, as the plan stores them."""

    def __init__(self, strategy: Strategy, runtime: Runtime, values: Mapping[str, torch.Tensor]):
        self.strategy, self.runtime = strategy, runtime
        self.leaves = local_leaves(strategy.graph.atoms.graph.parameters, values, self.shard)
        # After the leaves: the buckets put hooks on them.
        self.accumulated = Gradients(runtime, gradient_buckets(strategy), self.leaves)
        self.buckets = (self.accumulated,)

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        layout = self.strategy.stored[name]
        shard = shard_of(self.runtime, name, self.strategy.atoms(name), layout, value)
        return shard.to(getattr(torch, self.strategy.tensor(name).stored_dtype))

    def shard_index(self, name: str) -> tuple[int, ...]:
        place, stored = self.runtime.place, self.strategy.stored[name]
        return tuple(place[a] for a, code in enumerate(stored) if a > 0 and code > REPLICATE)

    def replica_axes(self, name: str) -> tuple[int, ...]:
        return tuple(a for a, code in enumerate(self.strategy.stored[name]) if a > 0 and code <= REPLICATE)

    def copies(self, name: str) -> int:
        return prod(self.runtime.mesh[axis] for axis in self.replica_axes(name))

    def distributed(self, name: str, part: torch.Tensor) -> torch.Tensor:
        mesh, layout = self.runtime.device_mesh, self.strategy.stored[name]
        if mesh is None:
            return part
        return _as_dtensor(part, self.strategy.atoms(name), layout, mesh, self.runtime)

    @property
    def gathers_state(self) -> bool:
        """Whether DTensors cannot express some layout in the model's shape, so that state dicts gather."""
        return gathers_state(self.strategy)

    def in_own_shape(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor with a parameter's layout, gathered if it lacks the model's shape."""
        shape = self.strategy.tensor(name).shape
        if tuple(value.shape) == shape or not isinstance(value, DTensor):
            return value
        return replicated(value.full_tensor().detach().view(shape), value.device_mesh)


def has_own_shape(strategy: Strategy, name: str) -> bool:
    """Return whether DTensors can express a stored parameter's layout in the model's shape."""
    return _own_placements(strategy.atoms(name), strategy.stored[name], strategy.mesh) is not None


def gathers_state(*stages: Strategy) -> bool:
    """Return whether state dicts of a plan with these stages gather parameters."""
    return any(not has_own_shape(stage, name) for stage in stages for name in stage.stored)


def _shown_in_atoms(atoms: Atoms, layout: Layout, mesh: Sequence[int]) -> tuple[bool, ...]:
    """Return, by dim, whether a DTensor can express the layout only with the dim split into its factors."""
    shown = []
    position = 0
    for dim in atoms:
        sharded = {code - position for code in layout if position <= code < position + len(dim)}
        parts = prod(size for size, code in zip(mesh, layout, strict=True) if code == position)
        # Equal cuts of an outermost atom make slices that `Shard` of the whole dim also expresses; unequal
        # ones are whole atoms here, and any number of rows in a DTensor.
        shown.append(bool(sharded - {0}) or (len(dim) > 1 and dim[0] % parts != 0))
        position += len(dim)
    return tuple(shown)


def _in_view(atoms: Atoms, shown: Sequence[bool]) -> tuple[int, ...]:
    return tuple(
        size for dim, each in zip(atoms, shown, strict=True) for size in (dim if each else (prod(dim),))
    )


def _dtensor_placements(atoms: Atoms, layout: Layout, shown: Sequence[bool]) -> tuple[Placement, ...]:
    dims: list[int] = []
    first = 0
    for dim, each in zip(atoms, shown, strict=True):
        dims += range(first, first + len(dim)) if each else [first] * len(dim)
        first += len(dim) if each else 1
    # From 1 on: a DTensor knows nothing of micro-batches, and a parameter is not split by them.
    return tuple(Shard(dims[code]) if code >= 0 else Replicate() for code in layout[1:])


def _as_dtensor(
    local: torch.Tensor, atoms: Atoms, layout: Layout, mesh: DeviceMesh, runtime: Runtime
) -> DTensor:
    """Return the DTensor of a local shard without a copy, in the tensor's own shape if DTensors allow it."""
    shape = tuple(map(prod, atoms))
    placements = _own_placements(atoms, layout, runtime.mesh)
    local_view = local_shape(atoms, layout, runtime.mesh, runtime.place)
    if placements is None:
        shown = _shown_in_atoms(atoms, layout, runtime.mesh)
        shape, placements = _in_view(atoms, shown), _dtensor_placements(atoms, layout, shown)
        local_view = _in_view(local_atoms(atoms, layout, runtime.mesh, runtime.place), shown)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    dtensor: DTensor = DTensor.from_local(
        local.view(local_view),
        mesh,
        placements,
        # The check would communicate; shape and stride are given, as uneven shards do not determine the
        # whole.
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    if _is_strided(dtensor):
        _teach_checkpoints()
    return dtensor
