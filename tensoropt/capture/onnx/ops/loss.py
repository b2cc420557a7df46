"""Losses that a file itself contains, and random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.errors import DataDependentError, OnnxError
from tensoropt.capture.onnx.registry import Call, converter
from tensoropt.capture.onnx.tensors import torch_dtype
from tensoropt.capture.onnx.values import Traced


def _options(call: Call, weight: int) -> dict[str, Any]:
    return {
        "weight": call.optional(weight),
        "ignore_index": call.attribute("ignore_index", -100),
        "reduction": call.attribute("reduction", "mean"),
    }


@converter("NegativeLogLikelihoodLoss")
def nll_loss(call: Call) -> Traced:
    return F.nll_loss(call[0], call[1].to(torch.int64), **_options(call, 2))


@converter("SoftmaxCrossEntropyLoss")
def cross_entropy(call: Call) -> Any:
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
def roi_align(call: Call) -> Traced:
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
    """(regions, channels, rows, columns) at fractional positions; zero more than one pixel outside the
    image."""
    builder = images.builder
    height, width = images.shape[2:]

    def matrix(places: Traced, size: int) -> Traced:
        """(regions, places, size): the two weights of each place."""
        inside = torch.logical_and(places.method("ge", -1.0), places.method("le", float(size)))
        kept = torch.unsqueeze(torch.clamp(places, 0.0, size - 1.0), 2)
        pixels = builder.known(torch.arange(size, dtype=torch.float32)).to(images.dtype)
        weights = torch.clamp(1.0 - torch.abs(kept - pixels), min=0.0)
        return weights * torch.unsqueeze(inside.to(images.dtype), 2)

    by_row, by_column = matrix(rows, height), matrix(columns, width)
    return torch.einsum("nyh,nchw,nxw->ncyx", by_row, images, by_column)
