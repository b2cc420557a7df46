"""Quantised operators in floating point: they give the values that a quantised file computes, not its
speed."""

from __future__ import annotations

from typing import Any

import torch

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.ops.convolution import convolve
from tensoropt.capture.onnx.registry import Call, converter, positive
from tensoropt.capture.onnx.tensors import NARROW, rounded, torch_dtype
from tensoropt.capture.onnx.values import Traced

_RANGE = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int16: (-32768, 32767),
    torch.uint16: (0, 65535),
}


def _along(value: Traced, x: Traced, call: Call) -> Traced:
    """A scale or zero point with the rank of the tensor that it scales: whole, per axis, or per block."""
    if value is None or value.numel == 1:
        return value if value is None else value.reshape()
    axis = positive(call.attribute("axis", 1), x.ndim)
    block = call.attribute("block_size", 0)
    if block:
        repeated = torch.repeat_interleave(value, block, dim=axis)
        return torch.narrow(repeated, axis, 0, x.shape[axis])
    return value.reshape(*(-1 if d == axis else 1 for d in range(x.ndim)))


def dequantised(x: Traced, scale: Traced, zero: Traced) -> Traced:
    # Before the zero point is subtracted; otherwise differences would wrap around in eight bits.
    wide = x.to(torch.float32)
    return (wide if zero is None else wide - zero.to(torch.float32)) * scale.to(torch.float32)


def quantised(
    x: Traced, scale: Traced, zero: Traced, dtype: torch.dtype, code: int = 0, saturate: bool = True
) -> Traced:
    """Quantise ``x``; ``code`` is the ONNX element type, which may have fewer bits than ``dtype``."""
    if code in NARROW and NARROW[code].bounds is None:
        # Floats of a few bits have their own zero: their zero point determines the type.
        return rounded(x.to(torch.float32) / scale.to(torch.float32), code, saturate)
    if dtype not in _RANGE:
        raise OnnxError(f"quantisation to {str(dtype).removeprefix('torch.')} cannot be imported")
    low, high = (code in NARROW and NARROW[code].bounds) or _RANGE[dtype]
    steps = torch.round(x.to(torch.float32) / scale.to(torch.float32))
    steps = steps if zero is None else steps + zero.to(torch.float32)
    return torch.clamp(steps, low, high).to(dtype)


@converter("DequantizeLinear")
def dequantize(call: Call) -> Traced:
    x, scale = call[0], call[1]
    out = dequantised(x, _along(scale, x, call), _along(call.optional(2), x, call))
    code = call.attribute("output_dtype", 0)
    return out.to(torch_dtype(code, "its result") if code else scale.dtype)


@converter("QuantizeLinear")
def quantize(call: Call) -> Traced:
    x, zero, code = call[0], call.optional(2), call.attribute("output_dtype", 0)
    dtype = torch.uint8
    if zero is not None:
        dtype, code = zero.dtype, call.type_of(2)
    elif code:
        dtype = torch_dtype(code, "its result")
    saturate = bool(call.attribute("saturate", 1))
    return quantised(x, _along(call[1], x, call), _along(zero, x, call), dtype, code, saturate)


@converter("DynamicQuantizeLinear")
def dynamic_quantize(call: Call) -> Any:
    x = call[0]
    dims = list(range(x.ndim))
    # The range always contains zero, which has to be one of the steps.
    low, high = torch.clamp(torch.amin(x, dims), max=0.0), torch.clamp(torch.amax(x, dims), min=0.0)
    scale = (high - low) / 255.0
    zero = torch.clamp(torch.round((low * -1.0) / scale), 0, 255).to(torch.uint8)
    return quantised(x, scale, zero, torch.uint8), scale, zero


def _row(value: Traced, dims: int) -> Traced:
    """A per-row scale or zero point of a matrix (the first of its two dims)."""
    return (
        value.reshape(-1, 1)
        if value is not None and value.ndim == 1 and value.numel > 1 and dims > 1
        else value
    )


@converter("QLinearMatMul")
def qlinear_matmul(call: Call) -> Traced:
    a = dequantised(call[0], _row(call[1], call[0].ndim), _row(call[2], call[0].ndim))
    b = dequantised(call[3], call[4], call[5])
    return quantised(torch.matmul(a, b), call[6], call[7], call[7].dtype)


@converter("QLinearConv")
def qlinear_conv(call: Call) -> Traced:
    x = dequantised(call[0], call[1], call[2])
    channels = [v.reshape(-1, *(1,) * (call[3].ndim - 1)) if v.numel > 1 else v for v in (call[4], call[5])]
    weight = dequantised(call[3], *channels)
    bias = call.optional(8)
    if bias is not None:
        bias = bias.to(torch.float32) * (call[1] * call[4])
    out = convolve(call, x, weight, bias)
    return quantised(out, call[6], call[7], call[7].dtype)


@converter("MatMulInteger")
def matmul_integer(call: Call) -> Traced:
    a, b = call[0].to(torch.int32), call[1].to(torch.int32)
    if call.optional(2) is not None:
        a = a - _row(call[2], a.ndim).to(torch.int32)
    if call.optional(3) is not None:
        b = b - call[3].to(torch.int32)
    return torch.matmul(a, b)


@converter("ConvInteger")
def conv_integer(call: Call) -> Traced:
    """An integer convolution in float64, whose whole numbers are exact far beyond what int32 sums reach."""
    x, weight = call[0].to(torch.float64), call[1].to(torch.float64)
    if call.optional(2) is not None:
        x = x - call[2].to(torch.float64)
    if call.optional(3) is not None:
        zero = call[3]
        zero = zero.reshape(-1, *(1,) * (weight.ndim - 1)) if zero.numel > 1 else zero
        weight = weight - zero.to(torch.float64)
    return convolve(call, x, weight, None).to(torch.int32)
