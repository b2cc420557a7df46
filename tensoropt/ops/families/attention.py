"""Scaled dot-product attention: batch, heads and queries may be split; keys stay whole or go round a ring."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from tensoropt.graph import Operator
from tensoropt.ops.attention_in_blocks import query_pieces
from tensoropt.ops.calls import CostClass, FlopCount, LocalCall, OperatorShard, OpSpec, Precision
from tensoropt.ops.families.generators import dropout_kernel, pieces_of
from tensoropt.ops.index_space import Builder, Loops, Opaque, alike
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.ring_attention import (
    BLOCKS_FORM,
    RING,
    RING_FORM,
    causal_attention_in_blocks,
    ring_attention,
    ring_collectives,
    ring_of,
)

ATTENTION = "aten.scaled_dot_product_attention.default"
_MATH_FORM = "kernels.attention_with_dropout"
"""The name of the kernel of attention with dropout."""


@alike("dropout_p scale")
def _attention(b: Builder) -> None:
    """Describe ``softmax(q k^T / sqrt(d) + mask) v`` over ``[batch..., heads, sequence, d]``.

    Queries may be split without dropout, and without a mask beside a causal flag; with this flag, each rank
    then computes blocks of keys. If queries may be split, an axis may also split them together with the keys
    (the loop ``ring``), if there are equally many and no trained mask. Grouped-query attention
    (``enable_gqa``) allows splits of key/value heads, or of each group's query heads.
    """
    q, k, v, mask = b.arg(0), b.arg(1), b.arg(2), b.arg(3, "attn_mask")
    causal, gqa = b.arg(5, "is_causal", False), b.arg(7, "enable_gqa", False)
    dropout = b.arg(4, "dropout_p", 0.0)
    shape, keys = b.tensor(q).shape, b.tensor(k).shape
    if len(shape) < 3 or len(keys) != len(shape) or keys[:-3] != shape[:-3]:
        raise Opaque(b.op.name)
    lead = b.loops(shape[:-3], "batch")
    heads, group = keys[-3], shape[-3] // keys[-3]
    if group > 1 and not gqa and heads > 1:
        raise Opaque(b.op.name)
    if group > 1 and heads == 1:
        # One key/value head for all queries broadcasts: only the query heads split.
        heads, group = group, 1
    h = b.loop("heads", heads, small_parts=True)
    q_heads: Loops = (h, b.loop("group", group, small_parts=True)) if group > 1 else h
    # Attention of split queries under a causal flag is made of calls that take no mask.
    splittable = not dropout and (not causal or mask is None)
    s = b.loop("queries", shape[-2], splittable=splittable, growing=bool(causal))
    # Never split by themselves: every query needs them all.
    t = b.loop("keys", keys[-2], splittable=False)
    b.read(q, [*lead, q_heads, s, None])
    b.read(k, [*lead, h, t, None])
    b.read(v, [*lead, h, t, None])
    if mask is not None:
        rank = len(b.tensor(mask).shape)
        labels: list[Loops] = [*lead, q_heads, s, None]
        b.read(mask, labels[len(labels) - rank :])
    b.write([*lead, q_heads, s, None])
    if keys[-2] == shape[-2] and (mask is None or not b.tensor(mask).requires_grad):
        b.together(RING, (s, t), aligned=True)


def _local_attention(shard: OperatorShard, call: LocalCall) -> LocalCall:
    p = shard.argument(4, "dropout_p", 0.0)
    if p == 0.0:
        causal = shard.argument(5, "is_causal", False)
        if around := shard.split(shard.loop_named(RING)):
            ring = ring_of(shard, around, causal=causal)
            pieces = query_pieces(shard, shard.space.writes[0]) if causal else ()
            mask = shard.argument(3, "attn_mask", None)
            args = (*call.args[:3], mask, causal, shard.op.kwargs.get("scale"))
            collectives = ring_collectives(shard, ring)
            return LocalCall(RING_FORM, args, {}, call.name, (tuple(ring), pieces), collectives)
        if not causal or not shard.split(shard.loop_named("queries")):
            return call
        args = (*call.args[:3], shard.op.kwargs.get("scale"))
        return LocalCall(BLOCKS_FORM, args, {}, call.name, (query_pieces(shard, shard.space.writes[0]),))
    tensors = shard.atoms.graph.tensors
    keys = tensors[shard.op.inputs()[1]].shape[-2]
    output = shard.space.writes[0]
    # Weights are [..., heads, queries, keys]: the output's atoms without its last dim, followed by the keys.
    last = shard.atoms.atoms[output.tensor][-1]
    pieces = pieces_of(shard, output)
    kept, stride = pieces[: len(pieces) - len(last)], prod(last)
    weights = (*((n, s // stride * keys, *rest) for n, s, *rest in kept), (keys, 1, keys, ()))
    mask = shard.argument(3, "attn_mask", None)
    # `enable_gqa` is left out: the kernel sees the number of heads and repeats the keys itself.
    args = (*call.args[:3], mask, p, shard.argument(5, "is_causal", False), shard.op.kwargs.get("scale"))
    return LocalCall(_MATH_FORM, args, {}, call.name, (weights,))


def _attention_with_dropout(
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
    """Compute attention as matrix products and softmax, with counter-based dropout of the weights."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.shape[-3] != q.shape[-3]:
        group = q.shape[-3] // k.shape[-3]
        # Query head `h` reads key head `h // group`, so neighbouring query heads share one.
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = (q * scale) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = dropout_kernel(context, name, pieces, torch.softmax(scores, -1), p)
    return weights @ v


def _drops(op: Operator) -> bool:
    return bool(op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0))


def _evaluated_attention(op: Operator, call: LocalCall) -> LocalCall:
    if call.function in (BLOCKS_FORM, RING_FORM):
        return call
    mask = op.args[3] if len(op.args) > 3 else op.kwargs.get("attn_mask")
    causal = op.args[5] if len(op.args) > 5 else op.kwargs.get("is_causal", False)
    kwargs = {k: v for k, v in op.kwargs.items() if k in ("scale", "enable_gqa")}
    return LocalCall(op.target, (*op.args[:3], mask, 0.0, causal), kwargs, call.name)


@shape_wrapper
def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


@shape_wrapper
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def _skipping(count: FlopCount, position: int) -> FlopCount:
    """Return the FLOP count of a kernel that skips the blocks hidden by a causal mask, about half of all
    blocks.

    Such a kernel is 1.7 to 1.8 times faster (Dao, FlashAttention-2, arXiv 2307.08691, section 3.1.2).
    PyTorch's efficient kernel, cuDNN's and the CPU's (``FlashAttentionKernel.cpp``) skip these blocks, too.

    Args:
        count: FLOP counter that ignores masks.
        position: position of ``is_causal`` among the arguments.
    """

    def counted(*args: Any, **kwargs: Any) -> int:
        full = count(*args, **kwargs)
        causal = args[position] if len(args) > position else kwargs.get("is_causal", False)
        queries, keys = (t.shape[-2] for t in (args[position_of_queries], args[position_of_queries + 1]))
        if not causal:
            return full
        # Query ``i`` sees ``i + 1`` keys, if there are that many.
        growing = min(queries, keys)
        seen = growing * (growing + 1) // 2 + (queries - growing) * keys
        return full * seen // (queries * keys)

    # The first argument of backward is the gradient of the result.
    position_of_queries = 1 if count is _backward_flops else 0
    return counted


SPECS = (
    OpSpec(
        targets=(ATTENTION,),
        rule=_attention,
        localiser=_local_attention,
        kernels={_MATH_FORM: _attention_with_dropout},
        cost_class=CostClass.ATTENTION,
        precision=Precision.NARROW,
        # PyTorch counts only the kernels of GPUs, and counts them as if a causal mask hid nothing.
        flops={
            "aten::_scaled_dot_product_flash_attention": _skipping(_flops, 4),
            "aten::_scaled_dot_product_flash_attention_backward": _skipping(_backward_flops, 11),
            "aten::_scaled_dot_product_efficient_attention": _skipping(_flops, 6),
            "aten::_scaled_dot_product_efficient_attention_backward": _skipping(_backward_flops, 11),
            "aten::_scaled_dot_product_cudnn_attention": _skipping(_flops, 6),
            "aten::_scaled_dot_product_cudnn_attention_backward": _skipping(_backward_flops, 14),
            "aten::_scaled_dot_product_flash_attention_for_cpu": _skipping(_flops, 4),
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _skipping(_backward_flops, 7),
        },
        random=True,
        draws=_drops,
        evaluated=_evaluated_attention,
    ),
    OpSpec(
        kernels={BLOCKS_FORM: causal_attention_in_blocks, RING_FORM: ring_attention},
        cost_class=CostClass.ATTENTION,
    ),
    OpSpec(without_rule=("attention",), cost_class=CostClass.ATTENTION),
)
