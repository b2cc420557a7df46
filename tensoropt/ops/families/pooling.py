"""Pooling and resizing of images: batch and channels may be split; windows keep the other dims whole."""

from __future__ import annotations

from tensoropt.ops.calls import CostClass, OpSpec, aten
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike


@alike("*")
def _pooling(b: Builder) -> None:
    shape = b.shape
    # The name says how many dims a window has; the dims in front are batch and channels, or channels alone.
    spatial = next((d for d in (1, 3) if f"{d}d." in b.op.target), 2)
    lead = len(shape) - spatial
    if lead < 1 or b.output().shape[:lead] != shape[:lead]:
        raise Opaque(b.op.name)
    b.along(*range(lead, len(shape)))


@alike("upscale_factor downscale_factor")
def _pixel_shuffle(b: Builder) -> None:
    """``[..., c * r * r, h, w] <-> [..., c, h * r, w * r]``; the factors ``r`` are never split."""
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    low, high = (before, after) if "unshuffle" not in b.op.target else (after, before)
    lead = b.loops(before[:-3])
    c, h, w = b.loop("channels", high[-3]), b.loop("rows", low[-2]), b.loop("columns", low[-1])
    r = b.arg(1)
    above, left = b.loop("above", r, splittable=False), b.loop("beside", r, splittable=False)
    coarse: list[Loops] = [*lead, (c, above, left), h, w]
    fine: list[Loops] = [*lead, c, (h, above), (w, left)]
    b.read(b.arg(0), coarse if low is before else fine)
    b.write(fine if low is before else coarse)
    b.linear = True


_RESIZES = (
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
    *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)

SPECS = (
    aten(
        "max_pool2d.default avg_pool2d.default adaptive_avg_pool2d.default max_pool2d_with_indices.default",
        _pooling,
        cost_class=CostClass.POOLING,
    ),
    OpSpec(
        targets=(
            *(f"aten.{kind}_pool{d}d.default" for kind in ("max", "avg", "adaptive_avg") for d in (1, 3)),
            "aten.adaptive_max_pool2d.default",
            "aten._adaptive_avg_pool2d.default",
            *(f"aten.{kind}.{overload}" for kind in _RESIZES for overload in ("vec", "default")),
        ),
        rule=_pooling,
    ),
    aten("pixel_shuffle.default pixel_unshuffle.default", _pixel_shuffle),
)
