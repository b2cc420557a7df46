"""Norms: normalised dims stay whole; a batch norm uses the statistics of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensoropt.graph import DTYPE_BYTES, Operator
from tensoropt.ops import calls
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike
from tensoropt.ops.kernels import ShardContext

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""The operator of a batch norm in training, which returns the new running statistics as well."""

# -- index spaces ---------------------------------------------------------------------------------


def _layer_norm(b: Builder) -> None:
    rank = len(b.shape)
    b.along(*range(rank - len(b.arg(1)), rank))


def _weight_norm(b: Builder) -> None:
    """Describe ``w = g v / |v|``; only the dim along which each index has its own norm may be split."""
    dim = b.dim(2, "dim", 0)
    # Loops for the other dims, too: their atoms spread from the weight to its direction.
    labels: list[Loops] = [b.loop(f"d{i}", s, splittable=i == dim) for i, s in enumerate(b.shape)]
    b.read(b.arg(0), labels)
    b.read(b.arg(1), labels)
    b.write(labels)


def _group_norm(b: Builder) -> None:
    """Allow splits of batch and groups; the channels of a group stay together."""
    shape, groups = b.tensor(b.arg(0)).shape, b.arg(1)
    n = b.loop("batch", shape[0])
    g = b.loop("groups", groups)
    c = b.loop("channels", shape[1] // groups, splittable=False)
    x: list[Loops] = [n, (g, c), *[None] * (len(shape) - 2)]
    b.read(b.arg(0), x)
    b.read(b.arg(2, "weight"), [(g, c)])
    b.read(b.arg(3, "bias"), [(g, c)])
    b.write(x)


def by_channel(b: Builder, *parameters: int) -> tuple[int, int]:
    """Describe the first argument and the result: batch and channels may be split.

    Args:
        parameters: positions of arguments with one number per channel.

    Returns:
        The numbers of the loops over the batch and over channels.
    """
    shape = b.shape
    n, c = b.loop("batch", shape[0]), b.loop("channels", shape[1])
    x: list[Loops] = [n, c] + [None] * (len(shape) - 2)
    b.read(b.arg(0), x)
    for index in parameters:
        b.read(b.arg(index), [c])
    b.write(x)
    return n, c


@alike("use_input_stats")
def _instance_norm(b: Builder) -> None:
    """Allow splits of batch and channels, unless there are running statistics (left to discovery)."""
    if b.arg(3) is not None or b.arg(4) is not None:
        raise Opaque(b.op.name)
    by_channel(b, 1, 2)


def _batch_norm_training(b: Builder) -> None:
    """Allow splits of channels, and of the batch, over which the kernel synchronises the statistics."""
    if not b.arg(5):
        raise Opaque(b.op.name)
    n, c = by_channel(b, 1, 2, 3, 4)
    for index in range(1, len(b.op.outputs)):
        per_channel = b.output(index).shape == (b.shape[1],)
        b.write([c] if per_channel else [None] * len(b.output(index).shape), index, synced=[n])


@alike("training")
def _batch_norm_inference(b: Builder) -> None:
    by_channel(b, 1, 2, 3, 4)


# -- calls of one shard ---------------------------------------------------------------------------


def _local_group_norm(shard: calls.OperatorShard, call: calls.LocalCall) -> calls.LocalCall:
    channels = shard.atoms.graph.tensors[shard.op.inputs()[0]].shape[1]
    groups = call.args[1] * shard.read_shape(0)[1] // channels
    return replace(call, args=(call.args[0], groups, *call.args[2:]))


def _local_batch_norm(shard: calls.OperatorShard, call: calls.LocalCall) -> calls.LocalCall:
    axes = tuple(a for a in shard.split(shard.loop_named("batch")) if a != calls.MICRO_AXIS)
    if not axes:
        return call
    x = shard.atoms.graph.tensors[shard.op.inputs()[0]]
    count = x.elements // x.shape[1]
    # Statistics are sent in at least float32, in which the kernel computes them.
    channels = shard.read_shape(0)[1] * max(x.element_bytes, DTYPE_BYTES["float32"])
    collectives = (
        calls.InnerCollective("all_reduce", axes, channels),
        calls.InnerCollective("all_reduce", axes, channels),
        calls.InnerCollective("all_reduce", axes, 2 * channels, backward=True),
    )
    return calls.LocalCall(
        "kernels.sync_batch_norm", call.args, call.kwargs, call.name, (axes, count), collectives
    )


def _evaluated_batch_norm(op: Operator, call: calls.LocalCall) -> calls.LocalCall:
    return calls.LocalCall(op.target, (*op.args[:5], False, *op.args[6:]), op.kwargs, call.name)


# -- kernels --------------------------------------------------------------------------------------


def statistics_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean, variance) per channel of a rank's rows, in float32 or wider, from one pass."""
    # Without running statistics the CPU's kernel computes in the input's type.
    running = x.new_zeros((2, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
    found: tuple[Tensor, Tensor] = torch.ops.aten.batch_norm_update_stats(x, *running, 0.0)
    return found


def normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Return ``x`` normalised by ``mean`` and ``var``; weight and bias are cast to the dtype of ``mean``."""
    weight, bias = (None if of is None else of.to(mean.dtype) for of in (weight, bias))
    result: Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        x, weight, bias, mean, var, 0.0, eps
    )[0]
    return result


class _SyncBatchNorm(torch.autograd.Function):
    """Batch norm of a batch split over ``axes``, with the whole batch's statistics in forward and backward.

    On GPUs, backward uses a kernel of PyTorch's ``SyncBatchNorm``. Statistics are float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        context: ShardContext,
        axes: tuple[int, ...],
        count: int,
        eps: float,
    ) -> Any:
        own_mean, own_var = statistics_of(x)
        share = x.numel() // x.shape[1] / count
        # First the mean, then the squares of the deviations from it, because the mean of squares minus the
        # square of the mean cancels.
        mean = context.all_reduce(own_mean * share, axes)
        var = context.all_reduce((own_mean - mean).square_().add_(own_var).mul_(share), axes)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.context, ctx.axes, ctx.count, ctx.has_bias = context, axes, count, bias is not None
        ctx.mark_non_differentiable(mean, inverse, var)
        return normalised(x, weight, bias, mean, var, eps), mean, inverse, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        x, weight, mean, inverse = ctx.saved_tensors
        wide = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # The gradients of weight and bias from this rank's rows; every row's gradient needs their totals.
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, wide, None, None, mean, inverse, True, 0.0, [False, True, True]
        )
        total = ctx.context.all_reduce(torch.stack([of_bias, of_weight]), ctx.axes)
        return (
            _gradient(grad, x, wide, mean, inverse, total, ctx.count),
            None if weight is None else of_weight,
            # This rank's part: the layout sums the parameters' gradients, as everywhere.
            of_bias if ctx.has_bias else None,
            *(None,) * 4,
        )


def _gradient(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, total: Tensor, count: int
) -> Tensor:
    """Return the input's gradient; ``total`` has the whole batch's gradients of bias and weight, ``count`` is
    the number of values per channel in the whole batch."""
    if grad.is_cuda:
        counts = torch.full((1,), count, dtype=torch.int32, device=grad.device)
        result: Tensor = torch.ops.aten.batch_norm_backward_elemt(
            grad, x, mean, inverse, weight, total[0], total[1] / inverse, counts
        )
        return result
    # A norm with these numbers as its parameters, which needs no wide copy of the input, and one sum.
    scale, (of_bias, of_weight) = inverse * weight, total / count
    of_input = normalised(x, -of_weight * scale * inverse, -of_bias * scale, mean, torch.ones_like(mean), 0.0)
    return of_input.addcmul_(grad, scale.view([1, -1] + [1] * (x.dim() - 2)))


def _statistics_of(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape[1], dtype=wide), x.new_empty(x.shape[1], dtype=wide)


def _gradient_of(grad: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(grad)


_SHAPES = torch.library.Library("aten", "IMPL", "Meta")
"""Functions that return only shapes, for fake tensors, of PyTorch's kernels that lack them."""
_OF_KERNELS = {"batch_norm_update_stats": _statistics_of, "batch_norm_backward_elemt": _gradient_of}
for _name, _shapes in _OF_KERNELS.items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _SHAPES.impl(_name, _shapes)


def sync_batch_norm(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    count: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return (output, mean, inverse deviation, new running mean, new running variance) for a batch split over
    ``axes``, with ``count`` values per channel in the whole batch."""
    y, mean, inverse, var = _SyncBatchNorm.apply(x, weight, bias, context, axes, count, eps)
    return y, mean, inverse, *moved_statistics(running_mean, running_var, mean, var, momentum, count)


def moved_statistics(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float, count: int
) -> tuple[Tensor, Tensor]:
    # As in PyTorch: running variances are unbiased, the batch's own is not.
    unbiased = var * (count / max(count - 1, 1))
    new_mean = running_mean * (1 - momentum) + mean * momentum
    new_var = running_var * (1 - momentum) + unbiased * momentum
    return new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


_VARIANCES = calls.Samples(positive=True)

_norm = partial(calls.aten, cost_class=calls.CostClass.NORM, precision=calls.Precision.NARROW)

SPECS = (
    _norm("layer_norm.default rms_norm.default", _layer_norm),
    calls.aten(
        "native_layer_norm.default",
        _layer_norm,
        without_rule=("native_group_norm",),
        precision=calls.Precision.NARROW,
    ),
    _norm("group_norm.default", _group_norm, localiser=_local_group_norm, reads=2),
    calls.aten("instance_norm.default", _instance_norm),
    calls.OpSpec(
        targets=(BATCH_NORM,),
        rule=_batch_norm_training,
        localiser=_local_batch_norm,
        kernels={"kernels.sync_batch_norm": sync_batch_norm},
        samples=_VARIANCES,
        cost_class=calls.CostClass.NORM,
        reads=2,
        precision=calls.Precision.NARROW_INPUT,
        batch_statistics=True,
        evaluated=_evaluated_batch_norm,
    ),
    _norm("batch_norm.default", _batch_norm_inference, samples=_VARIANCES, batch_statistics=True),
    calls.OpSpec(
        # Running statistics are the same in every micro-batch.
        targets=("aten._native_batch_norm_legit_no_training.default",),
        rule=_batch_norm_inference,
        samples=_VARIANCES,
        precision=calls.Precision.NARROW_INPUT,
    ),
    calls.aten("_weight_norm.default", _weight_norm),
)
