"""Local kernels: operators whose shard is more than the same call on smaller tensors.

Each takes a :class:`ShardContext` first: its rank's coordinates, and the collectives it needs inside.
The same functions run in the executor, under measurement and in the rule tests.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class ShardContext(Protocol):
    """What a local kernel may know about where it runs."""

    @property
    def seed(self) -> int: ...

    @property
    def step(self) -> int: ...

    def coordinate(self, axes: tuple[int, ...]) -> int:
        """This rank's index within the flattened group of ``axes`` (first axis outermost)."""
        ...

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        """``value`` reduced over the group of ``axes``; not differentiable."""
        ...

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        """A count summed over ``axes``, micro-batches included."""
        ...


class SingleDevice:
    """The context of an unsplit run, and of a measurement without neighbours."""

    def __init__(self, seed: int = 0, step: int = 0):
        self.seed = seed
        self.step = step

    def coordinate(self, axes: tuple[int, ...]) -> int:
        return 0

    def all_reduce(self, value: torch.Tensor, axes: tuple[int, ...], op: str = "sum") -> torch.Tensor:
        return value

    def total(self, name: str, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        return value


# -- dropout --------------------------------------------------------------------------------------


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _MIX = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9)


def _key(seed: int, step: int, name: str) -> int:
    state = 0xCBF29CE484222325  # FNV-1a over the operator's name, seed and step
    for byte in f"{name}/{seed}/{step}".encode():
        state = ((state ^ byte) * 0x100000001B3) % (1 << 64)
    return _signed(state)


def keep_mask(
    context: ShardContext,
    name: str,
    p: float,
    shape: tuple[int, ...],
    pieces: tuple[tuple[int, int, int, tuple[int, ...]], ...],
    device: torch.device,
) -> torch.Tensor:
    """Counter-based dropout mask: a hash of (seed, operator, step, global index).

    Args:
        p: probability of dropping.
        shape: local shape of the result.
        pieces: per atom (local size, global stride, shard step, axes): element ``i`` of this atom has
            the global index ``(coordinate(axes) * step + i) * stride``.

    Returns:
        bool tensor, True where the element is kept. Replicas agree, shards of one tensor differ, and
        the unsplit run gives the same mask.
    """
    state = _hashed(context, name, pieces, device)
    return (state.bitwise_and_(0xFFFFFF) >= int(p * (1 << 24))).reshape(shape)


def _hashed(context: ShardContext, name: str, pieces: Any, device: torch.device) -> torch.Tensor:
    """int64 hash of (seed, operator, step, global index) of every element, one dim per piece."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for position, (size, stride, step, axes) in enumerate(pieces):
        start = context.coordinate(axes) * step if axes else 0
        values = (torch.arange(size, dtype=torch.int64, device=device) + start) * stride
        index = index + values.view((size,) + (1,) * (len(pieces) - 1 - position))
    state = index.mul(_GOLDEN).add_(_key(context.seed, context.step, name))
    state.bitwise_xor_(state >> 29).mul_(_MIX)
    return state.bitwise_xor_(state >> 32)


def random(
    context: ShardContext,
    name: str,
    pieces: Any,
    kind: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    offset: float = 0.0,
    scale: float = 1.0,
    *_: Any,
) -> torch.Tensor:
    """``offset + scale * rand`` (or ``randn``, ``randint``) from a hash of the global index: replicas agree,
    shards differ.

    ``randn`` is Box and Muller's transform of two uniform numbers.
    """
    device = torch.get_default_device()

    def uniform(stream: str) -> torch.Tensor:
        return (_hashed(context, stream, pieces, device).bitwise_and_(0xFFFFFF).double() + 0.5) / (1 << 24)

    value = uniform(name)
    if kind == "randn":
        value = (-2.0 * value.log()).sqrt() * (2.0 * torch.pi * uniform(f"{name}/angle")).cos()
    value = (value * scale + offset).reshape(shape)
    return (value.floor() if kind == "randint" else value).to(dtype)


_SEEDING = threading.Lock()


def seeded(context: ShardContext, name: str, target: str, *args: Any, **kwargs: Any) -> Any:
    """An operator that draws random numbers itself, on all ranks from one seed: it is kept whole, and
    every rank must draw what the unsplit model draws."""
    namespace, packet, overload = target.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(_key(context.seed, context.step, name) & ((1 << 63) - 1))
        return function(*args, **kwargs)


def bernoulli(
    context: ShardContext, name: str, pieces: Any, x: torch.Tensor, p: float | None = None, *_: Any
) -> torch.Tensor:
    """1 with probability ``p`` (``x`` itself without one), as :func:`keep_mask` decides; no gradient."""
    if p is not None:
        return keep_mask(context, name, 1.0 - p, tuple(x.shape), pieces, x.device).to(x.dtype)
    state = _hashed(context, name, pieces, x.device).bitwise_and_(0xFFFFFF).reshape(x.shape)
    return (state < x.detach() * (1 << 24)).to(x.dtype)


class _MaskedScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x * mask * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.scale, None, None


def dropout(
    context: ShardContext, name: str, pieces: Any, x: torch.Tensor, p: float, *_: Any
) -> torch.Tensor:
    """Dropout with :func:`keep_mask`."""
    if p == 0.0:
        return x
    mask = keep_mask(context, name, p, tuple(x.shape), pieces, x.device)
    return _MaskedScale.apply(x, mask, 1.0 / (1.0 - p))


def attention_with_dropout(
    context: ShardContext,
    name: str,
    pieces: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention in its math form, so that the dropout of the weights can be counter-based.

    Shapes: ``q [..., h, s, d]``, ``k, v [..., h / group, t, d]``; weights ``[..., h, s, t]``.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.shape[-3] != q.shape[-3]:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = dropout(context, name, pieces, torch.softmax(scores, -1), p)
    return weights @ v


# -- lookups and losses ---------------------------------------------------------------------------


def vocabulary_embedding(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    step: int,
    weight: torch.Tensor,
    index: torch.Tensor,
    padding_idx: int = -1,
    *_: Any,
) -> torch.Tensor:
    """Rows of this rank's vocabulary shard, zeros for the others: a partial sum.

    Args:
        axes, step: the shard holds the rows from ``coordinate(axes) * step`` on.
        weight: ``[local vocabulary, hidden]``.
        index: any integer shape.
    """
    start = context.coordinate(axes) * step
    local = index - start
    inside = (local >= 0) & (local < weight.shape[0])
    padding = padding_idx - start if 0 <= padding_idx - start < weight.shape[0] else None
    rows = F.embedding(local.clamp(0, max(weight.shape[0] - 1, 0)), weight, padding_idx=padding)
    return rows * inside.unsqueeze(-1)


class _SplitCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of logits whose classes are split over ``axes``.

    Three reductions of one value per row: the maximum; the sum of exponentials and the target's
    logit together. Backward needs none: ``softmax - one_hot``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        context: ShardContext,
        axes: tuple[int, ...],
        step: int,
        ignore_index: int,
    ) -> torch.Tensor:
        top = context.all_reduce(logits.amax(1), axes, "max")
        weights = (logits - top.unsqueeze(1)).exp_()
        local = target - context.coordinate(axes) * step
        inside = (local >= 0) & (local < logits.shape[1])
        position = local.clamp(0, logits.shape[1] - 1).unsqueeze(1)
        picked = logits.gather(1, position).squeeze(1) * inside
        both = context.all_reduce(torch.stack([weights.sum(1), picked]), axes)
        valid = target != ignore_index
        losses = (both[0].log() + top - both[1]) * valid
        ctx.save_for_backward(weights.div_(both[0].unsqueeze(1)), position, inside, valid)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        softmax, position, inside, valid = ctx.saved_tensors
        result = softmax.scatter_add(1, position, -inside.to(softmax.dtype).unsqueeze(1))
        return result * (grad * valid).unsqueeze(1), None, None, None, None, None


def cross_entropy(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    class_axes: tuple[int, ...],
    step: int,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy of a shard: rows split over ``row_axes``, classes over ``class_axes``.

    A mean divides by the count of targets that are not ignored *in the whole batch* (a local mean
    would be wrong: gradients 10 % off), so the shards' results add up to the mean.
    """
    names = ("none", "mean", "sum")
    if class_axes:
        losses = _SplitCrossEntropy.apply(logits, target, context, class_axes, step, ignore_index)
        summed = losses if names[reduction] == "none" else losses.sum()
    else:
        kind = "none" if names[reduction] == "none" else "sum"
        summed = F.cross_entropy(
            logits, target, ignore_index=ignore_index, reduction=kind, label_smoothing=label_smoothing
        )
    if names[reduction] != "mean":
        return summed
    return summed / valid_count(context, name, row_axes, target, ignore_index).to(summed.dtype)


def valid_count(
    context: ShardContext, name: str, row_axes: tuple[int, ...], target: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """How many targets of the whole batch count."""
    count = (target != ignore_index).sum()
    return context.total(name, count, row_axes) if row_axes else count


def nll_loss(
    context: ShardContext,
    name: str,
    row_axes: tuple[int, ...],
    inputs: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Negative log likelihood of a shard of the rows, with the whole batch's count for a mean."""
    kind = "none" if reduction == 0 else "sum"
    summed = F.nll_loss(inputs, target, ignore_index=ignore_index, reduction=kind)
    if reduction != 1:
        return summed
    return summed / valid_count(context, name, row_axes, target, ignore_index).to(summed.dtype)


def mean_as_sum(
    context: ShardContext, name: str, target: str, count: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A mean over split dims: the sum (``target``) divided by the global count, so that shards add up."""
    namespace, packet, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)(*args, **kwargs) / count


def divided(
    context: ShardContext, name: str, target: str, parts: tuple[int, ...], *args: Any, **kwargs: Any
) -> Any:
    """The operator's results, each divided by how many parts of an average there are."""
    namespace, packet, overload = target.split(".")
    result = getattr(getattr(getattr(torch.ops, namespace), packet), overload)(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return result / parts[0]
    return tuple(value / count if count > 1 else value for value, count in zip(result, parts, strict=True))


def index_relative(
    context: ShardContext, name: str, counting: tuple[int, ...], x: torch.Tensor, indices: Any
) -> torch.Tensor:
    """``x[indices]``; indices at ``counting`` count along a split dim and become relative to the shard."""
    local = [i - i.flatten()[0] if p in counting else i for p, i in enumerate(indices)]
    return torch.ops.aten.index.Tensor(x, local)


# -- batch norm -----------------------------------------------------------------------------------


class _SyncBatchNorm(torch.autograd.Function):
    """Batch norm over a batch split over ``axes``: statistics of the whole batch, forward and backward.

    Statistics and their sums are float32 for narrower inputs, as in PyTorch's own kernels.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: ShardContext,
        axes: tuple[int, ...],
        count: int,
        eps: float,
    ) -> Any:
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = context.all_reduce(x.sum(dims, dtype=wide), axes)
        mean = sums / count
        centred = x - mean.view(shape)
        var = context.all_reduce(centred.square().sum(dims), axes) / count
        inverse = torch.rsqrt(var + eps)
        normalised = centred.mul_(inverse.view(shape)).to(x.dtype)
        y = normalised if weight is None else normalised * weight.view(shape)
        if bias is not None:
            y = y + bias.view(shape)
        y = y.to(x.dtype)
        ctx.save_for_backward(normalised, weight, inverse)
        ctx.context, ctx.axes, ctx.count, ctx.has_bias = context, axes, count, bias is not None
        ctx.mark_non_differentiable(mean, inverse, var)
        return y.clone() if y is normalised else y, mean, inverse, var

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        normalised, weight, inverse = ctx.saved_tensors
        dims = [d for d in range(grad.dim()) if d != 1]
        shape = [1, -1] + [1] * (grad.dim() - 2)
        wide = inverse.dtype
        local = torch.stack([grad.sum(dims, dtype=wide), (grad * normalised).sum(dims, dtype=wide)])
        total = ctx.context.all_reduce(local, ctx.axes) / ctx.count
        scale = inverse if weight is None else inverse * weight
        gx = (grad - total[0].view(shape) - normalised * total[1].view(shape)) * scale.view(shape)
        return (
            gx.to(grad.dtype),
            None if weight is None else local[1],
            local[0] if ctx.has_bias else None,
            None,
            None,
            None,
            None,
        )


def sync_batch_norm(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    count: int,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """``_native_batch_norm_legit_functional`` over a split batch.

    Returns:
        output, mean, inverse standard deviation, new running mean, new running variance.
    """
    y, mean, inverse, var = _SyncBatchNorm.apply(x, weight, bias, context, axes, count, eps)
    unbiased = var * (count / max(count - 1, 1))
    new_mean = running_mean * (1 - momentum) + mean * momentum
    new_var = running_var * (1 - momentum) + unbiased * momentum
    return y, mean, inverse, new_mean, new_var
