"""Converters that reshape, join, cut and pad tensors, or compute shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, converters, positive
from tensoropt.capture.onnx.values import OnnxError, Traced
from tensoropt.capture.onnx.weights import torch_dtype

_CONSTANTS = ("value_float", "value_floats", "value_int", "value_ints")


@converter("Constant")
def _constant(call: Call) -> Traced:
    value = call.attribute("value")
    if value is not None:
        return call.builder.known(value)
    for name in _CONSTANTS:
        if name in call.attributes:
            dtype = torch.float32 if "float" in name else torch.int64
            return call.builder.constant(call.attribute(name), dtype)
    raise OnnxError("its value is text or sparse, which cannot be imported")


converters(
    Identity=lambda call: call[0],
    Size=lambda call: call.builder.constant(call[0].numel, torch.int64),
    SequenceConstruct=lambda call: ([*call],),
    SequenceAt=lambda call: call[0][int(call.scalar(1, role="position"))],
)


@converter("Shape")
def _shape(call: Call) -> Traced:
    sizes = call[0].shape
    start, end = call.attribute("start", 0), call.attribute("end", len(sizes))
    return call.builder.constant(list(sizes)[start:end], torch.int64)


@converter("ConstantOfShape")
def _constant_of_shape(call: Call) -> Traced:
    sizes = call.ints(0, "shape")
    value = call.attribute("value")
    value = torch.zeros(1) if value is None else value
    if value.numel() != 1:
        raise OnnxError(f"its value has {value.numel()} elements; it must have one")
    if any(s < 0 for s in sizes):
        raise OnnxError(f"its shape {sizes} has a negative size")
    # Expanded: even a shape of terabytes takes no memory until something is computed from it, which is
    # counted.
    return call.builder.known(value.reshape(()).expand(sizes))


@converter("EyeLike")
def _eye_like(call: Call) -> Traced:
    rows, columns = call[0].shape
    code = call.attribute("dtype")
    dtype = call[0].dtype if code is None else torch_dtype(code, "its result")
    offset = torch.arange(columns).unsqueeze(0) - torch.arange(rows).unsqueeze(1)
    return call.builder.known((offset == call.attribute("k", 0)).to(dtype))


@converter("Range")
def _range(call: Call) -> Traced:
    start, limit, delta = (call.scalar(i, role=w) for i, w in enumerate(("start", "limit", "delta")))
    if delta == 0:
        raise OnnxError("its delta is 0")
    # The standard's formula for the number of elements.
    count = max(math.ceil((limit - start) / delta), 0)
    call.builder.reserve(count * 8)
    # In double precision, as float32 would accumulate error.
    steps = torch.arange(count, dtype=torch.float64 if call[0].floating else torch.int64)
    return call.builder.known((steps * delta + start).to(call[0].dtype))


# -- reshaping ------------------------------------------------------------------------------------


@converter("Reshape")
def _reshape(call: Call) -> Traced:
    x, target = call[0], call.ints(1, "shape")
    if not call.attribute("allowzero", 0):
        if any(s == 0 and i >= x.ndim for i, s in enumerate(target)):
            raise OnnxError(f"its shape {target} copies a dim that an operand of shape {list(x.shape)} lacks")
        target = [x.shape[i] if s == 0 else s for i, s in enumerate(target)]
    return x.reshape(*_for_batch(call, x, target))


def _for_batch(call: Call, x: Traced, target: list[int]) -> list[int]:
    """Return the target shape, with the file's batch size replaced by the requested one."""
    if call.batch is None or x.data is not None:
        return target
    old, new = call.batch
    rest = math.prod(s for s in target if s != -1)
    fits = x.numel % rest == 0 if -1 in target and rest else x.numel == rest
    # With -1 in the target the old batch may divide by chance, so the operand must begin with the new one.
    if target and target[0] == old and (not fits or (-1 in target and x.shape[:1] == (new,))):
        return [new, *target[1:]]
    # A batch merged with other dims (the tokens of all samples in one).
    if target and target[0] % old == 0 and not fits and x.numel * old == rest * new:
        return [target[0] // old * new, *target[1:]]
    return target


@converter("Flatten")
def _flatten(call: Call) -> Traced:
    x = call[0]
    axis = call.attribute("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@converter("Transpose")
def _transpose(call: Call) -> Traced:
    x = call[0]
    dims = call.attribute("perm") or list(range(x.ndim))[::-1]
    if x.ndim == 2 and dims == [1, 0]:
        return torch.t(x)
    return x.permute(*dims)


@converter("Squeeze", "Unsqueeze")
def _squeeze(call: Call) -> Traced:
    x, axes = call[0], call.ints_or(1, None, "axes")
    if call.op == "Squeeze":
        dims = [i for i, s in enumerate(x.shape) if s == 1] if axes is None else axes
        dims = [positive(d, x.ndim) for d in dims]
        if any(x.shape[d] != 1 for d in dims):
            raise OnnxError(
                f"it squeezes dims {dims} of shape {list(x.shape)}, but only dims of size 1 can be squeezed"
            )
        return torch.squeeze(x, tuple(dims)) if dims else x
    if axes is None:
        raise OnnxError("its axes are missing")
    total = x.ndim + len(axes)
    for dim in sorted(positive(d, total) for d in axes):
        x = torch.unsqueeze(x, dim)
    return x


@converter("Expand")
def _expand(call: Call) -> Traced:
    x, target = call[0], call.ints(1, "shape")
    sizes = list(torch.broadcast_shapes(x.shape, target))
    return x if sizes == list(x.shape) else x.method("expand", sizes)


@converter("Tile")
def _tile(call: Call) -> Traced:
    repeats = call.ints(1, "repeats")
    return call[0] if all(r == 1 for r in repeats) else call[0].method("repeat", repeats)


@converter("DepthToSpace")
def _depth_to_space(call: Call) -> Traced:
    x, block = call[0], call.attribute("blocksize")
    n, c, h, w = x.shape
    if call.attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    # DCR has the block outermost in the channels; PyTorch's pixel shuffle is CRD and has it innermost.
    parts = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // block**2, h * block, w * block)


# -- joining and cutting --------------------------------------------------------------------------


@converter("Concat")
def _concat(call: Call) -> Traced:
    return call[0] if len(call) == 1 else torch.cat([*call], call.dim())


@converter("Split")
def _split(call: Call) -> Any:
    x, axis, sizes = call[0], call.dim(), call.ints_or(1, None, "sizes")
    if sizes is None:
        count = call.attribute("num_outputs") or len(call.wanted)
        # Rounded up, with a smaller last part.
        each = -(-x.shape[axis] // count)
        sizes = [min(each, x.shape[axis] - i * each) for i in range(count)]
    return torch.split(x, sizes, axis)


@converter("Slice")
def _slice(call: Call) -> Traced:
    x, starts, ends = call[0], call.ints(1, "starts"), call.ints(2, "ends")
    axes = call.ints_or(3, list(range(len(starts))), "axes")
    steps = call.ints_or(4, [1] * len(starts), "steps")
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise OnnxError("its step is 0")
        dim = positive(axis, x.ndim)
        # Python's clipping is the standard's: ends far out of range mean "to the end".
        first, last, _ = slice(start, end, step).indices(x.shape[dim])
        count = len(range(first, last, step))
        if step < 0:
            # backwards: cut the requested part, then reverse it
            lowest = first + (count - 1) * step if count else first
            x = torch.flip(_stepped(x, dim, lowest if count else 0, count, -step), [dim])
        else:
            x = _stepped(x, dim, first, count, step)
    return x


def _stepped(x: Traced, dim: int, first: int, count: int, step: int) -> Traced:
    if count == x.shape[dim] and step == 1:
        return x
    if step == 1 or count <= 1:
        return torch.narrow(x, dim, min(first, x.shape[dim]), count)
    return x.builder.call(torch.ops.aten.slice.Tensor, x, dim, first, first + (count - 1) * step + 1, step)


# -- padding --------------------------------------------------------------------------------------


@converter("Pad")
def _pad(call: Call) -> Traced:
    x, pads, axes = call[0], call.ints(1, "pads"), call.ints_or(3, None, "axes")
    dims = list(range(x.ndim)) if axes is None else [positive(a, x.ndim) for a in axes]
    if len(pads) != 2 * len(dims):
        raise OnnxError(f"it has {len(pads)} pads for {len(dims)} dims; each needs two")
    begin, end = dict.fromkeys(range(x.ndim), 0), dict.fromkeys(range(x.ndim), 0)
    for i, dim in enumerate(dims):
        begin[dim], end[dim] = pads[i], pads[i + len(dims)]
    mode = call.attribute("mode", "constant")
    if mode == "constant":
        return pad_constant(x, [(begin[d], end[d]) for d in range(x.ndim)], call.scalar(2, 0, "value"))
    for dim in range(x.ndim):
        x = _pad_by_copies(x, dim, begin[dim], end[dim], mode)
    return x


def pad_constant(x: Traced, pads: Sequence[tuple[int, int]], value: Any = 0) -> Traced:
    """Pad the last dims of a tensor with ``value``, by (before, after) per dim; a negative padding cuts."""
    if not any(any(p) for p in pads):
        return x
    # PyTorch lists pads starting from the last dim.
    flat = [p for pair in reversed(list(pads)) for p in pair]
    while flat[-2:] == [0, 0]:
        flat = flat[:-2]
    if x.dtype == torch.bool:
        return F.pad(x.to(torch.uint8), flat, value=int(value)).to(torch.bool)
    return F.pad(x, flat, value=value)


def _pad_by_copies(x: Traced, dim: int, before: int, after: int, mode: str) -> Traced:
    """Pad one dim with copies of its elements (``reflect``, ``edge`` or ``wrap``)."""
    if before == after == 0:
        return x
    if mode not in ("reflect", "edge", "wrap"):
        raise OnnxError(f"its mode '{mode}' is unknown")
    cut = max(-before, 0), max(-after, 0)
    x = torch.narrow(x, dim, cut[0], x.shape[dim] - sum(cut)) if any(cut) else x
    before, after = max(before, 0), max(after, 0)
    x.builder.reserve((before + after) * 8)
    index = np.pad(np.arange(x.shape[dim]), (before, after), mode=mode)  # type: ignore[call-overload]
    return torch.index_select(x, dim, x.builder.constant(index, torch.int64))


# -- sequences, as far as they are known -----------------------------------------------------------


@converter("SplitToSequence")
def _split_to_sequence(call: Call) -> Any:
    x, axis = call[0], call.dim()
    if call.optional(1) is None:
        parts = list(torch.split(x, 1, axis))
        return (parts if call.attribute("keepdims", 1) else [torch.squeeze(p, axis) for p in parts],)
    sizes: Any = call.ints(1, "sizes")
    if call[1].ndim == 0:
        sizes = sizes[0]
    return (list(torch.split(x, sizes, axis)),)


@converter("ConcatFromSequence")
def _concat_from_sequence(call: Call) -> Traced:
    axis, new = call.attribute("axis"), call.attribute("new_axis", 0)
    if not call[0]:
        raise OnnxError("it joins an empty sequence")
    return torch.stack(call[0], axis) if new else torch.cat(call[0], axis)
