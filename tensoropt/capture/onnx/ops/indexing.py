"""Converters of gathers, scatters and selections."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, converters, positive
from tensoropt.capture.onnx.values import OnnxError, Traced


def _counted_from_front(index: Traced, size: int) -> Traced:
    """Return an index without negative entries, which in ONNX count from the end of a dim and which PyTorch's
    gather and scatter reject."""
    # Known and not negative is the usual case, and needs no operators.
    if index.data is not None and not bool((index.data < 0).any()):
        return index.to(torch.int64)
    index = index.to(torch.int64)
    return torch.where(index.method("lt", 0), index + size, index)


converters(
    Where=lambda call: torch.where(call[0], call[1], call[2]),
    GatherElements=lambda call: torch.gather(
        call[0], call.dim(), _counted_from_front(call[1], call[0].shape[call.dim()])
    ),
)


@converter("Gather")
def gather(call: Call) -> Traced:
    x, index, axis = call[0], call[1], call.dim()
    call.builder.bound(index, x.shape[axis])
    # A table lookup has a rule that splits the vocabulary; a gather keeps it whole.
    if index.data is None and x.ndim == 2 and axis == 0 and x.floating:
        return F.embedding(index if index.dtype == torch.int32 else index.to(torch.int64), x)
    if index.data is not None and index.ndim == 0:
        return torch.select(x, axis, positive(int(index.data), x.shape[axis]))
    flat = _counted_from_front(index, x.shape[axis]).reshape(index.numel)
    steps = None if flat.data is None else flat.data.tolist()
    # Neighbouring indices form a slice, which needs no index tensor.
    if steps and steps == list(range(steps[0], steps[0] + len(steps))):
        rows = torch.narrow(x, axis, steps[0], len(steps))
    else:
        rows = torch.index_select(x, axis, flat)
    return rows.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _tuples(index: Traced) -> list[Traced]:
    """Split ONNX's index tuples, which lie along the last dim, into one index tensor per indexed dim."""
    return list(torch.unbind(index.to(torch.int64), -1))


@converter("GatherND")
def _gather_nd(call: Call) -> Traced:
    x, index, batch = call[0], call[1], call.attribute("batch_dims", 0)
    # Every sample of a batch dim is looked up in itself.
    own = [torch.arange(n).reshape(n, *(1,) * (index.ndim - 2 - d)) for d, n in enumerate(x.shape[:batch])]
    return call.builder.call(torch.ops.aten.index.Tensor, x, [*map(call.builder.known, own), *_tuples(index)])


@converter("ScatterND")
def _scatter_nd(call: Call) -> Traced:
    x, index, updates, reduction = call[0], call[1], call[2], call.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise OnnxError(f"its reduction '{reduction}' cannot be imported")
    return torch.index_put(x, tuple(_tuples(index)), updates.to(x.dtype), reduction == "add")


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@converter("ScatterElements")
def _scatter_elements(call: Call) -> Traced:
    x, axis, updates, reduction = call[0], call.dim(), call[2], call.attribute("reduction", "none")
    index = _counted_from_front(call[1], x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, index, updates)
    if reduction not in _REDUCTIONS:
        raise OnnxError(f"its reduction '{reduction}' is unknown")
    return torch.scatter_reduce(x, axis, index, updates, _REDUCTIONS[reduction])


@converter("OneHot")
def one_hot(call: Call) -> Traced:
    depth = int(call.scalar(1, role="depth"))
    axis = call.attribute("axis", -1)
    index, values = call[0], call[2]
    call.builder.reserve(max(depth, 0) * 8)
    axis = positive(axis, index.ndim + 1)
    steps = torch.arange(depth, dtype=index.dtype).reshape(depth, *(1,) * (index.ndim - axis))
    index = torch.where(torch.lt(index, 0), index + depth, index)  # outside [-depth, depth) nothing matches
    hit = torch.eq(torch.unsqueeze(index, axis), call.builder.known(steps))
    return torch.where(hit, torch.select(values, 0, 1), torch.select(values, 0, 0))


@converter("Trilu")
def _trilu(call: Call) -> Traced:
    keep = torch.triu if call.attribute("upper", 1) else torch.tril
    return keep(call[0], int(call.scalar(1, 0, "diagonal")))


@converter("NonZero")
def _non_zero(call: Call) -> Traced:
    value = call[0]
    if value.data is None:
        raise OnnxError(
            "the number of nonzero elements depends on an input's values, so later shapes are not fixed"
        )
    call.builder.reserve(value.numel * value.ndim * 8)
    return call.builder.known(value.data.nonzero().t().contiguous())
