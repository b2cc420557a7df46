"""Convolutions and what they share with pooling: windows, strides and automatic padding.

Pooling: PyTorch's own if it covers the case, otherwise the sum of the window, written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import MICROSOFT, Call, converter
from tensoropt.capture.onnx.ops.shape import pad_constant
from tensoropt.capture.onnx.values import OnnxError, Traced

_CONVOLVE: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class _Window:
    """A sliding window over the spatial dims.

    Attributes:
        pads: (before, after) for each spatial dim.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def symmetric(self) -> bool:
        return all(before == after for before, after in self.pads)

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(before for before, _ in self.pads)


def _window_of(call: Call, kernel: Sequence[int]) -> _Window:
    """Return the window of a node; ``auto_pad`` becomes explicit pads.

    Raises:
        OnnxError: the sizes are impossible for a window.
    """
    sizes = call[0].shape[2:]
    dims = len(kernel)
    if not 1 <= dims <= 3 or len(sizes) != dims:
        raise OnnxError(
            f"a window of {dims} dims over a tensor of shape {list(call[0].shape)}; 1 to 3 spatial dims "
            "after batch and channels can be imported"
        )
    strides = tuple(call.attribute("strides") or (1,) * dims)
    dilations = tuple(call.attribute("dilations") or (1,) * dims)
    if min((*kernel, *strides, *dilations)) < 1 or not len(strides) == len(dilations) == dims:
        raise OnnxError(
            f"kernel {list(kernel)}, strides {list(strides)}, dilations {list(dilations)}: each must have "
            f"{dims} positive numbers"
        )
    mode = call.attribute("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = tuple(
            _same(s, k, stride, d, upper=mode == "SAME_UPPER")
            for s, k, stride, d in zip(sizes, kernel, strides, dilations, strict=True)
        )
    else:
        flat = [0] * (2 * dims) if mode == "VALID" else call.attribute("pads") or [0] * (2 * dims)
        if len(flat) != 2 * dims:
            raise OnnxError(f"it has {len(flat)} pads; a window of {dims} dims needs {2 * dims}")
        pads = tuple(zip(flat[:dims], flat[dims:], strict=True))
    return _Window(tuple(kernel), strides, dilations, pads)


def _same(size: int, kernel: int, stride: int, dilation: int, *, upper: bool) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


@converter("Conv")
def conv(call: Call) -> Traced:
    return convolve(call, call[0], call[1], call.optional(2))


def convolve(call: Call, x: Traced, weight: Traced, bias: Traced) -> Traced:
    """Return a convolution; padding for which PyTorch has no argument becomes a separate node."""
    window = _window_of(call, weight.shape[2:])
    padding = window.padding
    # PyTorch takes one pad for both sides, and no negative pads.
    if not window.symmetric or min(padding) < 0:
        x, padding = pad_constant(x, window.pads), (0,) * window.dims
    return _CONVOLVE[window.dims](
        x, weight, bias, window.strides, padding, window.dilations, call.attribute("group", 1)
    )


@converter("FusedConv", domain=MICROSOFT)
def _fused_conv(call: Call) -> Traced:
    out = conv(call)
    if call.optional(3) is not None:
        out = out + call[3]
    return _activated(call, out)


def _activated(call: Call, out: Traced) -> Traced:
    name, numbers = call.attribute("activation", ""), call.attribute("activation_params") or []
    if name == "Clip":
        return torch.clamp(out, *numbers)
    if name == "LeakyRelu":
        return F.leaky_relu(out, numbers[0] if numbers else 0.01)
    if name == "HardSigmoid":
        return torch.clamp(out * numbers[0] + numbers[1], 0.0, 1.0)
    functions: Any = {"": lambda v: v, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
    if name not in functions:
        raise OnnxError(f"its activation '{name}' is unknown")
    return functions[name](out)


@converter("ConvTranspose")
def _conv_transpose(call: Call) -> Traced:
    """Return a transposed convolution, computed without padding, then cut: this covers uneven pads and a
    given output shape.
    """
    x, weight, bias = call[0], call[1], call.optional(2)
    window = _window_of(call, weight.shape[2:])
    dims, extra = window.dims, list(call.attribute("output_padding") or [0] * window.dims)
    mode, output_shape = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    full = [
        (s - 1) * stride + d * (k - 1) + 1
        for s, stride, d, k in zip(x.shape[2:], window.strides, window.dilations, window.kernel, strict=True)
    ]
    if output_shape is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [s * stride for s, stride in zip(x.shape[2:], window.strides, strict=True)]
    pads = list(window.pads)
    if output_shape is not None:
        totals = [f + e - w for f, e, w in zip(full, extra, output_shape[-dims:], strict=True)]
        small_first = mode != "SAME_LOWER" if mode != "NOTSET" else False
        pads = [(t // 2, t - t // 2) if small_first else (t - t // 2, t // 2) for t in totals]
    group, strides, dilations = call.attribute("group", 1), window.strides, window.dilations
    function = _TRANSPOSED[dims]
    even = all(a == b >= 0 for a, b in pads)
    # PyTorch refuses an output padding that is as large as both stride and dilation.
    legal = all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True))
    if even and legal:
        return function(x, weight, bias, strides, tuple(a for a, _ in pads), tuple(extra), group, dilations)
    # The bias is added afterwards; otherwise the elements added by output padding would lack it.
    out = function(x, weight, None, strides, 0, 0, group, dilations)
    out = pad_constant(out, [(-a, e - b) for (a, b), e in zip(pads, extra, strict=True)])
    return out if bias is None else out + bias.reshape(-1, *(1,) * dims)


_MAX: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pool_window(call: Call) -> tuple[_Window, bool]:
    """Return (window, whether output sizes are rounded up)."""
    ceil = bool(call.attribute("ceil_mode", 0))
    same = call.attribute("auto_pad", "NOTSET").startswith("SAME")
    return _window_of(call, tuple(call.attribute("kernel_shape"))), ceil and not same


def _extended(window: _Window, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the pads with which rounding down gives the same as rounding up with the window's own pads.

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


def _fits(window: _Window) -> bool:
    """Return whether PyTorch's pooling itself supports these pads."""
    halves = zip(window.padding, window.kernel, strict=True)
    return window.symmetric and all(0 <= p <= k // 2 for p, k in halves)


@converter("MaxPool")
def _max_pool(call: Call) -> Any:
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


def _max_pool_with_indices(call: Call, window: _Window, ceil: bool) -> Any:
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
def _average_pool(call: Call) -> Traced:
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


def _window_sum(x: Traced, window: _Window) -> Traced:
    if all(d == 1 for d in window.dilations):
        return _AVERAGE[window.dims](x, window.kernel, window.strides) * math.prod(window.kernel)
    channels = x.shape[1]
    kernel = x.builder.known(torch.ones(channels, 1, *window.kernel, dtype=x.dtype))
    return _CONVOLVE[window.dims](x, kernel, None, window.strides, 0, window.dilations, channels)


@converter("LpPool")
def _lp_pool(call: Call) -> Traced:
    window, ceil = _pool_window(call)
    p = call.attribute("p", 2)
    pads = _extended(window, call[0].shape[2:]) if ceil else window.pads
    powers = torch.pow(torch.abs(call[0]), p)
    return torch.pow(_window_sum(pad_constant(powers, pads), window), 1.0 / p)


def _spatial(x: Traced) -> list[int]:
    return list(range(2, x.ndim))


@converter("GlobalAveragePool")
def _global_average_pool(call: Call) -> Traced:
    return torch.mean(call[0], _spatial(call[0]), keepdim=True)


@converter("GlobalMaxPool")
def _global_max_pool(call: Call) -> Traced:
    return torch.amax(call[0], _spatial(call[0]), keepdim=True)


@converter("GlobalLpPool")
def _global_lp_pool(call: Call) -> Traced:
    p = call.attribute("p", 2)
    powers = torch.pow(torch.abs(call[0]), p)
    return torch.pow(torch.sum(powers, _spatial(call[0]), keepdim=True), 1.0 / p)


@converter("MaxUnpool")
def _max_unpool(call: Call) -> Traced:
    x, index = call[0], call[1]
    window = _window_of(call, call.attribute("kernel_shape"))
    sizes = [
        (s - 1) * stride + k - before - after
        for s, stride, k, (before, after) in zip(
            x.shape[2:], window.strides, window.kernel, window.pads, strict=True
        )
    ]
    shape = [*x.shape[:2], *sizes]
    output_shape = call.ints_or(2, shape, "output shape")
    zeros = call.builder.known(torch.zeros((), dtype=x.dtype).expand(math.prod(shape)))
    scattered = torch.scatter(zeros, 0, index.reshape(index.numel), x.reshape(x.numel))
    return pad_constant(
        scattered.reshape(*shape), [(0, a - b) for a, b in zip(output_shape, shape, strict=True)]
    )
