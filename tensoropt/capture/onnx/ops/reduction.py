"""Reductions, orderings and searches along dims; losses that a file itself contains; random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.values import DataDependentError, OnnxError, Traced
from tensoropt.capture.onnx.weights import torch_dtype


def _options(call: Call, weight: int) -> dict[str, Any]:
    return {
        "weight": call.optional(weight),
        "ignore_index": call.attribute("ignore_index", -100),
        "reduction": call.attribute("reduction", "mean"),
    }


@converter("NegativeLogLikelihoodLoss")
def _nll_loss(call: Call) -> Traced:
    return F.nll_loss(call[0], call[1].to(torch.int64), **_options(call, 2))


@converter("SoftmaxCrossEntropyLoss")
def _cross_entropy(call: Call) -> Any:
    loss = F.cross_entropy(call[0], call[1].to(torch.int64), **_options(call, 2))
    return loss, torch.log_softmax(call[0], 1) if call.wants(1) else None


def _shape_and_dtype(call: Call) -> tuple[list[int], torch.dtype]:
    like = call.op.endswith("Like") or call.op == "Bernoulli"
    code = call.attribute("dtype")
    dtype = torch_dtype(code, "its result") if code else (call[0].dtype if like else torch.float32)
    return (list(call[0].shape) if like else list(call.attribute("shape"))), dtype


@converter("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def random(call: Call) -> Traced:
    """Random numbers, which differ from ONNX Runtime's own generator. They are never folded, but drawn in
    every step."""
    shape, dtype = _shape_and_dtype(call)
    if "Normal" in call.op:
        drawn = call.builder.node_call(torch.randn, shape, dtype=dtype)
        return drawn * call.attribute("scale", 1.0) + call.attribute("mean", 0.0)
    low, high = call.attribute("low", 0.0), call.attribute("high", 1.0)
    return call.builder.node_call(torch.rand, shape, dtype=dtype) * (high - low) + low


@converter("Bernoulli")
def bernoulli(call: Call) -> Traced:
    shape, dtype = _shape_and_dtype(call)
    drawn = call.builder.node_call(torch.rand, shape, dtype=call[0].dtype)
    return torch.lt(drawn, call[0]).to(dtype)


@converter("Multinomial")
def multinomial(call: Call) -> Traced:
    weights = torch.softmax(call[0], 1)
    code = call.attribute("dtype", 6)
    drawn = torch.multinomial(weights, call.attribute("sample_size", 1), True)
    return drawn.to(torch_dtype(code, "its result"))


@converter("RoiAlign")
def _roi_align(call: Call) -> Traced:
    """Bilinear samples of each region, pooled (Mask R-CNN, section 3); the number of regions is fixed."""
    x, rois, batch = call[0], call[1], call[2]
    height, width = call.attribute("output_height", 1), call.attribute("output_width", 1)
    ratio, scale = call.attribute("sampling_ratio", 0), call.attribute("spatial_scale", 1.0)
    half = (
        call.attribute("coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "")
        == "half_pixel"
    )
    if call.attribute("mode", "avg") != "avg":
        raise OnnxError("its mode 'max' cannot be imported")
    if ratio <= 0:
        raise DataDependentError(
            "how many samples it takes depends on the sizes of its regions (sampling_ratio 0)"
        )
    corners = rois * scale
    corners = corners + -0.5 if half else corners
    left, top, right, bottom = (torch.select(corners, 1, i) for i in range(4))
    wide, high = right - left, bottom - top
    if not half:
        wide, high = torch.clamp(wide, min=1.0), torch.clamp(high, min=1.0)

    def places(start: Traced, length: Traced, count: int) -> Traced:
        steps = (torch.arange(count * ratio, dtype=torch.float32) + 0.5) / (count * ratio)
        return torch.unsqueeze(start, 1) + torch.unsqueeze(length, 1) * call.builder.known(steps).to(x.dtype)

    rows, columns = places(top, high, height), places(left, wide, width)
    images = torch.index_select(x, 0, batch.to(torch.int64))
    sampled = _bilinear(images, rows, columns)
    return F.avg_pool2d(sampled, ratio)


def _bilinear(images: Traced, rows: Traced, columns: Traced) -> Traced:
    """Return images sampled at fractional positions, (regions, channels, rows, columns); zero more than one
    pixel outside the image.
    """
    builder = images.builder
    height, width = images.shape[2:]

    def matrix(places: Traced, size: int) -> Traced:
        """Return the two weights of each position, (regions, places, size)."""
        inside = torch.logical_and(places.method("ge", -1.0), places.method("le", float(size)))
        kept = torch.unsqueeze(torch.clamp(places, 0.0, size - 1.0), 2)
        pixels = builder.known(torch.arange(size, dtype=torch.float32)).to(images.dtype)
        weights = torch.clamp(1.0 - torch.abs(kept - pixels), min=0.0)
        return weights * torch.unsqueeze(inside.to(images.dtype), 2)

    by_row, by_column = matrix(rows, height), matrix(columns, width)
    return torch.einsum("nyh,nchw,nxw->ncyx", by_row, images, by_column)


_AXES_INPUT_SINCE = 18
"""The opset in which most reductions moved their axes to an input; ReduceSum did so in opset 13."""


def _square_sum(x: Traced, dims: list[int], keepdim: bool) -> Traced:
    return torch.sum(x * x, dims, keepdim=keepdim)


def _log_sum(x: Traced, dims: list[int], keepdim: bool) -> Traced:
    return torch.log(torch.sum(x, dims, keepdim=keepdim))


def _product(x: Traced, dims: list[int], keepdim: bool) -> Traced:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim, keepdim=keepdim)
    return x


def _norm(order: int) -> Callable[..., Any]:
    def norm(x: Traced, dims: list[int], keepdim: bool) -> Traced:
        wide = x if x.floating else x.to(torch.float64)
        return torch.linalg.vector_norm(wide, order, dims, keepdim=keepdim).to(x.dtype)

    return norm


def _mean(x: Traced, dims: list[int], keepdim: bool) -> Traced:
    if x.floating:
        return torch.mean(x, dims, keepdim=keepdim)
    count = 1
    for d in dims:
        count *= x.shape[d]
    return torch.div(torch.sum(x, dims, keepdim=keepdim), count, rounding_mode="trunc")


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceL1": _norm(1),
    "ReduceL2": _norm(2),
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": _mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": torch.sum,
    "ReduceSumSquare": _square_sum,
}
_EMPTY = {"ReduceMax": -torch.inf, "ReduceMin": torch.inf}


@converter(*_REDUCE)
def _reduce_attribute(call: Call) -> Traced:
    return _reduced(call, call.attribute("axes"), keep_all=False)


@converter("ReduceSum", since=13)
@converter(*(name for name in _REDUCE if name != "ReduceSum"), since=_AXES_INPUT_SINCE)
def reduce(call: Call) -> Traced:
    return _reduced(call, call.ints_or(1, None, "axes"), bool(call.attribute("noop_with_empty_axes", 0)))


def _reduced(call: Call, axes: list[int] | None, keep_all: bool) -> Traced:
    x = call[0]
    if not axes and keep_all:
        # nothing is reduced, but the operation on each element still applies
        return _REDUCE[call.op](torch.unsqueeze(x, 0), [0], False).to(x.dtype)
    dims = [positive(a, x.ndim) for a in axes] if axes else list(range(x.ndim))
    keepdim = bool(call.attribute("keepdims", 1))
    if x.ndim == 0:
        return _REDUCE[call.op](torch.unsqueeze(x, 0), [0], False).to(x.dtype)
    if call.op in _EMPTY and any(x.shape[d] == 0 for d in dims):
        sizes = [1 if d in dims else s for d, s in enumerate(x.shape) if keepdim or d not in dims]
        if not x.floating:
            limits = None if x.dtype == torch.bool else torch.iinfo(x.dtype)
            lowest, highest = (False, True) if limits is None else (limits.min, limits.max)
            return call.builder.known(
                torch.full(sizes, lowest if call.op == "ReduceMax" else highest, dtype=x.dtype)
            )
        return call.builder.known(torch.full(sizes, _EMPTY[call.op], dtype=x.dtype))
    if x.dtype == torch.bool:
        return _REDUCE[call.op](x.to(torch.uint8), dims, keepdim).to(torch.bool)
    return _REDUCE[call.op](x, dims, keepdim=keepdim).to(x.dtype)


@converter("ArgMax", "ArgMin")
def _arg(call: Call) -> Traced:
    x, axis = call[0], call.dim()
    keepdim = bool(call.attribute("keepdims", 1))
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    if not call.attribute("select_last_index", 0):
        return function(x, axis, keepdim=keepdim)
    last: Traced = function(torch.flip(x, [axis]), axis, keepdim=keepdim)
    return last.builder.call(torch.rsub, last, x.shape[axis] - 1)


@converter("TopK")
def _top_k_attribute(call: Call) -> Any:
    return _top_k(call, call.attribute("k"))


@converter("TopK", since=10)
def top_k(call: Call) -> Any:
    return _top_k(call, int(call.scalar(1, role="k")))


def _top_k(call: Call, k: int) -> Any:
    x, axis = call[0], call.dim("axis", -1)
    # The earliest of equal elements comes first, which ``torch.topk`` does not guarantee.
    values, indices = torch.sort(x, dim=axis, descending=bool(call.attribute("largest", 1)), stable=True)
    return torch.narrow(values, axis, 0, k), torch.narrow(indices, axis, 0, k)
