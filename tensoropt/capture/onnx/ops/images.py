"""Converters of convolution, pooling and resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.ops.shape import pad_constant
from tensoropt.capture.onnx.values import OnnxError, Traced

_CONVOLVE: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class _Window:
    """A sliding window over the spatial dims.

    Attributes:
        pads: padding (before, after) of each spatial dim.
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
    """Return a node's window; ``auto_pad`` becomes explicit pads.

    Raises:
        OnnxError: the sizes are invalid for a window.
    """
    sizes = call[0].shape[2:]
    dims = len(kernel)
    if not 1 <= dims <= 3 or len(sizes) != dims:
        raise OnnxError(
            f"its window has {dims} dims for a tensor of shape {list(call[0].shape)}; it needs one for each "
            "spatial dim of the tensor (after batch and channels), 1 to 3 in all"
        )
    strides = tuple(call.attribute("strides") or (1,) * dims)
    dilations = tuple(call.attribute("dilations") or (1,) * dims)
    if min((*kernel, *strides, *dilations)) < 1 or not len(strides) == len(dilations) == dims:
        raise OnnxError(
            f"its kernel {list(kernel)}, strides {list(strides)} and dilations {list(dilations)} must have "
            f"{dims} positive numbers each"
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
def _conv(call: Call) -> Traced:
    x, weight, bias = call[0], call[1], call.optional(2)
    window = _window_of(call, weight.shape[2:])
    padding = window.padding
    # PyTorch takes one pad for both sides, and no negative pads.
    if not window.symmetric or min(padding) < 0:
        x, padding = pad_constant(x, window.pads), (0,) * window.dims
    return _CONVOLVE[window.dims](
        x, weight, bias, window.strides, padding, window.dilations, call.attribute("group", 1)
    )


@converter("ConvTranspose")
def _conv_transpose(call: Call) -> Traced:
    window = _window_of(call, call[1].shape[2:])
    sized = call.attribute("output_shape") or call.attribute("auto_pad", "NOTSET") != "NOTSET"
    if sized or not window.symmetric or min(window.padding) < 0:
        raise OnnxError("it has uneven pads, auto_pad or output_shape, which cannot be imported")
    extra = tuple(call.attribute("output_padding") or (0,) * window.dims)
    group = call.attribute("group", 1)
    return _TRANSPOSED[window.dims](
        call[0], call[1], call.optional(2), window.strides, window.padding, extra, group, window.dilations
    )


_MAX: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pool_window(call: Call) -> tuple[_Window, bool]:
    ceil = bool(call.attribute("ceil_mode", 0))
    same = call.attribute("auto_pad", "NOTSET").startswith("SAME")
    return _window_of(call, tuple(call.attribute("kernel_shape"))), ceil and not same


def _fits(window: _Window) -> bool:
    halves = zip(window.padding, window.kernel, strict=True)
    return window.symmetric and all(0 <= p <= k // 2 for p, k in halves)


@converter("MaxPool")
def _max_pool(call: Call) -> Traced:
    x = call[0]
    if call.wants(1) or not x.floating:
        raise OnnxError("it returns indices or pools integers, which cannot be imported")
    window, ceil = _pool_window(call)
    padding = window.padding
    if not _fits(window):
        if ceil:
            raise OnnxError("uneven pads with ceil_mode=1 cannot be imported; pad in an operator before it")
        # Padded explicitly, with a value that is never the maximum.
        x, padding = pad_constant(x, window.pads, -math.inf), (0,) * window.dims
    return _MAX[window.dims](x, window.kernel, window.strides, padding, window.dilations, ceil)


@converter("AveragePool")
def _average_pool(call: Call) -> Traced:
    x = call[0]
    window, ceil = _pool_window(call)
    if any(d != 1 for d in window.dilations):
        raise OnnxError("dilations cannot be imported")
    include = bool(call.attribute("count_include_pad", 0))
    if not _fits(window):
        remedy = "pad in an operator before it" if include else "export it with equal pads on both sides"
        raise OnnxError(f"uneven pads cannot be imported; {remedy}")
    return _AVERAGE[window.dims](x, window.kernel, window.strides, window.padding, ceil, include)


@converter("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> Traced:
    function = torch.mean if call.op == "GlobalAveragePool" else torch.amax
    return function(call[0], list(range(2, call[0].ndim)), keepdim=True)


# -- resizing -------------------------------------------------------------------------------------

_MAX_SIZE = 2**16
"""Maximum size of a resized dim; larger images are not realistic."""
_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


@converter("Resize")
def _resize(call: Call) -> Traced:
    x = call[0]
    dims = [positive(a, x.ndim) for a in call.attribute("axes") or range(x.ndim)]
    if call.optional(2) is not None and call[2].numel:
        scales = dict(zip(dims, map(float, call.known(2, "scales").tolist()), strict=True))
        sizes = {d: math.floor(x.shape[d] * s) for d, s in scales.items()}
    else:
        sizes = dict(zip(dims, call.ints(3, "sizes"), strict=True))
        scales = {d: s / x.shape[d] for d, s in sizes.items()}
    if any(not 1 <= s <= _MAX_SIZE for s in sizes.values()):
        raise OnnxError(f"it resizes to {list(sizes.values())}; each size must be 1 to {_MAX_SIZE}")
    changed = [d for d in dims if sizes[d] != x.shape[d]]
    if not changed:
        return x
    if x.ndim not in _LINEAR or min(changed) < 2 or not x.floating:
        raise OnnxError("only spatial dims of images can be resized, in floating point")
    mode, corners = _mode(call, x, [scales[d] for d in changed], [sizes[d] for d in changed])
    spatial = range(2, x.ndim)
    # PyTorch derives coordinates from the given sizes, or from scales if sizes would be fractions.
    if any(abs(scales[d] * x.shape[d] - sizes[d]) > 1e-6 for d in changed):
        if corners:
            raise OnnxError("align_corners with scales that give fractional sizes cannot be imported")
        given = [scales.get(d, 1.0) for d in spatial]
        return F.interpolate(x, scale_factor=given, mode=mode, align_corners=corners)
    size = [sizes.get(d, x.shape[d]) for d in spatial]
    return F.interpolate(x, size=size, mode=mode, align_corners=corners)


def _mode(call: Call, x: Traced, scales: list[float], sizes: list[int]) -> tuple[str, bool | None]:
    mode = call.attribute("mode", "nearest")
    coordinates = call.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = call.attribute("nearest_mode", "round_prefer_floor")
    others = ("antialias", "exclude_outside")
    plain = not any(call.attribute(name, 0) for name in others)
    plain = plain and call.attribute("keep_aspect_ratio_policy", "stretch") == "stretch"
    if mode == "nearest":
        # With whole factors, every pixel's centre lies inside one source pixel, whatever the rounding.
        whole = coordinates == "half_pixel" and rounding.startswith("round")
        if plain and (
            (coordinates, rounding) == ("asymmetric", "floor")
            or (whole and all(s.is_integer() for s in scales))
        ):
            return "nearest", None
    elif plain:
        # With one pixel left, pytorch_half_pixel takes the first one, and PyTorch the middle.
        centred = coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and min(sizes) > 1)
        cubic = mode == "cubic" and x.ndim == 4 and call.attribute("cubic_coeff_a", -0.75) == -0.75
        if (centred or coordinates == "align_corners") and (mode == "linear" or cubic):
            return "bicubic" if cubic else _LINEAR[x.ndim], coordinates == "align_corners"
    raise OnnxError(
        f"PyTorch does not support this resizing ({mode}, {coordinates}, {rounding}, {', '.join(others)}); "
        "export PyTorch's own interpolate without antialias"
    )
