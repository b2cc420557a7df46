"""Operators that move data without computing: reshapes, permutations, slices, concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from tensoropt.graph import Ref
from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


def refine(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...] | None:
    """Common refinement of two factorisations of one number, or None when there is none.

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
    """Smallest runs of dims with equal products; dims of size 1 are left out."""
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    blocks: list[tuple[list[int], list[int]]] = []
    while left and right:
        a, c = [left.pop(0)], [right.pop(0)]
        while (pa := prod(before[i] for i in a)) != (pc := prod(after[i] for i in c)):
            if pa < pc:
                a.append(left.pop(0))
            else:
                c.append(right.pop(0))
        blocks.append((a, c))
    return blocks


@rule(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.unsqueeze.default",
)
def reshape(b: Builder) -> None:
    """Each run of dims is one loop nest at the common refinement of its two factorisations."""
    source = b.tensor(b.arg(0))
    before, after = source.shape, b.output().shape
    reads: list[Label] = [None] * len(before)
    writes: list[Label] = [None] * len(after)
    b.linear = b.cheap = True
    if 0 in before:
        return
    for left, right in _blocks(before, after):
        factors = refine([before[i] for i in left], [after[i] for i in right])
        if factors is None:
            continue
        loops = [b.loop(f"d{left[0]}", size, uneven=len(left) == len(right) == 1) for size in factors]
        for dims, shape, labels in ((left, before, reads), (right, after, writes)):
            position = 0
            for dim in dims:
                taken: list[int] = []
                while prod(factors[position - len(taken) : position]) != shape[dim]:
                    taken.append(loops[position])
                    position += 1
                labels[dim] = tuple(taken)
    b.read(b.arg(0), reads)
    b.write(writes)


@rule(
    "aten.permute.default",
    "aten.transpose.int",
    "aten.t.default",
    "aten.movedim.int",
    "aten.swapaxes.default",
)
def permute(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    order = list(range(len(shape)))
    if b.op.target == "aten.permute.default":
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
    loops = [b.loop(f"d{i}", size, uneven=True) for i, size in enumerate(shape)]
    b.read(b.arg(0), loops)
    b.write([loops[d] for d in order])
    b.linear = b.cheap = True


@rule("aten.expand.default")
def expand(b: Builder) -> None:
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    loops = [b.loop(f"d{i}", size) for i, size in enumerate(after)]
    b.read(b.arg(0), loops[len(after) - len(before) :])
    b.write(loops)
    b.linear = b.cheap = True


def _tile_dim(b: Builder, dim: int, pieces: Sequence[int]) -> tuple[list[Label], list[Label]]:
    """Labels before and after cutting ``dim`` into equal pieces (the tile index is never split)."""
    shape = b.tensor(b.arg(0)).shape
    labels: list[Label] = [b.loop(f"d{i}", s, uneven=True) if i != dim else None for i, s in enumerate(shape)]
    piece = pieces[0]
    if all(size == piece for size in pieces) and shape[dim] == piece * len(pieces):
        tile = b.loop("piece", len(pieces), splittable=False)
        inner = b.loop(f"d{dim}", piece)
        before, after = list(labels), list(labels)
        before[dim], after[dim] = (tile, inner), inner
        return before, after
    return labels, list(labels)


@rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.split.sizes")
def split(b: Builder) -> None:
    """Equal pieces are the outer atom of the dim; unequal pieces keep it whole."""
    rank = len(b.tensor(b.arg(0)).shape)
    dim = b.arg(2, "dim", 0) % rank
    pieces = [b.output(i).shape[dim] for i in range(len(b.op.outputs))]
    before, after = _tile_dim(b, dim, pieces)
    b.read(b.arg(0), before)
    for i in range(len(b.op.outputs)):
        b.write(after, i)
    b.linear = b.cheap = True


@rule("aten.slice.Tensor")
def slice_(b: Builder) -> None:
    """A slice that is one of equal tiles keeps the inner atom; any other keeps the dim whole."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1, "dim", 0) % len(shape)
    length, start, step = b.output().shape[dim], b.arg(2, "start", 0) or 0, b.arg(4, "step", 1)
    start = start + shape[dim] if start < 0 else start
    tiles = shape[dim] // max(length, 1)
    equal = step == 1 and length > 1 and tiles > 1 and tiles * length == shape[dim] and start % length == 0
    before, after = _tile_dim(
        b, dim, [length] * tiles if equal and _tiled_by_siblings(b, dim, length) else [0]
    )
    if step == 1 and length == shape[dim]:
        loop = b.loop(f"d{dim}", length, uneven=True)
        before[dim] = after[dim] = loop
    b.read(b.arg(0), before)
    b.write(after)
    b.linear = b.cheap = True


def _tiled_by_siblings(b: Builder, dim: int, length: int) -> bool:
    """Whether other slices of the same tensor use the same tiles (then the tile is an atom)."""
    name = b.arg(0).name
    siblings = [op for op in b.graph.consumers[name] if op.target == "aten.slice.Tensor"]
    same = [op for op in siblings if b.graph.tensors[op.outputs[0]].shape[dim] == length]
    return len(same) > 1


@rule("aten.select.int")
def select(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write([label for i, label in enumerate(labels) if i != dim])
    b.linear = b.cheap = True


@rule("aten.unbind.int")
def unbind(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1, "dim", 0) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    for i in range(len(b.op.outputs)):
        b.write([label for j, label in enumerate(labels) if j != dim], i)
    b.linear = b.cheap = True


@rule("aten.cat.default", "aten.concat.default")
def cat(b: Builder) -> None:
    """Equal pieces become the outer atom of the result; unequal ones keep the dim whole."""
    tensors = [b.tensor(t) for t in b.arg(0)]
    rank = len(b.output().shape)
    if any(len(t.shape) != rank for t in tensors):
        raise Opaque(b.op.name)
    dim = b.arg(1, "dim", 0) % rank
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(b.output().shape)]
    pieces = [t.shape[dim] for t in tensors]
    result = list(labels)
    if len(set(pieces)) == 1 and pieces[0] > 1:
        inner = b.loop(f"d{dim}", pieces[0])
        result[dim] = (b.loop("piece", len(pieces), splittable=False), inner)
        labels[dim] = inner
    for t in dict.fromkeys(t.name for t in tensors):
        b.read(Ref(t), labels)
    b.write(result)
    b.linear = b.cheap = True


@rule("aten.stack.default")
def stack(b: Builder) -> None:
    rank = len(b.output().shape)
    dim = b.arg(1, "dim", 0) % rank
    result: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(b.output().shape)]
    labels = [label for i, label in enumerate(result) if i != dim]
    for t in dict.fromkeys(r.name for r in b.arg(0)):
        b.read(Ref(t), labels)
    b.write(result)
    b.linear = b.cheap = True


@rule("aten.repeat.default")
def repeat(b: Builder) -> None:
    shape, counts = b.tensor(b.arg(0)).shape, b.arg(1)
    offset = len(counts) - len(shape)
    reads: list[Label] = []
    writes: list[Label] = [None] * offset
    for i, size in enumerate(shape):
        loop = b.loop(f"d{i}", size)
        count = counts[offset + i]
        reads.append(loop)
        writes.append((b.loop("copy", count, splittable=False), loop) if count > 1 else loop)
    b.read(b.arg(0), reads)
    b.write(writes)
    b.linear = b.cheap = True


@rule(
    "aten.pad.default",
    "aten.constant_pad_nd.default",
    *(f"aten.{kind}_pad{d}d.default" for kind in ("reflection", "replication") for d in (1, 2, 3)),
    "aten.roll.default",
    "aten.flip.default",
)
def moved_within_dims(b: Builder) -> None:
    """Dims whose elements move or grow stay whole; the others pass through."""
    before = b.tensor(b.arg(0)).shape
    amounts = b.arg(1)  # padding from the last dim on; one dim may lose what it gains
    touched = {len(before) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    if b.op.target in ("aten.roll.default", "aten.flip.default"):
        dims = b.arg(2, "dims", []) if "roll" in b.op.target else b.arg(1)
        touched = {d % len(before) for d in dims} if dims else set(range(len(before)))
    labels: list[Label] = [None if i in touched else b.loop(f"d{i}", s) for i, s in enumerate(before)]
    b.read(b.arg(0), labels)
    b.write(labels)
    value = b.arg(2 if "constant" in b.op.target else 3, "value")
    b.linear = "pad" not in b.op.target or not value
    b.cheap = True


@rule("aten.diff.default")
def diff(b: Builder) -> None:
    """Neighbours along one dim, with what is put before and after it."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(2, "dim", -1) % len(shape)
    labels: list[Label] = [None if i == dim else b.loop(f"d{i}", s) for i, s in enumerate(shape)]
    for value in (b.arg(0), b.arg(3, "prepend"), b.arg(4, "append")):
        b.read(value, labels)
    b.write(labels)
    b.linear = b.cheap = True


@rule("aten.view_as_real.default")
def view_as_real(b: Builder) -> None:
    """A complex number becomes a pair, innermost."""
    loops = b.loops(b.tensor(b.arg(0)).shape)
    b.read(b.arg(0), loops)
    b.write([*loops, None])
    b.linear = b.cheap = True


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(b: Builder) -> None:
    """Every element of a dim becomes several neighbours: an inner loop that is never split."""
    shape, count, dim = b.tensor(b.arg(0)).shape, b.arg(1), b.arg(2, "dim")
    if dim is None or not isinstance(count, int):
        raise Opaque(b.op.name)
    loops = b.loops(shape)
    copies: list[Label] = list(loops)
    copies[dim % len(shape)] = (loops[dim % len(shape)], b.loop("copy", count, splittable=False))
    b.read(b.arg(0), loops)
    b.write(copies)
    b.linear = True


@rule("aten.glu.default")
def gated(b: Builder) -> None:
    """One half of a dim times the sigmoid of the other: the half is the inner loop."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1, "dim", -1) % len(shape)
    halves, inner = b.loop("half", 2, splittable=False), b.loop(f"d{dim}", shape[dim] // 2)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    before, after = list(labels), list(labels)
    before[dim], after[dim] = (halves, inner), inner
    b.read(b.arg(0), before)
    b.write(after)
    b.cheap = True


@rule("aten.unfold.default")
def windows(b: Builder) -> None:
    """Overlapping windows of one dim, which stays whole."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write([*labels, None])
    b.linear = b.cheap = True


@rule("aten.im2col.default", "aten.col2im.default")
def columns(b: Builder) -> None:
    """Windows of an image as columns, ``[n, c, h, w] <-> [n, c * window, places]``: all but places split."""
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    image, cols = (before, after) if "im2col" in b.op.target else (after, before)
    if len(image) != 4 or len(cols) != 3:
        raise Opaque(b.op.name)
    n, c = b.loop("batch", image[0]), b.loop("channels", image[1])
    window = b.loop("window", cols[1] // image[1], splittable=False)
    whole: list[Label] = [n, c, None, None]
    flat: list[Label] = [n, (c, window), None]
    b.read(b.arg(0), whole if image is before else flat)
    b.write(flat if image is before else whole)
    b.linear = image is before


@rule("aten.tril.default", "aten.triu.default")
def triangle(b: Builder) -> None:
    """Leading dims split; where an element lies in its matrix decides what becomes of it."""
    shape = b.tensor(b.arg(0)).shape
    labels: list[Label] = [b.loop(f"d{i}", s) if i < len(shape) - 2 else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write(labels)
    b.linear = b.cheap = True
