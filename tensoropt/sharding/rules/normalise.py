"""Norms, softmax, reductions and pooling."""

from __future__ import annotations

from collections.abc import Sequence

from tensoropt.graph import FLOATING
from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


@rule("aten.layer_norm.default", "aten.rms_norm.default", "aten.native_layer_norm.default")
def layer_norm(b: Builder) -> None:
    """Leading dims split; the normalised ones stay whole."""
    shape = b.tensor(b.arg(0)).shape
    kept = len(shape) - len(b.arg(1))
    labels: list[Label] = [b.loop(f"d{i}", s) if i < kept else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write(labels)


@rule("aten._weight_norm.default")
def weight_norm(b: Builder) -> None:
    """``w = g v / |v|``, a norm for every index of one dim: that dim splits."""
    shape, dim = b.tensor(b.arg(0)).shape, b.arg(2, "dim", 0) % len(b.tensor(b.arg(0)).shape)
    labels: list[Label] = [b.loop(f"d{i}", s, splittable=i == dim) for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.read(b.arg(1), labels)
    b.write(labels)


@rule("aten.fft_fftn.default", "aten.fft_fft2.default", "aten.fft_fft.default", "aten.fft_rfftn.default")
def fourier(b: Builder) -> None:
    """Transformed dims stay whole."""
    shape, dims = b.tensor(b.arg(0)).shape, b.arg(2, "dim")
    if dims is None:
        raise Opaque(b.op.name)
    touched = {d % len(shape) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}
    labels: list[Label] = [None if i in touched else b.loop(f"d{i}", s) for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write(labels)


@rule("aten.group_norm.default")
def group_norm(b: Builder) -> None:
    """Batch and groups split; the channels of a group stay together."""
    shape, groups = b.tensor(b.arg(0)).shape, b.arg(1)
    n = b.loop("batch", shape[0])
    g = b.loop("groups", groups)
    c = b.loop("channels", shape[1] // groups, splittable=False)
    x: list[Label] = [n, (g, c), *[None] * (len(shape) - 2)]
    b.read(b.arg(0), x)
    b.read(b.arg(2, "weight"), [(g, c)])
    b.read(b.arg(3, "bias"), [(g, c)])
    b.write(x)


@rule("aten.instance_norm.default")
def instance_norm(b: Builder) -> None:
    """Every image and channel has statistics of its own, unless running ones are kept."""
    shape = b.tensor(b.arg(0)).shape
    if b.arg(3) is not None or b.arg(4) is not None:
        raise Opaque(b.op.name)
    n, c = b.loop("batch", shape[0]), b.loop("channels", shape[1])
    x: list[Label] = [n, c] + [None] * (len(shape) - 2)
    b.read(b.arg(0), x)
    for index in (1, 2):
        b.read(b.arg(index), [c])
    b.write(x)


@rule("aten._native_batch_norm_legit_functional.default")
def batch_norm_training(b: Builder) -> None:
    """Batch (statistics are synchronised by ``local``) and channels split."""
    shape = b.tensor(b.arg(0)).shape
    n, c = b.loop("batch", shape[0]), b.loop("channels", shape[1])
    x: list[Label] = [n, c] + [None] * (len(shape) - 2)
    b.read(b.arg(0), x)
    for index in (1, 2, 3, 4):
        b.read(b.arg(index), [c])
    b.write(x)
    for index in range(1, len(b.op.outputs)):
        per_channel = b.output(index).shape == (shape[1],)
        b.write([c] if per_channel else [None] * len(b.output(index).shape), index, synced=[n])


@rule("aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    n, c = b.loop("batch", shape[0]), b.loop("channels", shape[1])
    x: list[Label] = [n, c] + [None] * (len(shape) - 2)
    b.read(b.arg(0), x)
    for index in (1, 2, 3, 4):
        b.read(b.arg(index), [c])
    b.write(x)


@rule(
    "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten._log_softmax.default",
    "aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default",
)  # fmt: skip
def along_one_dim(b: Builder) -> None:
    shape = b.tensor(b.arg(0)).shape
    dim = b.arg(1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.write(labels)
    # Summing into integers truncates every summand.
    b.linear = b.op.target == "aten.cumsum.default" and b.output().dtype in FLOATING


def _reduced(b: Builder, dims: int | Sequence[int] | None, keepdim: bool, *, contracted: bool) -> None:
    shape = b.tensor(b.arg(0)).shape
    if dims is None or dims == [] or dims == ():
        reduced = set(range(len(shape)))
    else:
        reduced = {d % len(shape) for d in (dims if isinstance(dims, Sequence) else [dims])}
    labels: list[Label] = [
        b.loop(f"d{i}", s, splittable=contracted or i not in reduced) for i, s in enumerate(shape)
    ]
    b.read(b.arg(0), labels)
    after: list[Label] = []
    for i, label in enumerate(labels):
        if i not in reduced:
            after.append(label)
        elif keepdim:
            after.append(None)
    for index in range(len(b.op.outputs)):
        b.write(after, index)


@rule("aten.sum.default", "aten.mean.default")
def full_sum(b: Builder) -> None:
    _reduced(b, None, False, contracted=True)
    b.linear = b.cheap = True


@rule("aten.sum.dim_IntList", "aten.mean.dim")
def dim_sum(b: Builder) -> None:
    _reduced(b, b.arg(1, "dim"), b.arg(2, "keepdim", False), contracted=True)
    b.linear = b.cheap = True


_ORDERING = {"aten.topk.default": 2, "aten.sort.default": 1, "aten.sort.stable": 2}
"""Position of the dim among the arguments."""


@rule(
    "aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim", "aten.argmax.default",
    "aten.argmin.default", "aten.any.dim", "aten.all.dim", "aten.logsumexp.default", "aten.prod.dim_int",
    "aten.topk.default", "aten.sort.default", "aten.sort.stable",
)  # fmt: skip
def dim_reduction(b: Builder) -> None:
    if b.op.target in _ORDERING:
        shape = b.tensor(b.arg(0)).shape
        dim = b.arg(_ORDERING[b.op.target], "dim", -1) % len(shape)
        labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
        b.read(b.arg(0), labels)
        for i in range(len(b.op.outputs)):
            b.write(labels, i)
        return
    _reduced(b, b.arg(1, "dim"), b.arg(2, "keepdim", False), contracted=False)


@rule("aten.linalg_vector_norm.default")
def vector_norm(b: Builder) -> None:
    _reduced(b, b.arg(2, "dim"), b.arg(3, "keepdim", False), contracted=False)


@rule("aten.cosine_similarity.default")
def cosine_similarity(b: Builder) -> None:
    """Dims other than the one that is compared split."""
    shape = b.tensor(b.arg(0)).shape
    if b.tensor(b.arg(1)).shape != shape:
        raise Opaque(b.op.name)
    dim = b.arg(2, "dim", 1) % len(shape)
    labels: list[Label] = [b.loop(f"d{i}", s) if i != dim else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    b.read(b.arg(1), labels)
    b.write([label for i, label in enumerate(labels) if i != dim])


@rule("aten.cdist.default")
def distances(b: Builder) -> None:
    """``y[..., p, r] = |x[..., p, :] - z[..., r, :]|``."""
    x, z = b.tensor(b.arg(0)).shape, b.tensor(b.arg(1)).shape
    if x[:-2] != z[:-2]:
        raise Opaque(b.op.name)
    lead, p, r = b.loops(x[:-2], "batch"), b.loop("left", x[-2]), b.loop("right", z[-2])
    b.read(b.arg(0), [*lead, p, None])
    b.read(b.arg(1), [*lead, r, None])
    b.write([*lead, p, r])


@rule("aten.pixel_shuffle.default", "aten.pixel_unshuffle.default")
def pixel_shuffle(b: Builder) -> None:
    """``[..., c * r * r, h, w] <-> [..., c, h * r, w * r]``: the factors are inner atoms on both sides."""
    before, after = b.tensor(b.arg(0)).shape, b.output().shape
    low, high = (before, after) if "unshuffle" not in b.op.target else (after, before)
    lead = b.loops(before[:-3])
    c, h, w = b.loop("channels", high[-3]), b.loop("rows", low[-2]), b.loop("columns", low[-1])
    r = high[-2] // low[-2]
    above, beside = b.loop("above", r, splittable=False), b.loop("beside", r, splittable=False)
    coarse: list[Label] = [*lead, (c, above, beside), h, w]
    fine: list[Label] = [*lead, c, (h, above), (w, beside)]
    b.read(b.arg(0), coarse if low is before else fine)
    b.write(fine if low is before else coarse)
    b.linear = True


@rule("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim")
def variance(b: Builder) -> None:
    _reduced(b, b.arg(1, "dim"), b.arg(3, "keepdim", b.op.kwargs.get("keepdim", False)), contracted=False)


@rule(
    *(f"aten.{kind}_pool{d}d.default" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)),
    *(
        f"aten.{kind}.{overload}"
        for kind in (
            *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
            *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        )
        for overload in ("vec", "default")
    ),
    "aten.adaptive_max_pool2d.default",
    "aten.max_pool2d_with_indices.default",
    "aten._adaptive_avg_pool2d.default",
)
def pooling(b: Builder) -> None:
    """Batch and channels split; windows keep spatial dims whole."""
    shape = b.tensor(b.arg(0)).shape
    spatial = next((d for d in (1, 3) if f"{d}d." in b.op.target), 2)
    lead = len(shape) - spatial
    if lead < 1 or b.output().shape[:lead] != shape[:lead]:
        raise Opaque(b.op.name)
    labels: list[Label] = [b.loop(f"d{i}", s) if i < lead else None for i, s in enumerate(shape)]
    b.read(b.arg(0), labels)
    for index in range(len(b.op.outputs)):
        b.write(labels, index)
