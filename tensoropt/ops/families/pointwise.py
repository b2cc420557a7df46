"""Element-wise operators: every dim of the output is a loop; operands broadcast to it."""

from __future__ import annotations

from tensoropt.graph import Ref, iter_refs
from tensoropt.ops.calls import Precision, Samples, aten
from tensoropt.ops.index_space import Builder, alike

_PLAIN = """
    abs.default atan.default bitwise_not.default ceil.default clamp.default clamp.Tensor clamp_max.default
    clamp_min.default cos.default celu.default elu.default erf.default erfc.default floor.default
    gelu.default hardsigmoid.default hardswish.default hardtanh.default isinf.default isnan.default
    leaky_relu.default log_sigmoid.default logical_not.default mish.default nan_to_num.default relu.default
    relu6.default round.default selu.default sigmoid.default sign.default silu.default sin.default
    softplus.default square.default tanh.default threshold.default trunc.default zeros_like.default
    ones_like.default full_like.default mul.Tensor mul.Scalar add.Scalar sub.Scalar real.default
    imag.default maximum.default minimum.default where.self where.ScalarOther where.ScalarSelf where.Scalar
    masked_fill.Scalar masked_fill.Tensor eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor
    le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_or.Tensor bitwise_and.Scalar bitwise_or.Scalar
    __and__.Tensor __or__.Tensor __and__.Scalar __or__.Scalar addcmul.default lerp.Scalar lerp.Tensor
    atan2.default fill.Scalar rsub.Scalar multiply.Tensor divide.Tensor true_divide.Tensor max.other
    min.other fmax.default fmin.default clamp_min.Tensor clamp_max.Tensor rsub.Tensor asinh.default
    acosh.default exp2.default erfinv.default lgamma.default digamma.default sgn.default signbit.default
    frac.default sinc.default i0.default isfinite.default isposinf.default isneginf.default deg2rad.default
    rad2deg.default bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    __lshift__.Scalar __rshift__.Scalar hypot.default logaddexp.default logaddexp2.default copysign.Tensor
    xlogy.Tensor heaviside.default softshrink.default hardshrink.default greater.Tensor less.Tensor
    greater_equal.Tensor less_equal.Tensor special_i0.default special_expit.default special_erf.default
    special_log_ndtr.default special_entr.default special_xlog1py.default absolute.default angle.default
    conj_physical.default polar.default complex.default not_equal.Tensor
"""
_POSITIVE = """
    logit.default reciprocal.default sqrt.default div.Tensor div.Tensor_mode div.Scalar remainder.Scalar
    remainder.Tensor floor_divide.default fmod.Scalar addcdiv.default atanh.default floor_divide.Scalar
    fmod.Tensor
"""
"""Operators that are well defined, or smooth, only for positive operands."""
_WIDE = """
    exp.default expm1.default tan.default asin.default sinh.default cosh.default
"""
"""Operators computed in float32 under mixed precision, as they amplify relative errors."""
_POSITIVE_AND_WIDE = """
    acos.default log.default log1p.default log2.default rsqrt.default pow.Tensor_Scalar pow.Scalar
    pow.Tensor_Tensor pow.Tensor_Scalar_out log10.default
"""


_SCALING = frozenset(
    f"aten.{name}"
    for name in ("multiply.Tensor", "divide.Tensor", "mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar")
)


def broadcast(b: Builder) -> None:
    """Describe an elementwise operator: one loop per output dim, to which operands broadcast."""
    shape = b.output().shape
    # Uneven cuts are allowed, but only apply if all tensors of the dim allow them (`_uneven_dims` in
    # atoms.py).
    loops = b.loops(shape, uneven=True)
    for name in dict.fromkeys(iter_refs((b.op.args, tuple(b.op.kwargs.values())))):
        rank = len(b.graph.tensors[name].shape)
        b.read(Ref(name), loops[len(loops) - rank :])
    b.write(loops)
    b.cheap = True


@alike("*")
def _pointwise(b: Builder) -> None:
    """Allow splits of every dim; the operator is linear only if it scales by a number."""
    broadcast(b)
    # Multiplying by a number is linear; a product of two activations is not jointly linear.
    scalar = isinstance(b.arg(1), (int, float))
    b.linear = b.op.target in _SCALING and scalar


@alike("*")
def _linear_pointwise(b: Builder) -> None:
    broadcast(b)
    b.linear = True


@alike("*")
def _addition(b: Builder) -> None:
    broadcast(b)
    # x + number is affine: a partial sum plus the number on every rank would count the number several times.
    b.linear = all(isinstance(a, Ref) for a in b.op.args[:2])


@alike("*")
def _cast(b: Builder) -> None:
    broadcast(b)
    source = b.tensor(b.arg(0))
    # A cast to a narrower type rounds, and the sum of rounded partial sums is not the rounded sum.
    b.linear = source.element_bytes <= b.output().element_bytes and source.dtype.startswith(
        ("float", "bfloat")
    )


def _prelu(b: Builder) -> None:
    shape, slopes = b.output().shape, b.tensor(b.arg(1)).shape
    loops = b.loops(shape)
    b.read(b.arg(0), loops)
    b.read(b.arg(1), [loops[1]] if slopes and slopes[0] > 1 else [None] * len(slopes))
    b.write(loops)
    b.cheap = True


SPECS = (
    aten(_PLAIN, _pointwise),
    aten(_POSITIVE, _pointwise, samples=Samples(positive=True)),
    aten(_WIDE, _pointwise, precision=Precision.WIDE),
    aten(_POSITIVE_AND_WIDE, _pointwise, samples=Samples(positive=True), precision=Precision.WIDE),
    aten("neg.default clone.default detach.default", _linear_pointwise),
    aten("add.Tensor sub.Tensor", _addition),
    aten("_to_copy.default to.dtype", _cast),
    aten("prelu.default", _prelu, precision=Precision.NARROW),
)

ELEMENT_WISE = frozenset(
    target
    for spec in SPECS
    if spec.rule in (_pointwise, _linear_pointwise, _addition)
    for target in spec.targets
)
"""Operators that compute each element from the same element of their operands."""
