"""Arithmetic, comparisons, activations, matrix products.

Quantised operators in floating point: they give the values that a quantised file computes, not its
speed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.ops.windows import convolve
from tensoropt.capture.onnx.values import OnnxError, Traced
from tensoropt.capture.onnx.weights import NARROW, rounded, torch_dtype

_RANGE = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int16: (-32768, 32767),
    torch.uint16: (0, 65535),
}


def _along(value: Traced, x: Traced, call: Call) -> Traced:
    """Return a scale or zero point with the rank of the tensor that it scales: whole, per axis, or per
    block.
    """
    if value is None or value.numel == 1:
        return value if value is None else value.reshape()
    axis = positive(call.attribute("axis", 1), x.ndim)
    block = call.attribute("block_size", 0)
    if block:
        repeated = torch.repeat_interleave(value, block, dim=axis)
        return torch.narrow(repeated, axis, 0, x.shape[axis])
    return value.reshape(*(-1 if d == axis else 1 for d in range(x.ndim)))


def _dequantised(x: Traced, scale: Traced, zero: Traced) -> Traced:
    # Before the zero point is subtracted; otherwise differences would wrap around in eight bits.
    wide = x.to(torch.float32)
    return (wide if zero is None else wide - zero.to(torch.float32)) * scale.to(torch.float32)


def _quantised(
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
def _dequantize(call: Call) -> Traced:
    x, scale = call[0], call[1]
    out = _dequantised(x, _along(scale, x, call), _along(call.optional(2), x, call))
    code = call.attribute("output_dtype", 0)
    return out.to(torch_dtype(code, "its result") if code else scale.dtype)


@converter("QuantizeLinear")
def _quantize(call: Call) -> Traced:
    x, zero, code = call[0], call.optional(2), call.attribute("output_dtype", 0)
    dtype = torch.uint8
    if zero is not None:
        dtype, code = zero.dtype, call.type_of(2)
    elif code:
        dtype = torch_dtype(code, "its result")
    saturate = bool(call.attribute("saturate", 1))
    return _quantised(x, _along(call[1], x, call), _along(zero, x, call), dtype, code, saturate)


@converter("DynamicQuantizeLinear")
def _dynamic_quantize(call: Call) -> Any:
    x = call[0]
    dims = list(range(x.ndim))
    # The range always contains zero, which has to be one of the steps.
    low, high = torch.clamp(torch.amin(x, dims), max=0.0), torch.clamp(torch.amax(x, dims), min=0.0)
    scale = (high - low) / 255.0
    zero = torch.clamp(torch.round((low * -1.0) / scale), 0, 255).to(torch.uint8)
    return _quantised(x, scale, zero, torch.uint8), scale, zero


def _row(value: Traced, dims: int) -> Traced:
    """Return a per-row scale or zero point of a matrix (the first of its two dims)."""
    return (
        value.reshape(-1, 1)
        if value is not None and value.ndim == 1 and value.numel > 1 and dims > 1
        else value
    )


@converter("QLinearMatMul")
def _qlinear_matmul(call: Call) -> Traced:
    a = _dequantised(call[0], _row(call[1], call[0].ndim), _row(call[2], call[0].ndim))
    b = _dequantised(call[3], call[4], call[5])
    return _quantised(torch.matmul(a, b), call[6], call[7], call[7].dtype)


@converter("QLinearConv")
def _qlinear_conv(call: Call) -> Traced:
    x = _dequantised(call[0], call[1], call[2])
    channels = [v.reshape(-1, *(1,) * (call[3].ndim - 1)) if v.numel > 1 else v for v in (call[4], call[5])]
    weight = _dequantised(call[3], *channels)
    bias = call.optional(8)
    if bias is not None:
        bias = bias.to(torch.float32) * (call[1] * call[4])
    out = convolve(call, x, weight, bias)
    return _quantised(out, call[6], call[7], call[7].dtype)


@converter("MatMulInteger")
def _matmul_integer(call: Call) -> Traced:
    a, b = call[0].to(torch.int32), call[1].to(torch.int32)
    if call.optional(2) is not None:
        a = a - _row(call[2], a.ndim).to(torch.int32)
    if call.optional(3) is not None:
        b = b - call[3].to(torch.int32)
    return torch.matmul(a, b)


@converter("ConvInteger")
def _conv_integer(call: Call) -> Traced:
    """Return an integer convolution in float64, whose whole numbers are exact far beyond what int32 sums
    reach.
    """
    x, weight = call[0].to(torch.float64), call[1].to(torch.float64)
    if call.optional(2) is not None:
        x = x - call[2].to(torch.float64)
    if call.optional(3) is not None:
        zero = call[3]
        zero = zero.reshape(-1, *(1,) * (weight.ndim - 1)) if zero.numel > 1 else zero
        weight = weight - zero.to(torch.float64)
    return convolve(call, x, weight, None).to(torch.int32)


_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}


@converter(*_UNARY)
def _unary(call: Call) -> Traced:
    return _UNARY[call.op](call[0])


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}


@converter(*_BINARY)
def _binary(call: Call) -> Traced:
    a, b = call[0], call[1]
    if call.op == "Sub" and isinstance(plain(a, b), (int, float)):
        return torch.rsub(b, plain(a, b))
    # The constant comes second, where `plain` may turn it into a number.
    if call.op in ("Add", "Mul") and a.data is not None and b.data is None:
        a, b = b, a
    return _BINARY[call.op](a, plain(b, a))


def plain(value: Traced, other: Traced) -> Any:
    """Return a one-element constant as a Python number, if that changes neither shape nor dtype."""
    if value.data is None or other.data is not None or value.numel != 1 or value.ndim > other.ndim:
        return value
    return value.data.item() if value.dtype == other.dtype and value.dtype != torch.bool else value


@converter("Div")
def div(call: Call) -> Traced:
    a, b = call[0], call[1]
    if a.floating:
        return torch.div(a, plain(b, a))
    # Whole numbers divide as in C.
    return torch.div(a, b, rounding_mode="trunc")


@converter("Mod")
def _mod(call: Call) -> Traced:
    function = torch.fmod if call.attribute("fmod", 0) else torch.remainder
    return function(call[0], plain(call[1], call[0]))


@converter("Pow")
def power(call: Call) -> Traced:
    base, exponent = call[0], call[1]
    if exponent.data is not None and exponent.numel == 1 and exponent.ndim <= base.ndim:
        number = exponent.data.item()
        # As a Python number, so that a square is one call without a tensor for its exponent.
        number = int(number) if float(number).is_integer() else number
        return torch.pow(base, number).to(base.dtype)
    return torch.pow(base, exponent).to(base.dtype)


@converter("BitShift")
def _bit_shift(call: Call) -> Traced:
    left = call.attribute("direction") == "LEFT"
    a, b = call[0].to(torch.int64), call[1].to(torch.int64)
    function = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    return function(a, b).to(call[0].dtype)


@converter("Sum", "Max", "Min", "Mean")
def _variadic(call: Call) -> Traced:
    by_name: dict[str, Any] = {
        "Sum": torch.add,
        "Mean": torch.add,
        "Max": torch.maximum,
        "Min": torch.minimum,
    }
    pairwise = by_name[call.op]
    # Pair by pair, so that operands broadcast; stacking would not broadcast them.
    total = functools.reduce(pairwise, [call[i] for i in range(len(call))])
    return total / len(call) if call.op == "Mean" and len(call) > 1 else total


@converter("IsInf")
def _is_inf(call: Call) -> Traced:
    positive_too, negative_too = call.attribute("detect_positive", 1), call.attribute("detect_negative", 1)
    if positive_too and negative_too:
        return torch.isinf(call[0])
    if positive_too:
        return torch.isposinf(call[0])
    if negative_too:
        return torch.isneginf(call[0])
    return torch.zeros_like(call[0], dtype=torch.bool)


@converter("BitCast")
def _bit_cast(call: Call) -> Traced:
    return call[0].method("view", torch_dtype(call.attribute("to"), "its result"))


@converter("Cast")
def _cast(call: Call) -> Traced:
    return _converted(call[0], call.attribute("to"), bool(call.attribute("saturate", 1)))


@converter("CastLike")
def _cast_like(call: Call) -> Traced:
    code = call.type_of(1)
    if code not in NARROW:
        return call[0].to(call[1].dtype)
    return _converted(call[0], code, bool(call.attribute("saturate", 1)))


def _converted(x: Traced, code: int, saturate: bool) -> Traced:
    """Return ``x`` in another element type; a value that does not fit in a few bits wraps around, as in
    NumPy.
    """
    dtype = torch_dtype(code, "its result")
    if code not in NARROW:
        return x.to(dtype)
    bounds = NARROW[code].bounds
    if bounds is None:
        return rounded(x, code, saturate)
    low, high = bounds
    return (torch.remainder(x.to(torch.int32) - low, high - low + 1) + low).to(dtype)


# -- activations ----------------------------------------------------------------------------------


@converter("LeakyRelu")
def _leaky_relu(call: Call) -> Traced:
    return F.leaky_relu(call[0], call.attribute("alpha", 0.01))


@converter("PRelu")
def prelu(call: Call) -> Traced:
    x, slope = call[0], call[1]
    flat = slope.numel in (1, x.shape[1] if x.ndim > 1 else 1)
    channels = slope.shape if slope.ndim < x.ndim else slope.shape[1:]
    if flat and x.floating and all(size == 1 for size in channels[1:]) and slope.ndim >= x.ndim - 1:
        return F.prelu(x, slope.reshape(slope.numel))
    return torch.where(x.method("ge", 0), x, x * slope)


@converter("Elu")
def elu(call: Call) -> Traced:
    return F.elu(call[0], call.attribute("alpha", 1.0))


@converter("Celu")
def _celu(call: Call) -> Traced:
    return F.celu(call[0], call.attribute("alpha", 1.0))


@converter("Selu")
def _selu(call: Call) -> Traced:
    alpha = call.attribute("alpha", 1.6732631921768188)
    gamma = call.attribute("gamma", 1.0507010221481323)
    return F.elu(call[0], alpha) * gamma


@converter("ThresholdedRelu")
def _thresholded_relu(call: Call) -> Traced:
    return F.threshold(call[0], call.attribute("alpha", 1.0), 0.0)


@converter("Shrink")
def _shrink(call: Call) -> Traced:
    x, bias, threshold = call[0], call.attribute("bias", 0.0), call.attribute("lambd", 0.5)
    zero = torch.zeros_like(x)
    low = torch.where(x.method("lt", -threshold), x + bias, zero)
    return torch.where(x.method("gt", threshold), x + -bias, low).to(x.dtype)


@converter("HardSigmoid")
def _hard_sigmoid(call: Call) -> Traced:
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(call[0])
    return torch.clamp(call[0] * alpha + beta, 0.0, 1.0)


@converter("Gelu")
def _gelu(call: Call) -> Traced:
    return F.gelu(call[0], approximate=call.attribute("approximate", "none"))


@converter("Swish")
def _swish(call: Call) -> Traced:
    alpha = call.attribute("alpha", 1.0)
    if alpha == 1.0:
        return F.silu(call[0])
    return call[0] * torch.sigmoid(call[0] * alpha)


@converter("Clip")
def _clip_attributes(call: Call) -> Traced:
    return _clamp(call[0], call.attribute("min"), call.attribute("max"))


@converter("Clip", since=11)
def clip(call: Call) -> Traced:
    bounds = [call.optional(1), call.optional(2)]
    if all(b is None or b.data is not None for b in bounds):
        return _clamp(call[0], *(None if b is None else b.data.reshape(()).item() for b in bounds))
    x = call[0]
    if bounds[0] is not None:
        x = torch.maximum(x, bounds[0])
    return x if bounds[1] is None else torch.minimum(x, bounds[1])


def _clamp(x: Traced, low: Any, high: Any) -> Traced:
    if low is None and high is None:
        return x
    # In that case the standard gives the upper bound.
    if low is not None and high is not None and low > high:
        low = high
    if low == 0 and high == 6 and x.floating:
        return F.relu6(x)
    return torch.clamp(x, low, high)


def _flattened(call: Call, function: Callable[[Traced, int], Traced]) -> Traced:
    """Softmax before opset 13: over all dims from the axis on, taken together."""
    x = call[0]
    axis = call.dim("axis", 1)
    if all(size == 1 for size in x.shape[axis + 1 :]):
        return function(x, axis)
    if all(size == 1 for size in x.shape[axis:-1]):
        return function(x, x.ndim - 1)
    flat = x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return function(flat, 1).reshape(*x.shape)


_SOFTMAX: dict[str, Callable[..., Any]] = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


@converter("Softmax", "LogSoftmax")
def _softmax_flattened(call: Call) -> Traced:
    return _flattened(call, _SOFTMAX[call.op])


@converter("Softmax", "LogSoftmax", since=13)
def softmax(call: Call) -> Traced:
    return _SOFTMAX[call.op](call[0], call.dim("axis", -1))


def _one_hot_of_largest(x: Traced, axis: int) -> Traced:
    first = torch.argmax(x, axis, keepdim=True)
    zeros = torch.zeros_like(x)
    return torch.scatter(zeros, axis, first, 1)


@converter("Hardmax")
def _hardmax_flattened(call: Call) -> Traced:
    return _flattened(call, _one_hot_of_largest)


@converter("Hardmax", since=13)
def _hardmax(call: Call) -> Traced:
    return _one_hot_of_largest(call[0], call.dim("axis", -1))


# -- matrix products ------------------------------------------------------------------------------


@converter("MatMul")
def matmul(call: Call) -> Traced:
    return product(call[0], call[1])


def product(a: Traced, b: Traced) -> Traced:
    """Return ``a @ b`` for operands of any rank."""
    if a.ndim == 0 or b.ndim == 0:
        raise OnnxError("a matrix product needs operands of at least one dim")
    return torch.matmul(a, b)


@converter("Gemm")
def gemm(call: Call) -> Traced:
    """Return ``alpha * A' @ B' + beta * C``; the form to which PyTorch's linear layers are exported stays
    linear.
    """
    a, b, c = call[0], call[1], call.optional(2)
    if a.ndim != 2 or b.ndim != 2:
        raise OnnxError(f"it takes matrices, but has operands of {a.ndim} and {b.ndim} dims")
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if call.attribute("transA", 0):
        a = torch.t(a)
    transposed = bool(call.attribute("transB", 0))
    columns = b.shape[0 if transposed else 1]
    if alpha == 1.0 and (c is None or (beta == 1.0 and c.floating and c.shape in ((columns,), (1, columns)))):
        bias = None if c is None else c.reshape(columns)
        if transposed:
            return F.linear(a, b, bias)
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    product = torch.mm(a, torch.t(b) if transposed else b)
    product = product * alpha if alpha != 1.0 else product
    product = product.to(call[0].dtype)
    return (
        product if c is None or beta == 0.0 else product + (c * beta if beta != 1.0 else c).to(product.dtype)
    )


@converter("Einsum")
def einsum(call: Call) -> Traced:
    return torch.einsum(call.attribute("equation").replace(" ", ""), *(call[i] for i in range(len(call))))


@converter("CumSum", "CumProd")
def _cumulative(call: Call) -> Traced:
    x, axis = call[0], positive(int(call.scalar(1, role="axis")), call[0].ndim)
    running, empty = (torch.cumsum, 0) if call.op == "CumSum" else (torch.cumprod, 1)
    if call.attribute("reverse", 0):
        x = torch.flip(x, [axis])
    if call.attribute("exclusive", 0):
        # Shifted by one: an exclusive sum is the inclusive sum of the preceding elements.
        pads = [0, 0] * (x.ndim - axis - 1) + [1, -1]
        x = F.pad(x, pads, value=float(empty))
    x = running(x, axis).to(call[0].dtype)
    return torch.flip(x, [axis]) if call.attribute("reverse", 0) else x
