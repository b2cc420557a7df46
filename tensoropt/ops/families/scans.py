"""Operators along a dim that stays whole: softmax, cumulative sums, Fourier transforms."""

from __future__ import annotations

from tensoropt.graph import FLOATING
from tensoropt.ops.calls import CostClass, Precision, aten
from tensoropt.ops.index_space import Builder, Opaque, alike


def _along_one_dim(b: Builder) -> None:
    b.along(b.dim(1))
    # Summing into integers truncates every summand.
    b.linear = b.op.target == "aten.cumsum.default" and b.output().dtype in FLOATING


@alike("n s norm")
def _fourier(b: Builder) -> None:
    dims = b.arg(2, "dim")
    if dims is None:
        raise Opaque(b.op.name)
    b.along(*(d % max(len(b.shape), 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])))


SPECS = (
    aten("softmax.int log_softmax.int", _along_one_dim, cost_class=CostClass.NORM, precision=Precision.WIDE),
    # Autocast knows the call above it only: a kernel in 16 bits is called by this name.
    aten("_softmax.default", _along_one_dim, cost_class=CostClass.NORM),
    aten("_log_softmax.default cumsum.default cumprod.default", _along_one_dim, precision=Precision.WIDE),
    aten("logcumsumexp.default", _along_one_dim),
    aten("fft_fftn.default fft_fft2.default fft_fft.default fft_rfftn.default", _fourier),
)
