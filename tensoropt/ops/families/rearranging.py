"""Operators that rearrange the elements of a tensor: concatenations, copies, padding, windows."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tensoropt.graph import Ref
from tensoropt.ops.calls import LocalCall, OperatorShard, OpSpec, aten
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike


def _cat(b: Builder) -> None:
    """Allow splits of every dim; the joined dim is cut inside each piece, if pieces are equally long."""
    tensors = [b.tensor(t) for t in b.arg(0)]
    rank = len(b.output().shape)
    if any(len(t.shape) != rank for t in tensors):
        raise Opaque(b.op.name)
    dim = b.arg(1, "dim", 0) % rank
    labels: list[Loops] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(b.output().shape)]
    pieces = [t.shape[dim] for t in tensors]
    result = list(labels)
    if len(set(pieces)) == 1 and pieces[0] > 1:
        inner = b.loop(f"d{dim}", pieces[0])
        # A slice of the result's dim has elements of only some pieces, whereas every rank has a part of each:
        # the inner loop splits, the pieces do not.
        result[dim] = (b.loop("piece", len(pieces), splittable=False), inner)
        labels[dim] = inner
    for t in dict.fromkeys(t.name for t in tensors):
        b.read(Ref(t), labels)
    b.write(result)
    b.linear = b.cheap = True


def _stack(b: Builder) -> None:
    rank = len(b.output().shape)
    dim = b.arg(1, "dim", 0) % rank
    result: list[Loops] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(b.output().shape)]
    labels = [label for i, label in enumerate(result) if i != dim]
    for t in dict.fromkeys(r.name for r in b.arg(0)):
        b.read(Ref(t), labels)
    b.write(result)
    b.linear = b.cheap = True


def _repeat(b: Builder) -> None:
    """Allow splits of every dim; copies of a dim are an outer loop that only the result has."""
    shape, counts = b.tensor(b.arg(0)).shape, b.arg(1)
    offset = len(counts) - len(shape)
    reads: list[Loops] = []
    writes: list[Loops] = [None] * offset
    for i, size in enumerate(shape):
        loop = b.loop(f"d{i}", size)
        count = counts[offset + i]
        reads.append(loop)
        writes.append((b.loop("copy", count), loop) if count > 1 else loop)
    b.read(b.arg(0), reads)
    b.write(writes)
    b.linear = b.cheap = True


@alike("mode")
def _moved_within_dims(b: Builder) -> None:
    """Allow splits of the dims that are not rolled, flipped or padded."""
    before = b.shape
    amounts = b.arg(1)  # padding starts from the last dim; one dim may lose what it gains
    touched = {len(before) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    if b.op.target in ("aten.roll.default", "aten.flip.default"):
        dims = b.arg(2, "dims", []) if "roll" in b.op.target else b.arg(1)
        touched = {d % len(before) for d in dims} if dims else set(range(len(before)))
    b.along(*touched)
    value = b.arg(2 if "constant" in b.op.target else 3, "value")
    b.linear = "pad" not in b.op.target or not value
    b.cheap = True


@alike("n")
def _diff(b: Builder) -> None:
    labels = b.along(b.dim(2, "dim", -1))
    b.read(b.arg(3, "prepend"), labels)
    b.read(b.arg(4, "append"), labels)
    b.linear = b.cheap = True


@alike("output_size")
def _repeat_interleave(b: Builder) -> None:
    """Allow splits of every dim; copies of elements are an inner loop that only the result has."""
    shape, count, dim = b.tensor(b.arg(0)).shape, b.arg(1), b.arg(2, "dim")
    if not isinstance(count, int):
        raise Opaque(b.op.name)
    loops = b.loops(shape)
    copies: list[Loops] = list(loops)
    copy = b.loop("copy", count)
    if dim is None:
        copies = [(*loops, copy)]
    else:
        copies[dim] = (loops[dim], copy)
    b.read(b.arg(0), loops)
    b.write(copies)
    b.linear = True


def _gated(b: Builder) -> None:
    """Allow splits of a gated linear unit (one half gates the other); its halves are cut in the same way."""
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1, "dim", -1) % max(len(shape), 1)
    halves, inner = b.loop("half", 2, splittable=False), b.loop(f"d{dim}", shape[dim] // 2)
    labels: list[Loops] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    before, after = list(labels), list(labels)
    before[dim], after[dim] = (halves, inner), inner
    b.read(b.arg(0), before)
    b.write(after)
    b.cheap = True


@alike("size step")
def _windows(b: Builder) -> None:
    b.write([*b.around([b.dim(1)]), None])
    b.linear = b.cheap = True


@alike("output_size kernel_size dilation padding stride")
def _columns(b: Builder) -> None:
    """Allow splits of batch and channels (im2col, col2im): ``[n, c, h, w] <-> [n, c * window, places]``."""
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    image, cols = (before, after) if "im2col" in b.op.target else (after, before)
    if len(image) != 4 or len(cols) != 3:
        raise Opaque(b.op.name)
    n, c = b.loop("batch", image[0]), b.loop("channels", image[1])
    window = b.loop("window", cols[1] // image[1], splittable=False)
    whole: list[Loops] = [n, c, None, None]
    flat: list[Loops] = [n, (c, window), None]
    b.read(b.arg(0), whole if image is before else flat)
    b.write(flat if image is before else whole)
    b.linear = image is before


@alike("diagonal")
def _triangle(b: Builder) -> None:
    """Allow splits of leading dims; matrices stay whole, because the triangle depends on positions."""
    b.along(len(b.shape) - 2, len(b.shape) - 1)
    b.linear = b.cheap = True


def _local_repeat(shard: OperatorShard, call: LocalCall) -> LocalCall:
    before, after = shard.read_shape(0), shard.write_shape()
    new = len(after) - len(before)
    counts = [n // max(before[i - new], 1) if i >= new else n for i, n in enumerate(after)]
    return replace(call, args=(call.args[0], counts, *call.args[2:]))


def _local_repeat_interleave(shard: OperatorShard, call: LocalCall) -> LocalCall:
    count = prod(shard.write_shape()) // max(prod(shard.read_shape(0)), 1)
    kwargs = {k: v for k, v in call.kwargs.items() if k != "output_size"}
    return replace(call, args=(call.args[0], count, *call.args[2:]), kwargs=kwargs)


SPECS = (
    aten("cat.default concat.default", _cat),
    aten("stack.default", _stack),
    aten("repeat.default", _repeat, localiser=_local_repeat),
    aten("repeat_interleave.self_int", _repeat_interleave, localiser=_local_repeat_interleave),
    OpSpec(
        targets=(
            "aten.pad.default",
            "aten.constant_pad_nd.default",
            *(f"aten.{kind}_pad{d}d.default" for kind in ("reflection", "replication") for d in (1, 2, 3)),
            "aten.roll.default",
            "aten.flip.default",
        ),
        rule=_moved_within_dims,
    ),
    aten("diff.default", _diff),
    aten("glu.default", _gated),
    aten("unfold.default", _windows),
    aten("im2col.default col2im.default", _columns),
    aten("tril.default triu.default", _triangle),
)
