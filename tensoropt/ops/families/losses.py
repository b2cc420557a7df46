"""Losses: splits of rows give partial sums, classes may be split, and a mean uses the whole batch's count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.graph import FLOATING, Operator, OperatorGraph, Ref, iter_refs
from tensoropt.ops import calls
from tensoropt.ops.index_space import Builder, Opaque, alike
from tensoropt.ops.kernels import ShardContext, start_of
from tensoropt.ops.overloads import resolve_overload

_NONE, _MEAN, _SUM = 0, 1, 2
"""The values of ``at::Reduction``."""
_REDUCTION = {
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.hinge_embedding_loss.default": 3,
    "aten.poisson_nll_loss.default": 5,
} | dict.fromkeys(
    (f"aten.{name}_loss.default" for name in ("mse", "l1", "smooth_l1", "huber", "soft_margin")), 2
) | {"aten.kl_div.default": 2}  # fmt: skip
"""Element-wise loss -> position of its argument ``reduction``."""


# -- index spaces ---------------------------------------------------------------------------------


@alike("ignore_index label_smoothing")
def _cross_entropy(b: Builder) -> None:
    """Allow splits of classes, and of rows with partial sums; a mean divides by the whole batch's count."""
    logits, target, weight = b.arg(0), b.arg(1), b.arg(2, "weight")
    reduction = b.arg(3, "reduction", 1)
    shape, labels_shape = b.tensor(logits).shape, b.tensor(target).shape
    if len(shape) == 1 or (weight is not None and b.tensor(weight).requires_grad):
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    if shape == labels_shape:
        # Targets are probabilities: a row needs all of its classes.
        b.read(logits, [rows[0], None, *rows[1:]])
        b.read(target, [rows[0], None, *rows[1:]])
        b.write([] if reduction else rows)
        return
    classes = b.loop("classes", shape[1], uneven=True, blocks=True)
    b.read(logits, [rows[0], classes, *rows[1:]])
    b.read(target, rows)
    b.write([] if reduction else rows, synced=[classes])


@alike("ignore_index")
def _nll_loss(b: Builder) -> None:
    """Allow splits of rows with partial sums; classes stay whole, because each row looks up one class."""
    inputs, target = b.arg(0), b.arg(1)
    shape = b.tensor(inputs).shape
    if len(shape) == 1:
        raise Opaque(b.op.name)
    rows = [b.loop(f"d{i}", s) for i, s in enumerate(shape) if i != 1]
    b.read(inputs, [rows[0], None, *rows[1:]])
    b.read(target, rows)
    b.write([] if b.arg(3, "reduction", 1) else rows)


@alike("beta delta full log_input log_target margin")
def _elementwise_loss(b: Builder) -> None:
    """Allow splits of every dim of input and target; weights of elements or classes broadcast to them."""
    x, position = b.tensor(b.arg(0)).shape, _REDUCTION[b.op.target]
    if x != b.tensor(b.arg(1)).shape:
        raise Opaque(b.op.name)
    loops = b.around(())
    b.read(b.arg(1), loops)
    weights = (b.arg(2, "weight"), b.arg(3, "pos_weight")) if "cross_entropy" in b.op.target else ()
    for weight in weights:
        if isinstance(weight, Ref):
            b.read(weight, loops[len(loops) - len(b.tensor(weight).shape) :])
    b.write([] if b.arg(position, "reduction", 1) else loops)


# -- calls of one shard ---------------------------------------------------------------------------


def _local_elementwise_loss(shard: calls.OperatorShard, call: calls.LocalCall) -> calls.LocalCall:
    position = _REDUCTION[shard.op.target]
    if shard.argument(position, "reduction", _MEAN) != _MEAN or not shard.split(shard.space.reads[0].loops):
        return call
    count = shard.atoms.graph.tensors[shard.op.inputs()[0]].elements
    return _summed(call, position, count)


def _summed(call: calls.LocalCall, position: int, count: int) -> calls.LocalCall:
    """Replace a mean with a sum divided by ``count``, the number of terms on all ranks.

    Args:
        position: position of the argument ``reduction``.
    """
    function: Any = resolve_overload(call.function)
    kwargs = dict(call.kwargs)
    # By position up to the reduction, because `target` is also the name of an argument of the kernel.
    arguments = [kwargs.pop(a.name, a.default_value) for a in function._schema.arguments[: position + 1]]
    args = (*call.args, *arguments[len(call.args) :])
    args = (*args[:position], _SUM, *args[position + 1 :])
    return replace(
        call, function="kernels.mean_as_sum", static=(call.function, count), args=args, kwargs=kwargs
    )


def _mass_collective(shard: calls.OperatorShard, axes: tuple[int, ...]) -> tuple[calls.InnerCollective, ...]:
    # If one of the axes is that of micro-batches, the engine has counted everything before the step
    # (engine/engine.py).
    if not is_mean(shard.op) or not axes or calls.MICRO_AXIS in axes:
        return ()
    weight = shard.argument(2, "weight", None)
    # A count is one int64, a weighted sum is one number of the weights' type.
    size = 8 if weight is None else shard.atoms.graph.tensors[weight.name].element_bytes
    return (calls.InnerCollective("all_reduce", axes, size, count=True),)


def _local_cross_entropy(shard: calls.OperatorShard, call: calls.LocalCall) -> calls.LocalCall:
    logits = shard.space.reads[0]
    classes = shard.loop_named("classes")
    class_axes = shard.split(classes)
    row_axes = shard.split([loop for loop in logits.loops if loop not in classes])
    if not class_axes and not row_axes:
        return call
    target = shard.atoms.graph.tensors[shard.space.reads[1].tensor]
    if target.dtype in FLOATING:
        # Targets are probabilities: none is ignored, so the count is known.
        rows = target.elements // target.shape[1]
        return _summed(call, 3, rows) if is_mean(shard.op) else call
    tensor = shard.atoms.graph.tensors[logits.tensor]
    collectives: tuple[calls.InnerCollective, ...] = ()
    if class_axes:
        rows = prod(size for dim, size in enumerate(shard.read_shape(0)) if dim != 1)
        row_bytes = rows * tensor.element_bytes
        collectives = (
            calls.InnerCollective("all_reduce", class_axes, row_bytes),
            calls.InnerCollective("all_reduce", class_axes, 2 * row_bytes),
        )
    collectives += _mass_collective(shard, row_axes)
    static = (row_axes, class_axes, shard.steps(tensor.shape[1], class_axes), tensor.shape[1])
    return calls.LocalCall(
        "loss_kernels.cross_entropy", call.args, call.kwargs, call.name, static, collectives
    )


def _local_nll_loss(shard: calls.OperatorShard, call: calls.LocalCall) -> calls.LocalCall:
    row_axes = shard.split(shard.space.reads[1].loops)
    if not row_axes:
        return call
    collectives = _mass_collective(shard, row_axes)
    return calls.LocalCall(
        "loss_kernels.nll_loss", call.args, call.kwargs, call.name, (row_axes,), collectives
    )


# -- kernels --------------------------------------------------------------------------------------


def is_mean(op: Operator) -> bool:
    """Return whether a cross entropy or negative log likelihood is a mean over its targets."""
    # Position 3 in both.
    return bool((op.args[3] if len(op.args) > 3 else op.kwargs.get("reduction", _MEAN)) == _MEAN)


def target_mass(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Return the divisor of a mean: the number of targets that are not ignored, or their weights' sum."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    # An ignored target (-100) is not an index: class 0 is looked up in its place and does not count.
    return (weight[target.where(counted, 0)] * counted).sum()


def _over_whole_batch(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    summed: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
) -> torch.Tensor:
    mass = target_mass(target, weight, ignore_index)
    return summed / (context.total(name, mass, row_axes) if row_axes else mass).to(summed.dtype)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of every row, for logits ``[rows, classes, ...]`` whose classes are split over ``axes``.

    A row's loss is ``mass * logsumexp(x) - sum_c share_c x_c``, where ``share`` is the target's (smoothed,
    weighted) distribution and ``mass`` its sum. Forward has two all-reduces: of the maximum, then of
    exponentials and weighted logits. Backward, ``mass * softmax - share``, has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        context: ShardContext,
        axes: tuple[int, ...],
        steps: int | tuple[int, ...],
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        local = logits.shape[1]
        # The maximum over all classes keeps exponentials in range, whichever rank has it.
        top = context.all_reduce(logits.amax(1), axes, "max")
        shifted = logits - top.unsqueeze(1)
        start = start_of(context, axes, steps)
        valid = target != ignore_index
        inside = (target >= start) & (target < start + local)
        # Targets of other ranks look up any row of this one; `inside` zeroes the results.
        position = (target - start).clamp(0, local - 1).unsqueeze(1)
        on_target: Any = 1.0 - smoothing
        if weight is not None:
            on_target = on_target * weight[target.where(valid, 0)]
        shared = shifted.gather(1, position).squeeze(1) * inside * on_target
        mass: Any = 1.0 if weight is None else on_target
        everywhere = None
        if smoothing:
            all_weights = logits.new_ones(classes) if weight is None else weight
            everywhere = all_weights[start : start + local] * (smoothing / classes)
            everywhere = everywhere.view(-1, *(1,) * (logits.dim() - 2))
            shared = shared + (shifted * everywhere).sum(1)
            if weight is not None:
                mass = on_target + weight.sum() * (smoothing / classes)
        weights = shifted.exp_()  # in place, because there are as many as logits
        # Both sums in one collective, which saves one wait.
        both = context.all_reduce(torch.stack([weights.sum(1), shared]), axes)
        losses = (mass * both[0].log() - both[1]) * valid
        ctx.save_for_backward(weights.div_(both[0].unsqueeze(1)), position, inside * on_target, valid)
        ctx.everywhere, ctx.mass = everywhere, mass
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        softmax, position, on_target, valid = ctx.saved_tensors
        mass = ctx.mass.unsqueeze(1) if isinstance(ctx.mass, torch.Tensor) else ctx.mass
        # No collective: the softmax contains the sums of forward.
        result = softmax * mass
        result.scatter_add_(1, position, -on_target.to(result.dtype).unsqueeze(1))
        if ctx.everywhere is not None:
            result -= ctx.everywhere
        return result * (grad * valid).unsqueeze(1), *(None,) * 8


def cross_entropy_kernel(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    class_axes: tuple[int, ...],
    steps: int | tuple[int, ...],
    classes: int,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the cross entropy of a shard: rows split over ``row_axes``, classes over ``class_axes``.

    Args:
        steps: distance between the starts of shards of classes.
        classes: number of all classes.
        logits: ``[rows, local classes,...]``.
        target: number of each row's class.
        weight: weights of all classes, unsplit.
    """
    if class_axes:
        losses = _SplitCrossEntropy.apply(
            *(logits, target, weight, context, class_axes, steps, classes, ignore_index, label_smoothing)
        )
        summed = losses if reduction == _NONE else losses.sum()
    else:
        kind = "none" if reduction == _NONE else "sum"
        summed = F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=kind, label_smoothing=label_smoothing
        )
    if reduction != _MEAN:
        return summed
    return _over_whole_batch(context, name, row_axes, summed, target, weight, ignore_index)


def _nll_loss_kernel(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    inputs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    kind = "none" if reduction == _NONE else "sum"
    summed = F.nll_loss(inputs, target, weight, ignore_index=ignore_index, reduction=kind)
    if reduction != _MEAN:
        return summed
    return _over_whole_batch(context, name, row_axes, summed, target, weight, ignore_index)


# -- random operands ------------------------------------------------------------------------------


def _classes(args: tuple[Any, ...], shape: calls.Shape) -> Iterator[tuple[str, tuple[int, int]]]:
    yield args[1].name, (0, shape(args[0])[:2][-1])


def _ignore_some(
    op: Operator, graph: OperatorGraph, values: dict[str, torch.Tensor], generator: torch.Generator
) -> None:
    """Mark some targets as ignored, unevenly over the rows, so that shards have different means."""
    (name,) = iter_refs(op.args[1])
    if graph.tensors[name].dtype in FLOATING:
        return
    ignored = op.args[4] if len(op.args) > 4 else op.kwargs.get("ignore_index", -100)
    target = values[name]
    # From none of the first rows to most of the last, so that shards have clearly different counts.
    ramp = torch.linspace(0.0, 0.7, max(target.numel(), 1)).view(target.shape)
    values[name] = target.masked_fill(torch.rand(target.shape, generator=generator) < ramp, ignored)


_TARGETS = calls.Samples(limits=_classes, adjust=_ignore_some)


_WITHOUT_RULE = (
    "nll_loss2d", "ctc_loss", "cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss",
    "multi_margin_loss",
)  # fmt: skip
_over_targets = partial(
    calls.aten,
    samples=_TARGETS,
    cost_class=calls.CostClass.LOSS,
    precision=calls.Precision.WIDE,
    counted_targets=True,
)
_elementwise = partial(calls.aten, rule=_elementwise_loss, localiser=_local_elementwise_loss)

SPECS = (
    _over_targets(
        "cross_entropy_loss.default",
        _cross_entropy,
        localiser=_local_cross_entropy,
        kernels={"loss_kernels.cross_entropy": cross_entropy_kernel},
    ),
    _over_targets(
        "nll_loss_nd.default nll_loss.default",
        _nll_loss,
        localiser=_local_nll_loss,
        kernels={"loss_kernels.nll_loss": _nll_loss_kernel},
    ),
    _elementwise("mse_loss.default", cost_class=calls.CostClass.LOSS, precision=calls.Precision.WIDE),
    _elementwise(
        "binary_cross_entropy.default",
        samples=calls.Samples(domains={0: calls.Domain.UNIT, 1: calls.Domain.UNIT}),
        precision=calls.Precision.WIDE,
    ),
    _elementwise(
        "binary_cross_entropy_with_logits.default poisson_nll_loss.default l1_loss.default "
        "smooth_l1_loss.default huber_loss.default soft_margin_loss.default kl_div.default",
        precision=calls.Precision.WIDE,
    ),
    _elementwise("hinge_embedding_loss.default"),
    calls.OpSpec(without_rule=_WITHOUT_RULE, precision=calls.Precision.WIDE),
)
