"""Reductions, orderings and searches along dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensoropt.capture.onnx.registry import Call, converter, positive
from tensoropt.capture.onnx.values import Traced

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
def reduce_attribute(call: Call) -> Traced:
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
def arg(call: Call) -> Traced:
    x, axis = call[0], call.dim()
    keepdim = bool(call.attribute("keepdims", 1))
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    if not call.attribute("select_last_index", 0):
        return function(x, axis, keepdim=keepdim)
    last: Traced = function(torch.flip(x, [axis]), axis, keepdim=keepdim)
    return last.builder.call(torch.rsub, last, x.shape[axis] - 1)


@converter("TopK")
def top_k_attribute(call: Call) -> Any:
    return _top_k(call, call.attribute("k"))


@converter("TopK", since=10)
def top_k(call: Call) -> Any:
    return _top_k(call, int(call.scalar(1, what="k")))


def _top_k(call: Call, k: int) -> Any:
    x, axis = call[0], call.dim("axis", -1)
    # Of equal elements the earliest comes first, which ``torch.topk`` does not guarantee.
    values, indices = torch.sort(x, dim=axis, descending=bool(call.attribute("largest", 1)), stable=True)
    return torch.narrow(values, axis, 0, k), torch.narrow(indices, axis, 0, k)
