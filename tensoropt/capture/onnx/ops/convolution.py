"""Convolutions and what they share with pooling: windows, strides and automatic padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.errors import OnnxError
from tensoropt.capture.onnx.ops.shape import pad_constant
from tensoropt.capture.onnx.registry import MICROSOFT, Call, converter
from tensoropt.capture.onnx.values import Traced

_CONVOLVE: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Window:
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


def window_of(call: Call, kernel: Sequence[int]) -> Window:
    """The window of a node; ``auto_pad`` becomes explicit pads.

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
    return Window(tuple(kernel), strides, dilations, pads)


def _same(size: int, kernel: int, stride: int, dilation: int, *, upper: bool) -> tuple[int, int]:
    total = max((-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


@converter("Conv")
def conv(call: Call) -> Traced:
    return convolve(call, call[0], call[1], call.optional(2))


def convolve(call: Call, x: Traced, weight: Traced, bias: Traced) -> Traced:
    """A convolution; padding for which PyTorch has no argument becomes a separate node."""
    window = window_of(call, weight.shape[2:])
    padding = window.padding
    # PyTorch takes one pad for both sides, and no negative pads.
    if not window.symmetric or min(padding) < 0:
        x, padding = pad_constant(x, window.pads), (0,) * window.dims
    return _CONVOLVE[window.dims](
        x, weight, bias, window.strides, padding, window.dilations, call.attribute("group", 1)
    )


@converter("FusedConv", domain=MICROSOFT)
def fused_conv(call: Call) -> Traced:
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
def conv_transpose(call: Call) -> Traced:
    """A transposed convolution, computed without padding, then cut: this covers uneven pads and a given
    output shape."""
    x, weight, bias = call[0], call[1], call.optional(2)
    window = window_of(call, weight.shape[2:])
    dims, extra = window.dims, list(call.attribute("output_padding") or [0] * window.dims)
    mode, wanted = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    full = [
        (s - 1) * stride + d * (k - 1) + 1
        for s, stride, d, k in zip(x.shape[2:], window.strides, window.dilations, window.kernel, strict=True)
    ]
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [s * stride for s, stride in zip(x.shape[2:], window.strides, strict=True)]
    pads = list(window.pads)
    if wanted is not None:
        totals = [f + e - w for f, e, w in zip(full, extra, wanted[-dims:], strict=True)]
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
