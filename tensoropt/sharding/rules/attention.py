"""Scaled dot-product attention: batch and heads split; sequences stay whole."""

from __future__ import annotations

from tensoropt.sharding.rules.registry import Builder, Label, Opaque, rule


@rule("aten.scaled_dot_product_attention.default")
def attention(b: Builder) -> None:
    """``softmax(q k^T / sqrt(d) + mask) v`` over ``[batch..., heads, sequence, d]``.

    The queries' sequence splits where no causal flag ties it to absolute positions and any mask is
    an operand that can be cut alike. Grouped-query attention (``enable_gqa``) splits the key/value
    heads: query head ``h`` reads key head ``h // group``.
    """
    q, k, v, mask = b.arg(0), b.arg(1), b.arg(2), b.arg(3, "attn_mask")
    causal, gqa = b.arg(5, "is_causal", False), b.op.kwargs.get("enable_gqa", False)
    dropout = b.arg(4, "dropout_p", 0.0)
    shape, keys = b.tensor(q).shape, b.tensor(k).shape
    if len(shape) < 3 or len(keys) != len(shape) or keys[:-3] != shape[:-3]:
        raise Opaque(b.op.name)
    lead = b.loops(shape[:-3], "batch")
    heads, group = keys[-3], shape[-3] // keys[-3]
    if group > 1 and not gqa and heads > 1:
        raise Opaque(b.op.name)
    if group > 1 and heads == 1:
        # One key/value head for all queries broadcasts: the query heads alone split.
        heads, group = group, 1
    h = b.loop("heads", heads)
    q_heads: Label = (h, b.loop("group", group, splittable=False)) if group > 1 else h
    s = b.loop("queries", shape[-2], splittable=not causal and not dropout)
    b.read(q, [*lead, q_heads, s, None])
    b.read(k, [*lead, h, None, None])
    b.read(v, [*lead, h, None, None])
    if mask is not None:
        rank = len(b.tensor(mask).shape)
        labels: list[Label] = [*lead, q_heads, s, None]
        b.read(mask, labels[len(labels) - rank :])
    b.write([*lead, q_heads, s, None])
