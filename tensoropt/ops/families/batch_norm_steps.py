"""A batch norm in three steps: sums of each piece of a batch, statistics of the batch, normalised pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tensoropt.graph import Operator, Ref, Tensor
from tensoropt.ops.calls import CostClass, LocalCall, OpSpec, Samples
from tensoropt.ops.families.norms import BATCH_NORM, by_channel, moved_statistics, normalised, statistics_of
from tensoropt.ops.index_space import Builder
from tensoropt.ops.kernels import ShardContext

_SUMS, _STATISTICS = "kernels.batch_norm_sums", "kernels.batch_norm_statistics"
_BY_STATISTICS = "kernels.batch_norm_by_statistics"


class BatchNormSteps(NamedTuple):
    """A batch norm as three operators, so that devices with pieces of a batch exchange only sums.

    Attributes:
        sums: operator that sums a piece's values and squares.
        statistics: operator that computes the batch's mean and variance, and the new running statistics.
        normalised: operator that computes the result, under the batch norm's name.
        tensors: results of ``sums`` and ``statistics``, each of shape (2, channels).
    """

    sums: Operator
    statistics: Operator
    normalised: Operator
    tensors: tuple[Tensor, Tensor]


def batch_norm_steps(op: Operator, tensors: Mapping[str, Tensor]) -> BatchNormSteps | None:
    """Return a training batch norm as three steps, without its saved statistics; None for other operators."""
    if op.target != BATCH_NORM or op.args[5] is not True:
        return None
    x, weight, bias, running_mean, running_var, _, momentum, eps = op.args
    read, learns = tensors[x.name], tensors[x.name].requires_grad
    shape = (2, read.shape[1])
    wide = "float64" if tensors[running_mean.name].dtype == "float64" else "float32"
    sums = Tensor(f"{op.name} sums", shape, "float64", "activation", learns)
    statistics = Tensor(f"{op.name} statistics", shape, wide, "activation", learns)
    count = read.elements // read.shape[1]
    running = (running_mean, running_var, momentum, count)
    return BatchNormSteps(
        replace(op, name=sums.name, target=_SUMS, args=(x, True), outputs=(sums.name,)),
        replace(
            op,
            name=statistics.name,
            target=_STATISTICS,
            args=(Ref(sums.name), *running, True),
            outputs=(statistics.name, *op.outputs[3:]),
        ),
        replace(
            op,
            target=_BY_STATISTICS,
            args=(x, Ref(statistics.name), weight, bias, eps),
            outputs=op.outputs[:1],
        ),
        (sums, statistics),
    )


def steps_before(op: Operator, producer: Mapping[str, Operator]) -> tuple[Operator, Operator] | None:
    """Return the operators for sums and statistics that precede ``op``, the last of the three operators of a
    batch norm. Return None if ``op`` is not such an operator. ``producer``: tensor -> its operator."""
    if op.target != _BY_STATISTICS:
        return None
    statistics = producer[op.args[1].name]
    return producer[statistics.args[0].name], statistics


# -- index spaces ---------------------------------------------------------------------------------


def _batch_norm_sums(b: Builder) -> None:
    """Allow splits of channels and of the batch; ranks that split the batch get partial sums."""
    shape = b.tensor(b.arg(0)).shape
    n, c = b.loop("batch", shape[0]), b.loop("channels", shape[1])
    b.read(b.arg(0), [n, c] + [None] * (len(shape) - 2))
    b.write([None, c])


def _batch_norm_statistics(b: Builder) -> None:
    c = b.loop("channels", b.tensor(b.arg(0)).shape[1])
    b.read(b.arg(0), [None, c])
    for index in (1, 2):
        b.read(b.arg(index), [c])
    b.write([None, c])
    for index in (1, 2):
        b.write([c], index)


def _batch_norm_by_statistics(b: Builder) -> None:
    _, c = by_channel(b, 2, 3)
    b.read(b.arg(1), [None, c])


# -- kernels --------------------------------------------------------------------------------------


class _Sums(torch.autograd.Function):
    """The sums per channel of a piece's values and of their squares, in float64.

    They are computed from the piece's mean and variance, which avoids cancellation (Chan, Golub and LeVeque,
    *Updating Formulae and a Pairwise Algorithm for Computing Sample Variances*, 1979).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        mean, var = statistics_of(x)
        ctx.save_for_backward(x, mean)
        sums = torch.stack((mean, var)).double()
        sums[1].addcmul_(sums[0], sums[0])
        return sums.mul_(x.numel() // x.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, mean = ctx.saved_tensors
        # Around the mean, as far from it the two terms of grad[0] + 2 x grad[1] cancel. A norm with these
        # numbers as its parameters and statistics is one kernel, which needs no wide copy of the input.
        slope = 2 * grad[1]
        at_mean = (grad[0] + slope * mean).to(mean.dtype)
        return normalised(x, slope.to(mean.dtype), at_mean, mean, torch.ones_like(mean), 0.0)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        moments = sums / count
        mean, var = moments
        # Below 0 only by rounding, which may be more than eps where values are far from 0.
        var.addcmul_(mean, mean, value=-1).clamp_(min=0)
        ctx.save_for_backward(moments)
        ctx.count = count
        return moments.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (moments,) = ctx.saved_tensors
        of_sums = grad.double() / ctx.count
        of_sums[0].addcmul_(moments[0], of_sums[1], value=-2)
        return of_sums, None, None


class _ByStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        statistics: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, statistics, weight)
        ctx.eps, ctx.has = eps, (weight is not None, bias is not None)
        mean, var = statistics
        return normalised(x, weight, bias, mean, var, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, statistics, weight = ctx.saved_tensors
        mean, var = statistics
        has_weight, has_bias = ctx.has
        # The statistics need the gradients of parameters even where there are none.
        weight = weight.to(mean.dtype) if has_weight else torch.ones_like(mean)
        inverse = torch.rsqrt(var + ctx.eps)
        gx, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, mean, inverse, False, ctx.eps, [ctx.needs_input_grad[0], True, True]
        )
        of_statistics = -inverse * weight * torch.stack((of_bias, 0.5 * inverse * of_weight))
        # Autograd casts the gradients of parameters to their type.
        return gx, of_statistics, of_weight if has_weight else None, of_bias if has_bias else None, None


def batch_norm_sums(context: ShardContext, name: str, x: torch.Tensor, training: bool) -> torch.Tensor:
    """Return the sums of ``x`` and of its squares, ``(2, channels)`` in float64; zeros in eval mode."""
    if not training:
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    sums: torch.Tensor = _Sums.apply(x)
    return sums


def batch_norm_statistics(
    context: ShardContext,
    name: str,
    sums: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    count: int,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (mean and variance as ``(2, channels)``, new running mean, new running variance).

    Args:
        count: number of values per channel in the whole batch.
    """
    dtype = torch.promote_types(running_mean.dtype, torch.float32)
    if not training:
        return torch.stack((running_mean, running_var)).to(dtype), running_mean, running_var
    statistics = _Statistics.apply(sums, count, dtype)
    mean, var = statistics.detach()
    return statistics, *moved_statistics(running_mean, running_var, mean, var, momentum, count)


def batch_norm_by_statistics(
    context: ShardContext,
    name: str,
    x: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return ``x`` normalised by the batch's mean and variance (``statistics``, of shape (2, channels))."""
    result: torch.Tensor = _ByStatistics.apply(x, statistics, weight, bias, eps)
    return result


def _evaluated_step(op: Operator, call: LocalCall) -> LocalCall:
    return replace(call, args=(*call.args[:-1], False))


_VARIANCES = Samples(positive=True)

SPECS = (
    OpSpec(
        targets=(_SUMS,),
        rule=_batch_norm_sums,
        kernels={_SUMS: batch_norm_sums},
        cost_class=CostClass.NORM,
        evaluated=_evaluated_step,
    ),
    OpSpec(
        targets=(_STATISTICS,),
        rule=_batch_norm_statistics,
        kernels={_STATISTICS: batch_norm_statistics},
        samples=_VARIANCES,
        evaluated=_evaluated_step,
    ),
    OpSpec(
        targets=(_BY_STATISTICS,),
        rule=_batch_norm_by_statistics,
        kernels={_BY_STATISTICS: batch_norm_by_statistics},
        samples=_VARIANCES,
        cost_class=CostClass.NORM,
    ),
)
