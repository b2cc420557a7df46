"""Reads at indices (advanced indexing, gathers): indices may be split; dims that are looked up stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tensoropt.graph import Ref, Tensor
from tensoropt.ops.calls import CostClass, LocalCall, OperatorShard, OpSpec, Samples, Shape, aten
from tensoropt.ops.index_space import Builder, Loops, Opaque
from tensoropt.ops.kernels import ShardContext


def _counts_along(b: Builder, tensor: Tensor, size: int) -> int | None:
    """Return the only dim along which a constant index changes, if it counts ``0 .. size - 1``; else None."""
    value = b.graph.constants.get(tensor.name)
    if value is None or value.is_meta or tensor.dtype == "bool" or size == 1:
        return None
    # Constants are stored at broadcast-reduced shape: a counting index varies along one dim only.
    varying = [dim for dim, length in enumerate(value.shape) if length > 1]
    counted = len(varying) == 1 and value.numel() == size and value.flatten().tolist() == list(range(size))
    return varying[0] if counted else None


def _index(b: Builder) -> None:
    """Describe ``y = x[i, j, :]``: looked-up dims stay whole; dims of the indices and other dims may be
    split.

    A dim that an index 0, 1, 2, ... looks up (``hidden[arange(batch), last]``) is split with that index.
    """
    source = b.tensor(b.arg(0))
    indices = {p: b.tensor(index) for p, index in enumerate(b.arg(1)) if isinstance(index, Ref)}
    positions = list(indices)
    if not positions or any(t.dtype in ("bool", "uint8") for t in indices.values()):
        raise Opaque(b.op.name)
    rank = max(len(t.shape) for t in indices.values())
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    # NumPy's rule: the looked-up dims keep their position if they are neighbours, otherwise they come first.
    first_place = positions[0] if adjacent else 0
    shape = b.output().shape[first_place : first_place + rank]
    loops = [b.loop(f"index{i}", size) for i, size in enumerate(shape)]
    labels: list[Loops] = [
        None if i in indices else b.loop(f"d{i}", size) for i, size in enumerate(source.shape)
    ]
    kept = [label for i, label in enumerate(labels) if i not in indices]
    counting = {
        p: dim + rank - len(t.shape)
        for p, t in indices.items()
        if (dim := _counts_along(b, t, source.shape[p])) is not None
    }
    for position, dim in counting.items():
        # Two dims counted by one loop (a diagonal) cannot both be cut by it.
        if list(counting.values()).count(dim) == 1:
            labels[position] = loops[dim]
    b.read(b.arg(0), labels)
    for position, tensor in indices.items():
        b.read(b.arg(1)[position], loops[rank - len(tensor.shape) :])
    b.write([*kept[:first_place], *loops, *kept[first_place:]])


def _gather(b: Builder) -> None:
    """Allow splits of the index along the looked-up dim, and of every other dim in which operand and index
    are equally long."""
    where = 2 if "gather" in b.op.target else 1
    shape, index = b.tensor(b.arg(0)).shape, b.tensor(b.arg(where)).shape
    dim = b.arg(3 - where, "dim")
    if dim is None or not shape or len(index) != len(shape):
        raise Opaque(b.op.name)
    dim %= max(len(shape), 1)
    result_labels = b.around([i for i, size in enumerate(shape) if i == dim or size != index[i]])
    result_labels[dim] = b.loop("index", index[dim])
    b.read(b.arg(where), result_labels)
    b.write(result_labels)


def _index_select(b: Builder) -> None:
    dim = b.dim(1)
    labels = b.around([dim])
    rows = b.loop("index", b.tensor(b.arg(2)).shape[0])
    b.read(b.arg(2), [rows])
    b.write([rows if i == dim else label for i, label in enumerate(labels)])


def _local_index(shard: OperatorShard, call: LocalCall) -> LocalCall:
    source = shard.space.reads[0]
    refs = {p: value.name for p, value in enumerate(shard.op.args[1]) if isinstance(value, Ref)}
    counting = tuple(p for p in refs if shard.split(source.dims[p]))
    if not counting:
        return call
    return LocalCall("kernels.index_relative", call.args, {}, call.name, (counting,))


def _index_relative(
    context: ShardContext, name: str, counting: tuple[int, ...], x: torch.Tensor, indices: Any
) -> torch.Tensor:
    """Return ``x[indices]``. Indices that count 0, 1, 2, ... (at the positions ``counting``) are made
    relative to the shard's start."""
    # A counting index begins with the shard's own offset.
    local = [i - i.flatten()[0] if p in counting else i for p, i in enumerate(indices)]
    return torch.ops.aten.index.Tensor(x, local)


def along_a_dim(args: tuple[Any, ...], shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, range of values) of the index tensor in a call ``(tensor, dim, index, ...)``."""
    size = shape(args[0])
    yield args[2].name, (0, size[args[1] % len(size)] if size else 1)


def along_dims(args: tuple[Any, ...], shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, range of values) of each index in a call ``(tensor, [index or None per dim], ...)``."""
    for dim, index in enumerate(args[1]):
        if isinstance(index, Ref):
            yield index.name, (0, shape(args[0])[dim])


def _numbers(args: tuple[Any, ...], shape: Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    yield args[0].name, (0, args[1])


_lookup = partial(aten, cost_class=CostClass.LOOKUP)

SPECS = (
    _lookup(
        "index.Tensor",
        _index,
        localiser=_local_index,
        kernels={"kernels.index_relative": _index_relative},
        samples=Samples(limits=along_dims, timed=False),
    ),
    _lookup("gather.default", _gather, samples=Samples(limits=along_a_dim)),
    aten("take_along_dim.default", _gather),
    _lookup("index_select.default", _index_select, samples=Samples(limits=along_a_dim)),
    OpSpec(without_rule=("one_hot",), samples=Samples(limits=_numbers, timed=False)),
)
