"""Mixtures of experts: products with one weight matrix per group of rows."""

from __future__ import annotations

from tensoropt.sharding.rules.registry import Builder, Opaque, rule


@rule("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(b: Builder) -> None:
    """``y[r, n] = sum_k x[r, k] w[e(r), k, n]``, rows sorted by expert, ``offs[e]`` the end of expert ``e``.

    Splits over rows, output and input features (Megatron's pair inside every expert), and over experts:
    a sum of which every rank has the rows of its own experts, zeros elsewhere.
    """
    x, w, offs = b.arg(0), b.arg(1), b.arg(2, "offs")
    left, right = b.tensor(x).shape, b.tensor(w).shape
    if len(left) != 2 or len(right) != 3 or offs is None or b.arg(3, "bias") is not None:
        raise Opaque(b.op.name)
    r, k = b.loop("rows", left[0]), b.loop("in_features", left[1])
    e, n = b.loop("experts", right[0]), b.loop("out_features", right[2])
    b.read(x, [r, k])
    b.read(w, [e, k, n])
    b.read(offs, [None])
    b.write([r, n])


@rule("aten.histc.default", "aten.bincount.default")
def histogram(b: Builder) -> None:
    """Counts of a part of the values add up; the bins stay whole."""
    if len(b.op.inputs()) > 1 or len(b.output().shape) != 1:
        raise Opaque(b.op.name)
    b.read(b.arg(0), b.loops(b.tensor(b.arg(0)).shape))
    b.write([None])
