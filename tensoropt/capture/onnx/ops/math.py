"""Arithmetic, comparisons, activations, matrix products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, converters, positive
from tensoropt.capture.onnx.values import OnnxError, Traced
from tensoropt.capture.onnx.weights import torch_dtype

_UNARY: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name.lower())
    for name in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Det", "Erf", "Exp",
        "Floor", "IsInf", "IsNaN", "Log", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin",
        "Sinh", "Sqrt", "Tan", "Tanh",
    )
} | {
    "BitwiseNot": torch.bitwise_not, "HardSwish": F.hardswish, "Mish": F.mish, "Not": torch.logical_not,
    "Softplus": F.softplus,
}  # fmt: skip


@converter(*_UNARY)
def _unary(call: Call) -> Traced:
    if call.attributes:
        raise OnnxError(f"its attribute '{min(call.attributes)}' cannot be imported")
    return _UNARY[call.op](call[0])


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip


@converter(*_BINARY)
def _binary(call: Call) -> Traced:
    a, b = call[0], call[1]
    if call.op == "Sub" and isinstance(_plain(a, b), (int, float)):
        return torch.rsub(b, _plain(a, b))
    # The constant comes second, where `_plain` may replace it by a number.
    if call.op in ("Add", "Mul") and a.data is not None and b.data is None:
        a, b = b, a
    return _BINARY[call.op](a, _plain(b, a))


def _plain(value: Traced, other: Traced) -> Any:
    """Return a one-element constant as a Python number, if that changes neither shape nor dtype."""
    if value.data is None or other.data is not None or value.numel != 1 or value.ndim > other.ndim:
        return value
    return value.data.item() if value.dtype == other.dtype and value.dtype != torch.bool else value


@converter("Div")
def _div(call: Call) -> Traced:
    a, b = call[0], call[1]
    if a.floating:
        return torch.div(a, _plain(b, a))
    # Integers divide as in C.
    return torch.div(a, b, rounding_mode="trunc")


@converter("Mod")
def _mod(call: Call) -> Traced:
    function = torch.fmod if call.attribute("fmod", 0) else torch.remainder
    return function(call[0], _plain(call[1], call[0]))


@converter("Pow")
def _power(call: Call) -> Traced:
    base, exponent = call[0], call[1]
    if exponent.data is not None and exponent.numel == 1 and exponent.ndim <= base.ndim:
        number = exponent.data.item()
        # A Python number keeps a square one call, without an exponent tensor.
        number = int(number) if float(number).is_integer() else number
        return torch.pow(base, number).to(base.dtype)
    return torch.pow(base, exponent).to(base.dtype)


@converter("Sum", "Max", "Min", "Mean")
def _variadic(call: Call) -> Traced:
    # Pairwise, so that operands broadcast, unlike stacking.
    total = functools.reduce({"Max": torch.maximum, "Min": torch.minimum}.get(call.op, torch.add), call)
    return total / len(call) if call.op == "Mean" and len(call) > 1 else total


converters(
    Cast=lambda call: call[0].to(torch_dtype(call.attribute("to"), "its result")),
    CastLike=lambda call: call[0].to(call[1].dtype),
    LeakyRelu=lambda call: F.leaky_relu(call[0], call.attribute("alpha", 0.01)),
    Elu=lambda call: F.elu(call[0], call.attribute("alpha", 1.0)),
    Celu=lambda call: F.celu(call[0], call.attribute("alpha", 1.0)),
    Gelu=lambda call: F.gelu(call[0], approximate=call.attribute("approximate", "none")),
    Softmax=lambda call: torch.softmax(call[0], call.dim("axis", -1)),
    LogSoftmax=lambda call: torch.log_softmax(call[0], call.dim("axis", -1)),
    MatMul=lambda call: torch.matmul(call[0], call[1]),
    Einsum=lambda call: torch.einsum(call.attribute("equation").replace(" ", ""), *call),
)


# -- activations ----------------------------------------------------------------------------------


@converter("PRelu")
def _prelu(call: Call) -> Traced:
    x, slope = call[0], call[1]
    flat = slope.numel in (1, x.shape[1] if x.ndim > 1 else 1)
    channels = slope.shape if slope.ndim < x.ndim else slope.shape[1:]
    if flat and x.floating and all(size == 1 for size in channels[1:]) and slope.ndim >= x.ndim - 1:
        return F.prelu(x, slope.reshape(slope.numel))
    return torch.where(x.method("ge", 0), x, x * slope)


@converter("Selu")
def _selu(call: Call) -> Traced:
    alpha = call.attribute("alpha", 1.6732631921768188)
    gamma = call.attribute("gamma", 1.0507010221481323)
    return F.elu(call[0], alpha) * gamma


@converter("HardSigmoid")
def _hard_sigmoid(call: Call) -> Traced:
    alpha, beta = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5:
        return F.hardsigmoid(call[0])
    return torch.clamp(call[0] * alpha + beta, 0.0, 1.0)


@converter("Clip")
def _clip(call: Call) -> Traced:
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
    # The standard then gives the upper bound.
    if low is not None and high is not None and low > high:
        low = high
    if low == 0 and high == 6 and x.floating:
        return F.relu6(x)
    return torch.clamp(x, low, high)


# -- matrix products ------------------------------------------------------------------------------


@converter("Gemm")
def _gemm(call: Call) -> Traced:
    """Return ``alpha * A' @ B' + beta * C``, as ``linear`` in the form to which PyTorch exports linear
    layers.
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


@converter("CumSum")
def _cumsum(call: Call) -> Traced:
    x, axis = call[0], positive(int(call.scalar(1, role="axis")), call[0].ndim)
    if call.attribute("reverse", 0):
        x = torch.flip(x, [axis])
    if call.attribute("exclusive", 0):
        # Shifted by one: an exclusive sum is the inclusive sum of the preceding elements.
        x = F.pad(x, [0, 0] * (x.ndim - axis - 1) + [1, -1])
    x = torch.cumsum(x, axis).to(call[0].dtype)
    return torch.flip(x, [axis]) if call.attribute("reverse", 0) else x
