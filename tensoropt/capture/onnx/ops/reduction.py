"""Reductions, sorting and search along dims; loss operators; random numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.values import OnnxError, Traced
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


@converter("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def _random(call: Call) -> Traced:
    """Return random numbers, which differ from ONNX Runtime's. They are never folded, but drawn in every
    step."""
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
    count = prod(x.shape[d] for d in dims)
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
