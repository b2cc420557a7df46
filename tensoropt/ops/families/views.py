"""Views (reshapes, permutations, slices), which describe a tensor's memory anew; most launch no kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from tensoropt.ops.calls import LocalCall, OperatorShard, aten
from tensoropt.ops.index_space import Builder, Loops, alike


def refine(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...] | None:
    """Return the common refinement of two factorisations of one number, or None if there is none.

    >>> refine((12,), (3, 4)), refine((2, 6), (4, 3)), refine((4, 6), (6, 4))
    ((3, 4), (2, 2, 3), None)
    """

    def boundaries(sizes: Sequence[int]) -> set[int]:
        return {prod(sizes[i:]) for i in range(1, len(sizes))}

    marks = sorted({prod(left), *boundaries(left), *boundaries(right), 1}, reverse=True)
    factors = []
    for outer, inner in pairwise(marks):
        if outer % inner:
            return None
        factors.append(outer // inner)
    return tuple(factors)


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    blocks: list[tuple[list[int], list[int]]] = []
    # Two pointers over both shapes: the shape whose product is behind takes its next dim.
    while left and right:
        a, c = [left.pop(0)], [right.pop(0)]
        while (pa := prod(before[i] for i in a)) != (pc := prod(after[i] for i in c)):
            if pa < pc:
                a.append(left.pop(0))
            else:
                c.append(right.pop(0))
        blocks.append((a, c))
    return blocks


@alike("*")
def _reshape(b: Builder) -> None:
    """Allow splits of the factors of dims that both shapes have in common (:func:`refine` finds them)."""
    source = b.tensor(b.arg(0))
    before, after = source.shape, b.output().shape
    reads: list[Loops] = [None] * len(before)
    writes: list[Loops] = [None] * len(after)
    b.linear = b.cheap = True
    if 0 in before:
        return  # empty dims have no factorisation
    for left, right in _blocks(before, after):
        factors = refine([before[i] for i in left], [after[i] for i in right])
        if factors is None:
            continue
        loops = [b.loop(f"d{left[0]}", size, uneven=len(left) == len(right) == 1) for size in factors]
        for dims, shape, labels in ((left, before, reads), (right, after, writes)):
            position = 0
            for dim in dims:
                used: list[int] = []
                while prod(factors[position - len(used) : position]) != shape[dim]:
                    used.append(loops[position])
                    position += 1
                labels[dim] = tuple(used)
    b.read(b.arg(0), reads)
    b.write(writes)


def _permute(b: Builder) -> None:
    """Allow splits of every dim; the result has the operand's loops in another order."""
    shape = b.tensor(b.arg(0)).shape
    order = list(range(len(shape)))
    if not shape:
        pass  # a single number has the dims 0 and -1 for PyTorch
    elif b.op.target == "aten.permute.default":
        order = [d % len(shape) for d in b.arg(1)]
    elif b.op.target == "aten.t.default":
        order.reverse()
    elif b.op.target == "aten.movedim.int":
        source, target = b.arg(1) % len(shape), b.arg(2) % len(shape)
        order.remove(source)
        order.insert(target, source)
    else:
        i, j = b.arg(1) % len(shape), b.arg(2) % len(shape)
        order[i], order[j] = order[j], order[i]
    loops = b.loops(shape, uneven=True)
    b.read(b.arg(0), loops)
    b.write([loops[d] for d in order])
    b.linear = b.cheap = True


@alike("size")
def _expand(b: Builder) -> None:
    """Allow splits of every dim; an expanded dim has a loop that only the result has."""
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    loops = b.loops(after)
    b.read(b.arg(0), loops[len(after) - len(before) :])
    b.write(loops)
    b.linear = b.cheap = True


def _tile_dim(b: Builder, dim: int, piece: int) -> tuple[list[Loops], list[Loops]]:
    """Return (loops of each dim of the tensor, loops of each dim of a piece) if ``dim`` is cut into pieces.

    Args:
        piece: size of a piece; 0 for unequal pieces, which keep the dim whole.
    """
    shape = b.tensor(b.arg(0)).shape
    before: list[Loops] = [b.loop(f"d{i}", s, uneven=True) if i != dim else None for i, s in enumerate(shape)]
    after = list(before)
    if piece:
        tile, inner = b.loop("piece", shape[dim] // piece, splittable=False), b.loop(f"d{dim}", piece)
        before[dim], after[dim] = (tile, inner), inner
    return before, after


@alike("split_size split_sizes chunks")
def _split(b: Builder) -> None:
    """Allow splits of every dim; the cut dim is split inside each piece, if pieces are equally long."""
    rank = len(b.tensor(b.arg(0)).shape)
    dim = b.arg(2, "dim", 0) % rank
    pieces = {b.output(i).shape[dim] for i in range(len(b.op.outputs))}
    before, after = _tile_dim(b, dim, pieces.pop() if len(pieces) == 1 else 0)
    b.read(b.arg(0), before)
    for i in range(len(b.op.outputs)):
        b.write(after, i)
    b.linear = b.cheap = True


@alike("end")
def _slice_(b: Builder) -> None:
    """Allow splits of every dim. The sliced dim is split only if equal slices tile it; each slice is then
    split in the same way."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1, "dim", 0) % len(shape)
    length, start, step = b.output().shape[dim], b.arg(2, "start", 0) or 0, b.arg(4, "step", 1)
    start = start + shape[dim] if start < 0 else start
    tiles = shape[dim] // max(length, 1)
    equal = step == 1 and length > 1 and tiles > 1 and tiles * length == shape[dim] and start % length == 0
    before, after = _tile_dim(b, dim, length if equal and _tiled_by_siblings(b, dim, length) else 0)
    if step == 1 and length == shape[dim]:
        loop = b.loop(f"d{dim}", length, uneven=True)
        before[dim] = after[dim] = loop
    b.read(b.arg(0), before)
    b.write(after)
    b.linear = b.cheap = True


def _tiled_by_siblings(b: Builder, dim: int, length: int) -> bool:
    name = b.arg(0).name
    siblings = [op for op in b.graph.consumers[name] if op.target == "aten.slice.Tensor"]
    same = [op for op in siblings if b.graph.tensors[op.outputs[0]].shape[dim] == length]
    # For a single slice, a tile would only be one more boundary that all other views have to agree with.
    return len(same) > 1


@alike("index")
def _select(b: Builder) -> None:
    dim = b.dim(1, "dim", 0)
    labels = [label for i, label in enumerate(b.around([dim])) if i != dim]
    for index in range(len(b.op.outputs)):
        b.write(labels, index)
    b.linear = b.cheap = True


def _view_as_real(b: Builder) -> None:
    b.write([*b.around(()), None])
    b.linear = b.cheap = True


def _local_reshape(shard: OperatorShard, call: LocalCall) -> LocalCall:
    """Return a reshape to the shard's shape; a view fails where a shard has to be copied."""
    shape = list(shard.write_shape())
    return LocalCall("aten.reshape.default", (call.args[0], shape), {}, call.name)


def _local_expand(shard: OperatorShard, call: LocalCall) -> LocalCall:
    return replace(call, args=(call.args[0], list(shard.write_shape())), kwargs={})


def _local_split(shard: OperatorShard, call: LocalCall) -> LocalCall:
    shape = shard.read_shape(0)
    dim = shard.argument(2, "dim", 0) % len(shape)
    sizes = [shard.write_shape(i)[dim] for i in range(len(shard.op.outputs))]
    return LocalCall("aten.split_with_sizes.default", (call.args[0], sizes, dim), {}, call.name)


def _local_slice(shard: OperatorShard, call: LocalCall) -> LocalCall:
    whole = shard.atoms.graph.tensors[shard.op.inputs()[0]].shape
    dim = shard.argument(1, "dim", 0) % len(whole)
    local = shard.read_shape(0)[dim]
    if local == whole[dim]:
        return call
    start = shard.argument(2, "start", 0) or 0
    start = start + whole[dim] if start < 0 else start
    # Exact: a sliced dim is split only inside its tiles, so start and dim shrink in the same proportion.
    start = start * local // whole[dim]
    end = start + shard.write_shape()[dim]
    return replace(call, args=(call.args[0], dim, start, end, 1), kwargs={})


SPECS = (
    aten("view.default reshape.default", _reshape, localiser=_local_reshape, launches=False),
    aten(
        "_unsafe_view.default flatten.using_ints unflatten.int squeeze.default squeeze.dim "
        "squeeze.dims unsqueeze.default",
        _reshape,
        localiser=_local_reshape,
    ),
    aten("permute.default transpose.int", _permute, launches=False),
    aten("t.default movedim.int swapaxes.default", _permute),
    aten("expand.default", _expand, localiser=_local_expand, launches=False),
    aten("split.Tensor split.sizes", _split, localiser=_local_split, launches=False),
    aten("split_with_sizes.default chunk.default", _split, localiser=_local_split),
    aten("slice.Tensor", _slice_, localiser=_local_slice, launches=False),
    aten("select.int", _select, launches=False),
    aten("unbind.int", _select),
    aten("view_as_real.default", _view_as_real),
)
