"""Image resizing, in the forms that PyTorch supports."""

from __future__ import annotations

import math

import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.values import OnnxError, Traced

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
