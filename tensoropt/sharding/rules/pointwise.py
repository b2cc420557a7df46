"""Element-wise operators: every dim of the output is a loop; operands broadcast to it."""

from __future__ import annotations

from tensoropt.graph import Ref, iter_refs
from tensoropt.sharding.rules.registry import Builder, rule

_LINEAR = """
    neg.default clone.default
"""
_NONLINEAR = """
    abs.default acos.default atan.default bitwise_not.default ceil.default clamp.default clamp.Tensor
    clamp_max.default clamp_min.default cos.default celu.default elu.default erf.default erfc.default
    exp.default expm1.default floor.default gelu.default hardsigmoid.default hardswish.default
    hardtanh.default isinf.default isnan.default leaky_relu.default log.default log1p.default log2.default
    log_sigmoid.default logical_not.default logit.default mish.default nan_to_num.default reciprocal.default
    relu.default relu6.default round.default rsqrt.default selu.default sigmoid.default sign.default
    silu.default sin.default softplus.default sqrt.default square.default tan.default
    tanh.default threshold.default trunc.default zeros_like.default ones_like.default full_like.default
    pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor mul.Tensor div.Tensor div.Tensor_mode
    mul.Scalar div.Scalar add.Scalar sub.Scalar real.default imag.default
    remainder.Scalar remainder.Tensor floor_divide.default fmod.Scalar
    maximum.default minimum.default where.self where.ScalarOther where.ScalarSelf where.Scalar
    masked_fill.Scalar masked_fill.Tensor eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor
    le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and.default logical_or.default
    logical_xor.default bitwise_and.Tensor bitwise_or.Tensor bitwise_and.Scalar bitwise_or.Scalar
    __and__.Tensor __or__.Tensor __and__.Scalar __or__.Scalar addcmul.default addcdiv.default
    lerp.Scalar lerp.Tensor atan2.default fill.Scalar detach.default prelu.default rsub.Scalar
"""
_SCALING = frozenset({"aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"})


def _names(block: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" for name in block.split())


def broadcast(b: Builder) -> None:
    """One loop per output dim; an operand's dims align from the right."""
    shape = b.output().shape
    loops = [b.loop(f"d{i}", size, uneven=True) for i, size in enumerate(shape)]
    for name in dict.fromkeys(iter_refs((b.op.args, tuple(b.op.kwargs.values())))):
        rank = len(b.graph.tensors[name].shape)
        b.read(Ref(name), loops[len(loops) - rank :])
    b.write(loops)
    b.cheap = True


@rule(*_names(_NONLINEAR))
def pointwise(b: Builder) -> None:
    broadcast(b)
    # Multiplying by a number is linear; multiplying two activations is not linear in both jointly.
    scalar = len(b.op.args) > 1 and isinstance(b.op.args[1], (int, float))
    b.linear = b.op.target in _SCALING and scalar


@rule(*_names(_LINEAR))
def linear_pointwise(b: Builder) -> None:
    broadcast(b)
    b.linear = True


@rule("aten.add.Tensor", "aten.sub.Tensor")
def addition(b: Builder) -> None:
    broadcast(b)
    # x + number is affine: a partial sum plus the number on every rank would count it many times.
    b.linear = all(isinstance(a, Ref) for a in b.op.args[:2])


@rule("aten.dropout.default")
def dropout(b: Builder) -> None:
    """The mask depends on the global index only, so dropout is linear in its operand."""
    broadcast(b)
    b.linear = True


@rule("aten._to_copy.default", "aten.to.dtype")
def cast(b: Builder) -> None:
    broadcast(b)
    source = b.tensor(b.arg(0))
    # A cast to a narrower type rounds, and rounding partial sums is not rounding the sum.
    b.linear = source.element_bytes <= b.output().element_bytes and source.dtype.startswith(
        ("float", "bfloat")
    )
