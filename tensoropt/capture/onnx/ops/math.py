"""Converters of arithmetic, comparisons, activations, matrix products, reductions, sorting, losses and random
numbers."""

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
    """Return a one-element constant as a Python number, unless this changes the shape or dtype of the result
    that ``value`` and ``other`` have together."""
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
    x, low, high = call[0], call.optional(1), call.optional(2)
    if any(bound is not None and bound.data is None for bound in (low, high)):
        x = x if low is None else torch.maximum(x, low)
        return x if high is None else torch.minimum(x, high)
    low, high = call.scalar(1), call.scalar(2)
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
    """Return ``alpha * A' @ B' + beta * C``, as one ``linear`` if PyTorch exports linear layers like this."""
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


# -- losses, random numbers -----------------------------------------------------------------------


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


@converter("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def _random(call: Call) -> Traced:
    """Return random numbers, which differ from ONNX Runtime's and are drawn anew in every step."""
    like, code = call.op.endswith("Like"), call.attribute("dtype")
    shape = list(call[0].shape if like else call.attribute("shape"))
    dtype = torch_dtype(code, "its result") if code else (call[0].dtype if like else torch.float32)
    if "Normal" in call.op:
        drawn = call.builder.call(torch.randn, shape, dtype=dtype)
        return drawn * call.attribute("scale", 1.0) + call.attribute("mean", 0.0)
    low, high = call.attribute("low", 0.0), call.attribute("high", 1.0)
    return call.builder.call(torch.rand, shape, dtype=dtype) * (high - low) + low


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
    count = math.prod(x.shape[d] for d in dims)
    return torch.div(torch.sum(x, dims, keepdim=keepdim), count, rounding_mode="trunc")


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceL1": _norm(1),
    "ReduceL2": _norm(2),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": _mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": torch.sum,
}


@converter(*_REDUCE)
def _reduce(call: Call) -> Traced:
    x, axes, function = call[0], call.ints_or(1, None, "axes"), _REDUCE[call.op]
    untouched = not axes and call.attribute("noop_with_empty_axes", 0)
    if x.ndim == 0 or untouched:
        # Nothing is reduced, but the elementwise part still applies.
        return function(torch.unsqueeze(x, 0), [0], False).to(x.dtype)
    dims = [positive(a, x.ndim) for a in axes] if axes else list(range(x.ndim))
    keepdim = bool(call.attribute("keepdims", 1))
    if x.dtype == torch.bool:
        return function(x.to(torch.uint8), dims, keepdim).to(torch.bool)
    return function(x, dims, keepdim=keepdim).to(x.dtype)


@converter("ArgMax", "ArgMin")
def _arg(call: Call) -> Traced:
    if call.attribute("select_last_index", 0):
        raise OnnxError("select_last_index=1 cannot be imported")
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    return function(call[0], call.dim(), keepdim=bool(call.attribute("keepdims", 1)))


@converter("TopK")
def _top_k(call: Call) -> Any:
    x, axis, k = call[0], call.dim("axis", -1), int(call.scalar(1, role="k"))
    # The earliest of equal elements comes first, which ``torch.topk`` does not guarantee.
    values, indices = torch.sort(x, dim=axis, descending=bool(call.attribute("largest", 1)), stable=True)
    return torch.narrow(values, axis, 0, k), torch.narrow(indices, axis, 0, k)
