"""Pooling: PyTorch's own if it covers the case, otherwise the sum of the window, written out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.ops.convolution import Window, window_of
from tensoropt.capture.onnx.ops.shape import pad_constant
from tensoropt.capture.onnx.registry import Call, converter
from tensoropt.capture.onnx.values import Traced

_MAX: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_CONVOLVE: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _pool_window(call: Call) -> tuple[Window, bool]:
    """(window, whether output sizes are rounded up)."""
    ceil = bool(call.attribute("ceil_mode", 0))
    same = call.attribute("auto_pad", "NOTSET").startswith("SAME")
    return window_of(call, tuple(call.attribute("kernel_shape"))), ceil and not same


def _extended(window: Window, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The pads with which rounding down gives the same as rounding up with the window's own pads.

    As in ONNX since opset 19, and always in PyTorch, a window that would start in the trailing padding is
    left out.
    """
    pads = []
    for size, k, s, d, (before, after) in zip(
        sizes, window.kernel, window.strides, window.dilations, window.pads, strict=True
    ):
        reach = d * (k - 1) + 1
        count = -(-(size + before + after - reach) // s) + 1
        # The last window would begin in the trailing padding.
        if (count - 1) * s >= size + before:
            count -= 1
        pads.append((before, max(after, (count - 1) * s + reach - size - before)))
    return tuple(pads)


def _fits(window: Window) -> bool:
    """Whether PyTorch's pooling itself supports these pads."""
    halves = zip(window.padding, window.kernel, strict=True)
    return window.symmetric and all(0 <= p <= k // 2 for p, k in halves)


@converter("MaxPool")
def max_pool(call: Call) -> Any:
    x = call[0]
    window, ceil = _pool_window(call)
    if call.wants(1):
        return _max_pool_with_indices(call, window, ceil)
    dtype = x.dtype
    x = x if x.floating else x.to(torch.float32)
    padding = window.padding
    if not _fits(window):
        pads = _extended(window, x.shape[2:]) if ceil else window.pads
        # Padded by hand with a value that is never the maximum.
        x, padding, ceil = pad_constant(x, pads, -math.inf), (0,) * window.dims, False
    out = _MAX[window.dims](x, window.kernel, window.strides, padding, window.dilations, ceil)
    return out.to(dtype)


def _max_pool_with_indices(call: Call, window: Window, ceil: bool) -> Any:
    """Max pooling with indices; they count through the whole tensor, PyTorch's through one channel of one
    sample."""
    if not _fits(window):
        raise OnnxError("its second output (indices) with uneven pads cannot be imported")
    x = call[0]
    out, index = _MAX[window.dims](
        x, window.kernel, window.strides, window.padding, window.dilations, ceil, return_indices=True
    )
    plane = math.prod(x.shape[2:])
    if call.attribute("storage_order", 0):
        height, width = x.shape[2:]
        row = torch.div(index, width, rounding_mode="floor")
        index = torch.remainder(index, width) * height + row
    start = torch.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * window.dims) * plane
    return out, index + call.builder.known(start)


@converter("AveragePool")
def average_pool(call: Call) -> Traced:
    x = call[0]
    window, ceil = _pool_window(call)
    include = bool(call.attribute("count_include_pad", 0))
    plain = all(d == 1 for d in window.dilations)
    if plain and _fits(window) and not (ceil and include):
        return _AVERAGE[window.dims](x, window.kernel, window.strides, window.padding, ceil, include)
    if plain and not any(any(p) for p in window.pads):
        return _AVERAGE[window.dims](x, window.kernel, window.strides, 0, ceil, include)
    pads = _extended(window, x.shape[2:]) if ceil else window.pads
    # Pooling ones in the same way counts the elements of each window; they are constants and fold away.
    ones = call.builder.known(torch.ones(1, 1, *x.shape[2:], dtype=x.dtype))
    if include:
        ones = pad_constant(ones, window.pads, 1)
        extra = [(b - wb, a - wa) for (b, a), (wb, wa) in zip(pads, window.pads, strict=True)]
        counted = _window_sum(pad_constant(ones, extra), window)
    else:
        counted = _window_sum(pad_constant(ones, pads), window)
    return _window_sum(pad_constant(x, pads), window) / counted


def _window_sum(x: Traced, window: Window) -> Traced:
    if all(d == 1 for d in window.dilations):
        return _AVERAGE[window.dims](x, window.kernel, window.strides) * math.prod(window.kernel)
    channels = x.shape[1]
    kernel = x.builder.known(torch.ones(channels, 1, *window.kernel, dtype=x.dtype))
    return _CONVOLVE[window.dims](x, kernel, None, window.strides, 0, window.dilations, channels)


@converter("LpPool")
def lp_pool(call: Call) -> Traced:
    window, ceil = _pool_window(call)
    p = call.attribute("p", 2)
    pads = _extended(window, call[0].shape[2:]) if ceil else window.pads
    powers = torch.pow(torch.abs(call[0]), p)
    return torch.pow(_window_sum(pad_constant(powers, pads), window), 1.0 / p)


def _spatial(x: Traced) -> list[int]:
    return list(range(2, x.ndim))


@converter("GlobalAveragePool")
def global_average_pool(call: Call) -> Traced:
    return torch.mean(call[0], _spatial(call[0]), keepdim=True)


@converter("GlobalMaxPool")
def global_max_pool(call: Call) -> Traced:
    return torch.amax(call[0], _spatial(call[0]), keepdim=True)


@converter("GlobalLpPool")
def global_lp_pool(call: Call) -> Traced:
    p = call.attribute("p", 2)
    powers = torch.pow(torch.abs(call[0]), p)
    return torch.pow(torch.sum(powers, _spatial(call[0]), keepdim=True), 1.0 / p)


@converter("MaxUnpool")
def max_unpool(call: Call) -> Traced:
    x, index = call[0], call[1]
    window = window_of(call, call.attribute("kernel_shape"))
    sizes = [
        (s - 1) * stride + k - before - after
        for s, stride, k, (before, after) in zip(
            x.shape[2:], window.strides, window.kernel, window.pads, strict=True
        )
    ]
    shape = [*x.shape[:2], *sizes]
    given = call.ints_or(2, shape, "output shape")
    zeros = call.builder.known(torch.zeros((), dtype=x.dtype).expand(math.prod(shape)))
    scattered = torch.scatter(zeros, 0, index.reshape(index.numel), x.reshape(x.numel))
    return pad_constant(scattered.reshape(*shape), [(0, a - b) for a, b in zip(given, shape, strict=True)])
