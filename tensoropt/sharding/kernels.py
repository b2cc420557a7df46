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
_STEP = _signed(0xD6E8FEB86659FD93)


def _key(seed: int, name: str) -> int:
    state = 0xCBF29CE484222325  # FNV-1a over the operator's name and seed
    for byte in f"{name}/{seed}".encode():
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
    # The step counts as a number that a compiler may leave open, so that it compiles once for all steps.
    moment = torch.full((), context.step, dtype=torch.int64, device=device).mul_(_STEP)
    state = index.mul(_GOLDEN).add_(_key(context.seed, name)).add_(moment)
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
    """``offset + scale * rand`` (or ``randn``, ``randint``, ``exponential``) from a hash of the global index:
    replicas agree, shards differ.

    ``randn`` is Box and Muller's transform of two uniform numbers.
    """
    device = torch.get_default_device()

    def uniform(stream: str) -> torch.Tensor:
        return (_hashed(context, stream, pieces, device).bitwise_and_(0xFFFFFF).double() + 0.5) / (1 << 24)

    value = uniform(name)
    if kind == "randn":
        value = (-2.0 * value.log()).sqrt() * (2.0 * torch.pi * uniform(f"{name}/angle")).cos()
    elif kind == "exponential":
        value = -value.log()
    value = (value * scale + offset).reshape(shape)
    return (value.floor() if kind == "randint" else value).to(dtype)


_SEEDING = threading.Lock()


def seeded(context: ShardContext, name: str, target: str, *args: Any, **kwargs: Any) -> Any:
    """An operator that draws random numbers itself, on all ranks from one seed: it is kept whole, and
    every rank must draw what the unsplit model draws."""
    namespace, packet, overload = target.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed((_key(context.seed, name) + context.step * _STEP) & ((1 << 63) - 1))
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


# -- lookups -------------------------------------------------------------------------------------


_MEAN_OF_BAG = 1


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


def embedding_bag(
    context: ShardContext,
    name: str,
    axes: tuple[int, ...],
    step: int,
    weight: torch.Tensor,
    index: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    factors: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """``aten.embedding_bag`` of a shard: some bags (``offsets`` are those of the whole batch), or the
    vocabulary split over ``axes`` (sums and means are then partial sums).

    Args:
        axes, step: the shard holds the rows from ``coordinate(axes) * step`` on.
        factors: per item what its row is multiplied with.
    """
    bag = torch.ops.aten.embedding_bag.padding_idx
    offsets = offsets - offsets[0]
    if not axes:
        options = (scale_grad_by_freq, mode, sparse, factors, include_last_offset, padding_idx)
        return bag(weight, index, offsets, *options)
    local = index - context.coordinate(axes) * step
    counted = torch.ones_like(index, dtype=weight.dtype)
    if padding_idx is not None and padding_idx >= 0:
        counted = (index != padding_idx).to(weight.dtype)
    inside = counted * ((local >= 0) & (local < weight.shape[0]))
    rows = local.clamp(0, max(weight.shape[0] - 1, 0))
    inside = inside if factors is None else inside * factors
    total, *others = bag(weight, rows, offsets, False, 0, False, inside, include_last_offset, None)
    if mode == _MEAN_OF_BAG:
        ones = counted.new_ones(1, 1)
        sizes = bag(
            ones, torch.zeros_like(index), offsets, False, 0, False, counted, include_last_offset, None
        )
        total = total / sizes[0].clamp(min=1)
    return total, *others


def index_relative(
    context: ShardContext, name: str, counting: tuple[int, ...], x: torch.Tensor, indices: Any
) -> torch.Tensor:
    """``x[indices]``; indices at ``counting`` count along a split dim and become relative to the shard."""
    local = [i - i.flatten()[0] if p in counting else i for p, i in enumerate(indices)]
    return torch.ops.aten.index.Tensor(x, local)


# -- means ---------------------------------------------------------------------------------------


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
