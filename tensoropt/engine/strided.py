"""Parameters that are split inside a dim, as DTensors of their own shape, and in checkpoints.

A fused projection that is split by heads is not split into slices of its matrix: every rank has some rows of
each of q, k and v. PyTorch's strided shards express this for a DTensor (they were made for FSDP over tensor
parallelism), and its operators, optimizers and redistribution understand them. Distributed checkpoints do
not: they take such a shard for one block, and refuse to save blocks that overlap. This module describes a
shard as the blocks that it consists of.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tensoropt.ops.layouts import Atoms, Layout

Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""The start of a block in the whole tensor, its size, and its start in the shard."""


def own_placements(atoms: Atoms, layout: Layout, mesh: Sequence[int]) -> tuple[Placement, ...] | None:
    """Return PyTorch's placements, on the real axes, of a tensor in its own shape; None if none of them
    express this layout, as an atom inside a dim is divided unevenly.

    Args:
        mesh: micro-batches, then the axis sizes, as in a strategy.
    """
    sizes = [size for dim in atoms for size in dim]
    ends = list(itertools.accumulate(len(dim) for dim in atoms))
    found: list[Placement] = [Replicate() for _ in layout[1:]]
    # Left to right, as DTensors are read: each axis cuts what the previous axes have left.
    for axis, code in enumerate(layout):
        if axis == 0 or code < 0:
            continue
        dim = next(d for d, end in enumerate(ends) if code < end)
        start, end = ends[dim] - len(atoms[dim]), ends[dim]
        outer = 1
        for size in sizes[start:code]:
            outer *= size
        inner = 1
        for size in sizes[code + 1 : end]:
            inner *= size
        if sizes[code] % mesh[axis]:
            # In an uneven cut, pieces are whole atoms here but any number of rows in a DTensor.
            if outer > 1 or inner > 1:
                return None
            found[axis - 1] = Shard(dim)
            continue
        found[axis - 1] = _StridedShard(dim, split_factor=outer) if outer > 1 else Shard(dim)
        sizes[code] //= mesh[axis]
    return tuple(found)


def blocks(value: DTensor) -> list[Block]:
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
        for parts in itertools.product(*([(start, length, at) for start, length, at in of] for of in runs))
    ]


def _part(rows: torch.Tensor, placement: Placement, parts: int, index: int) -> torch.Tensor:
    """Return the rows that one of ``parts`` ranks gets of the given rows."""
    pieces = rows.chunk(int(placement.split_factor)) if isinstance(placement, _StridedShard) else (rows,)
    chunks = [piece.chunk(parts) for piece in pieces]
    return torch.cat([of[index] if index < len(of) else rows[:0] for of in chunks])


def _runs(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first row, number, position in the shard) of each run of neighbouring rows."""
    found: list[tuple[int, int, int]] = []
    for position, row in enumerate(rows):
        if found and found[-1][0] + found[-1][1] == row:
            start, length, at = found[-1]
            found[-1] = (start, length + 1, at)
        else:
            found.append((row, 1, position))
    return found


# -- distributed checkpoints -------------------------------------------------------------------------------


def is_strided(value: DTensor) -> bool:
    """Return whether a rank's part may be more than one block."""
    return any(isinstance(placement, _StridedShard) for placement in value.placements)


def teach_checkpoints() -> None:
    """Let ``torch.distributed.checkpoint`` save and load strided shards of any tensor: parameters, and the
    optimizer state that PyTorch makes like them; and fill them from whole tensors of another rank
    (``broadcast_from_rank0``). Other tensors are treated as before."""
    if getattr(DTensor, "_tells_blocks", False):
        return
    write, chunks, shard = (
        DTensor.__create_write_items__,
        DTensor.__create_chunk_list__,
        DTensor.__get_tensor_shard__,
    )

    def write_items(self: DTensor, fqn: str, value: Any) -> list[WriteItem]:
        if not is_strided(self):
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
        if not is_strided(self):
            found: list[ChunkStorageMetadata] = chunks(self)
            return found
        return [
            ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))
            for start, size, _ in blocks(self)
        ]

    def tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not is_strided(self):
            return shard(self, index)
        for start, size, at in blocks(self):
            if torch.Size(start) == index.offset:
                return _narrowed(self.to_local(), at, size)
        raise AssertionError(f"{index} is no block of this rank")

    DTensor.__create_write_items__ = write_items  # type: ignore[assignment, method-assign]
    DTensor.__create_chunk_list__ = chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = tensor_shard  # type: ignore[method-assign]
    state_dict_utils._distribute_tensors = functools.partial(
        _fill_strided, state_dict_utils._distribute_tensors
    )
    DTensor._tells_blocks = True  # type: ignore[attr-defined]


def _fill_strided(
    others: Callable[..., None], state: dict[str, Any], keys: Sequence[str], *rest: Any, **named: Any
) -> None:
    """Replace PyTorch's ``_distribute_tensors``: given (place, whole tensor) pairs, fill each place with its
    part."""
    for key in keys:
        pair = state.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], DTensor) and is_strided(pair[0]):
            place, whole = pair
            if place.is_meta:
                place = torch.empty_like(place, device=whole.device)
            local = place.to_local()
            for start, size, at in blocks(place):
                _narrowed(local, at, size).copy_(_narrowed(whole, start, size))
            state[key] = place
    # It leaves alone what is already a tensor.
    others(state, keys, *rest, **named)


def _narrowed(value: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (position, length) in enumerate(zip(start, size, strict=True)):
        value = value.narrow(dim, position, length)
    return value
