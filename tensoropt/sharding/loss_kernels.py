"""Losses of a shard: classes may be split, and a mean divides by what counts in the whole batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.sharding.kernels import ShardContext

MEAN = 1
_REDUCTIONS = ("none", "mean", "sum")


def target_mass(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """What a mean over these targets divides by: how many are not ignored, or the sum of their weights."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
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
    """This shard's sum over the mass of all targets (a local mean would be wrong: gradients 10 % off)."""
    mass = target_mass(target, weight, ignore_index)
    return summed / (context.total(name, mass, row_axes) if row_axes else mass).to(summed.dtype)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of every row, of logits ``[rows, classes, ...]`` whose classes are split over ``axes``.

    A row's loss is ``mass * logsumexp(x) - sum_c share_c x_c``: ``share`` is how the target, smoothed and
    weighted, spreads over the classes, ``mass`` its sum, which every rank knows. Three reductions of one
    value per row: the maximum; the sum of exponentials and the shared logits together. Backward needs none:
    ``mass * softmax - share``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        context: ShardContext,
        axes: tuple[int, ...],
        step: int,
        classes: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        local = logits.shape[1]
        top = context.all_reduce(logits.amax(1), axes, "max")
        shifted = logits - top.unsqueeze(1)
        start = context.coordinate(axes) * step
        valid = target != ignore_index
        inside = (target >= start) & (target < start + local)
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
        weights = shifted.exp_()
        both = context.all_reduce(torch.stack([weights.sum(1), shared]), axes)
        losses = (mass * both[0].log() - both[1]) * valid
        ctx.save_for_backward(weights.div_(both[0].unsqueeze(1)), position, inside * on_target, valid)
        ctx.everywhere, ctx.mass = everywhere, mass
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        softmax, position, on_target, valid = ctx.saved_tensors
        mass = ctx.mass.unsqueeze(1) if isinstance(ctx.mass, torch.Tensor) else ctx.mass
        result = softmax * mass
        result.scatter_add_(1, position, -on_target.to(result.dtype).unsqueeze(1))
        if ctx.everywhere is not None:
            result -= ctx.everywhere
        return result * (grad * valid).unsqueeze(1), *(None,) * 8


def cross_entropy(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    class_axes: tuple[int, ...],
    step: int,
    classes: int,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of a shard: rows split over ``row_axes``, classes over ``class_axes``.

    Args:
        step, classes: the shard holds the classes from ``coordinate(class_axes) * step`` on, of ``classes``.
        logits: ``[rows, local classes, ...]``.
        target: class of each row.
        weight: of all classes, whole.
    """
    if class_axes:
        losses = _SplitCrossEntropy.apply(
            *(logits, target, weight, context, class_axes, step, classes, ignore_index, label_smoothing)
        )
        summed = losses if _REDUCTIONS[reduction] == "none" else losses.sum()
    else:
        kind = "none" if _REDUCTIONS[reduction] == "none" else "sum"
        summed = F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction=kind, label_smoothing=label_smoothing
        )
    if reduction != MEAN:
        return summed
    return _over_whole_batch(context, name, row_axes, summed, target, weight, ignore_index)


def nll_loss(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    inputs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Negative log likelihood of a shard of the rows."""
    kind = "none" if _REDUCTIONS[reduction] == "none" else "sum"
    summed = F.nll_loss(inputs, target, weight, ignore_index=ignore_index, reduction=kind)
    if reduction != MEAN:
        return summed
    return _over_whole_batch(context, name, row_axes, summed, target, weight, ignore_index)
