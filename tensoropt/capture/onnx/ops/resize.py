"""Resizing and sampling of images.

Interpolation is separable and its coordinates are constants. If PyTorch has exactly the same case, it is
used; any other mode becomes one constant matrix per resized dim (defined by Resize-19 of the operator set).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.values import OnnxError, Traced

_MAX_SIZE = 2**16
"""The largest size of a resized dim; an image with more pixels per side is not realistic."""


@converter("Upsample")
def _upsample(call: Call) -> Traced:
    scales = call.attribute("scales")
    scales = [float(v) for v in call.known(1, "scales").tolist()] if scales is None else scales
    sizes = [int(s * f) for s, f in zip(call[0].shape, scales, strict=True)]
    mode = call.attribute("mode", "nearest")
    options = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resized(call[0], list(range(call[0].ndim)), sizes, scales, mode, options, [])


@converter("Resize")
def _resize_10(call: Call) -> Traced:
    return _upsample(call)


@converter("Resize", since=11)
def _resize(call: Call) -> Traced:
    x = call[0]
    dims = [positive(a, x.ndim) for a in call.attribute("axes") or range(x.ndim)]
    mode = call.attribute("mode", "nearest")
    roi = [] if call.optional(1) is None else [float(v) for v in call.known(1, "region").tolist()]
    scales = [] if call.optional(2) is None else [float(v) for v in call.known(2, "scales").tolist()]
    if scales:
        sizes = [math.floor(x.shape[d] * s) for d, s in zip(dims, scales, strict=True)]
        region = call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize"
        if region and roi:
            half = len(dims)
            sizes = [
                math.floor(x.shape[d] * (roi[i + half] - roi[i]) * scales[i]) for i, d in enumerate(dims)
            ]
    else:
        sizes, scales = _from_sizes(call, x, dims)
    return _resized(x, dims, sizes, scales, mode, call.attributes, roi)


def _from_sizes(call: Call, x: Traced, dims: list[int]) -> tuple[list[int], list[float]]:
    sizes = call.ints(3, "sizes")
    policy = call.attribute("keep_aspect_ratio_policy", "stretch")
    ratios = [s / x.shape[d] for s, d in zip(sizes, dims, strict=True)]
    if policy == "stretch":
        return sizes, ratios
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(x.shape[d] * ratio + 0.5) for d in dims], [ratio] * len(dims)


def _resized(
    x: Traced,
    dims: list[int],
    sizes: list[int],
    scales: list[float],
    mode: str,
    options: Any,
    roi: list[float],
) -> Traced:
    if any(not 1 <= s <= _MAX_SIZE for s in sizes):
        raise OnnxError(f"it resizes to {sizes}; each size must be 1 to {_MAX_SIZE}")
    changed = [
        i
        for i, (d, s) in enumerate(zip(dims, sizes, strict=True))
        if x.shape[d] != s or (roi and scales[i] != 1)
    ]
    if not changed:
        return x
    resized = _as_pytorch(x, dims, sizes, scales, changed, mode, options)
    if resized is not None:
        return resized
    for i in changed:
        bounds = (roi[i], roi[i + len(dims)]) if roi else (0.0, 1.0)
        matrix = _matrix(x.shape[dims[i]], sizes[i], scales[i], mode, options, bounds)
        x = _along(x, dims[i], matrix)
    return x


def _as_pytorch(
    x: Traced,
    dims: list[int],
    sizes: list[int],
    scales: list[float],
    changed: list[int],
    mode: str,
    options: Any,
) -> Traced:
    """PyTorch's interpolation if it does exactly what is requested; None otherwise."""
    spatial = [dims[i] for i in changed]
    if x.ndim not in (3, 4, 5) or min(spatial) < 2 or options.get("antialias", 0) or not x.floating:
        return None
    size = list(x.shape[2:])
    for i in changed:
        size[dims[i] - 2] = sizes[i]
        # PyTorch derives coordinates from the sizes, ONNX from the scales: the two agree if the product is
        # whole.
        if abs(scales[i] * x.shape[dims[i]] - sizes[i]) > 1e-6:
            return None
    coordinates = options.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        rounding = options.get("nearest_mode", "round_prefer_floor")
        whole = all(float(scales[i]).is_integer() for i in changed)
        # For whole factors, every pixel's centre lies inside one source pixel, however it is rounded.
        centred = whole and coordinates == "half_pixel" and rounding.startswith("round")
        if centred or (coordinates == "asymmetric" and rounding == "floor"):
            return F.interpolate(x, size=size, mode="nearest")
        return None
    corners = coordinates == "align_corners"
    half = coordinates in ("half_pixel", "pytorch_half_pixel") and min(size) > 1
    if not (corners or half) or options.get("exclude_outside", 0):
        return None
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
    if mode == "cubic" and (x.ndim != 4 or options.get("cubic_coeff_a", -0.75) != -0.75):
        return None
    return F.interpolate(x, size=size, mode="bicubic" if mode == "cubic" else linear, align_corners=corners)


def _along(x: Traced, dim: int, matrix: np.ndarray) -> Traced:
    """Apply an (output, input) matrix along one dim; a selection of single elements becomes an index."""
    rows = (matrix != 0).sum(axis=1)
    if (rows == 1).all() and (matrix.max(axis=1) == 1).all():
        return torch.index_select(x, dim, x.builder.known(torch.from_numpy(matrix.argmax(axis=1))))
    wide = x if x.floating else x.to(torch.float32)
    constant = x.builder.known(torch.from_numpy(matrix).to(wide.dtype))
    # The dim is moved last, where a matrix product contracts it.
    order = [d for d in range(x.ndim) if d != dim] + [dim]
    out = torch.matmul(wide.permute(*order), torch.t(constant))
    back = [order.index(d) for d in range(x.ndim)]
    return out.permute(*back).to(x.dtype)


def _matrix(
    size: int, output_size: int, scale: float, mode: str, options: Any, region: tuple[float, float]
) -> np.ndarray:
    coordinates = options.get("coordinate_transformation_mode", "half_pixel")
    matrix = np.zeros((output_size, size))
    for i in range(output_size):
        place = _coordinate(i, size, output_size, scale, coordinates, region)
        outside = coordinates == "tf_crop_and_resize" and not 0 <= place <= size - 1
        if outside:
            if options.get("extrapolation_value", 0.0):
                raise OnnxError("an extrapolation value other than 0 cannot be imported")
            continue
        for column, weight in _weights(place, size, scale, mode, options):
            matrix[i, column] += weight
    return matrix


def _coordinate(
    i: int, size: int, output_size: int, scale: float, mode: str, region: tuple[float, float]
) -> float:
    if mode == "half_pixel":
        return (i + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (i + 0.5) / scale - 0.5 if output_size > 1 else 0.0
    if mode == "align_corners":
        return i * (size - 1) / (scale * size - 1) if output_size > 1 else 0.0
    if mode == "asymmetric":
        return i / scale
    if mode == "half_pixel_symmetric":
        adjustment = output_size / (scale * size)
        return size / 2 * (1 - adjustment) + (i + 0.5) / scale - 0.5
    if mode == "tf_crop_and_resize":
        start, end = region
        if output_size > 1:
            return start * (size - 1) + i * (end - start) * (size - 1) / (output_size - 1)
        return 0.5 * (start + end) * (size - 1)
    raise OnnxError(f"its coordinate transformation '{mode}' is unknown")


def _weights(place: float, size: int, scale: float, mode: str, options: Any) -> list[tuple[int, float]]:
    """Return (element, weight) for the elements around a coordinate."""
    if mode == "nearest":
        return [(_nearest(place, size, options.get("nearest_mode", "round_prefer_floor")), 1.0)]
    wide = min(scale, 1.0) if options.get("antialias", 0) else 1.0
    reach = {"linear": 1, "cubic": 2}.get(mode)
    if reach is None:
        raise OnnxError(f"its mode '{mode}' is unknown")
    support = reach / wide
    first, last = math.floor(place - support) + 1, math.ceil(place + support) - 1
    if wide == 1.0:
        first = math.floor(place) - reach + 1
        last = first + 2 * reach - 1
    a = options.get("cubic_coeff_a", -0.75)
    weights = []
    for column in range(first, last + 1):
        distance = abs(column - place) * wide
        weight = max(0.0, 1.0 - distance) if mode == "linear" else _cubic(distance, a)
        if options.get("exclude_outside", 0) and not 0 <= column < size:
            continue
        weights.append((min(max(column, 0), size - 1), weight))
    total = sum(weight for _, weight in weights)
    renormalise = options.get("exclude_outside", 0) or wide != 1.0
    return [(c, w / total if renormalise and total else w) for c, w in weights]


def _nearest(place: float, size: int, mode: str) -> int:
    rounding = {
        "floor": math.floor(place),
        "ceil": math.ceil(place),
        "round_prefer_floor": math.ceil(place - 0.5),
        "round_prefer_ceil": math.floor(place + 0.5),
    }
    if mode not in rounding:
        raise OnnxError(f"its nearest mode '{mode}' is unknown")
    return min(max(rounding[mode], 0), size - 1)


def _cubic(distance: float, a: float) -> float:
    d = distance
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


@converter("GridSample")
def _grid_sample(call: Call) -> Traced:
    mode = call.attribute("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(
        call[0],
        call[1].to(call[0].dtype),
        mode=mode,
        padding_mode=call.attribute("padding_mode", "zeros"),
        align_corners=bool(call.attribute("align_corners", 0)),
    )


@converter("AffineGrid")
def _affine_grid(call: Call) -> Traced:
    size = call.ints(1, "size")
    return F.affine_grid(call[0], size, align_corners=bool(call.attribute("align_corners", 0)))
