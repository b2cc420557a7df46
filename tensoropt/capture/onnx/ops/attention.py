"""Attention and rotary embedding, as in the standard since opset 23."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError, Traced

_KNOWN = frozenset(
    {
        "is_causal",
        "kv_num_heads",
        "q_num_heads",
        "qk_matmul_output_mode",
        "scale",
        "softcap",
        "softmax_precision",
    }
)


def to_heads(x: Traced, heads: int) -> Traced:
    """Reshape (batch, sequence, heads * size) to (batch, heads, sequence, size)."""
    batch, sequence, hidden = x.shape
    return x.reshape(batch, sequence, heads, hidden // heads).permute(0, 2, 1, 3)


def from_heads(x: Traced) -> Traced:
    batch, heads, sequence, size = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch, sequence, heads * size)


def _as_bias(mask: Traced, dtype: torch.dtype) -> Traced:
    """Return a mask as a term that is added to the scores; True in a boolean mask keeps the score."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zero = torch.zeros((), dtype=dtype)
    return torch.where(mask, mask.builder.known(zero), mask.builder.known(zero - math.inf))


def causal_bias(call: Call, queries: int, keys: int, before: int, dtype: torch.dtype) -> Traced:
    # Counted as folded memory: a file of a few bytes can ask for a triangle of any size.
    call.builder.reserve(queries * keys * dtype.itemsize)
    allowed = torch.ones(queries, keys, dtype=torch.bool).tril(before)
    return call.builder.known(torch.zeros(queries, keys, dtype=dtype).masked_fill(~allowed, -math.inf))


@converter("Attention")
def attention(call: Call) -> Any:
    q, k, v = call[0], call[1], call[2]
    unknown = sorted(set(call.attributes) - _KNOWN)
    if unknown:
        raise OnnxError(f"its attribute '{unknown[0]}' cannot be imported")
    flat = q.ndim == 3
    if flat:
        q = to_heads(q, call.attribute("q_num_heads"))
        k, v = (to_heads(t, call.attribute("kv_num_heads")) for t in (k, v))
    before = 0
    if call.optional(4) is not None:
        before = call[4].shape[2]
        k, v = torch.cat([call[4], k], 2), torch.cat([call[5], v], 2)
    if call.optional(6) is not None:
        raise OnnxError("lengths of unpadded keys (input 6) cannot be imported")
    mask, causal = call.optional(3), bool(call.attribute("is_causal", 0))
    scale = call.attribute("scale") or 1.0 / math.sqrt(q.shape[-1])
    capped = call.attribute("softcap", 0.0)
    if mask is not None and mask.shape[-1] < k.shape[2]:
        raise OnnxError("a mask for fewer keys than there are cannot be imported")
    # PyTorch's fused call supports no cap on scores, no scores as a result, and a causal triangle only
    # without a past, because it aligns the diagonal with the first key.
    if not capped and not call.wants(3) and not (causal and (before or mask is not None)):
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        return from_heads(out) if flat else out, k, v
    if causal and mask is not None and mask.dtype == torch.bool:
        mask = torch.logical_and(
            mask, causal_bias(call, q.shape[2], k.shape[2], before, q.dtype).method("eq", 0)
        )
        causal = False
    bias = None if mask is None else _as_bias(mask, q.dtype)
    if causal:
        triangle = causal_bias(call, q.shape[2], k.shape[2], before, q.dtype)
        bias = triangle if bias is None else bias + triangle
    out, scores = _written_out(call, q, k, v, bias, scale, capped)
    return from_heads(out) if flat else out, k, v, scores


def _written_out(
    call: Call, q: Traced, k: Traced, v: Traced, bias: Traced, scale: float, capped: float
) -> tuple[Traced, Traced]:
    repeat = q.shape[1] // k.shape[1]
    keys, values = (torch.repeat_interleave(t, repeat, dim=1) if repeat > 1 else t for t in (k, v))
    raw = torch.matmul(q * scale, torch.transpose(keys, 2, 3))
    soft = torch.tanh(raw / capped) * capped if capped else raw
    masked = soft if bias is None else soft + bias
    weights = torch.softmax(masked, -1)
    if bias is not None:  # a query that may see no key attends to nothing
        largest: Traced = torch.amax(masked, -1, keepdim=True)
        # The softmax of a row that is all -inf is NaN.
        empty = largest.method("eq", -math.inf)
        weights = torch.where(empty, torch.zeros_like(weights), weights)
    shown = {0: raw, 1: soft, 2: masked, 3: weights}[call.attribute("qk_matmul_output_mode", 0)]
    return torch.matmul(weights, values), shown


@converter("RotaryEmbedding")
def _rotary_embedding(call: Call) -> Traced:
    x, cos, sin, positions = call[0], call[1], call[2], call.optional(3)
    flat = x.ndim == 3
    if flat:
        x = to_heads(x, call.attribute("num_heads"))
    if positions is not None:
        cos, sin = F.embedding(positions.to(torch.int64), cos), F.embedding(positions.to(torch.int64), sin)
    cos, sin = torch.unsqueeze(cos, 1), torch.unsqueeze(sin, 1)
    rotated = call.attribute("rotary_embedding_dim", 0) or x.shape[-1]
    out = rotate(x, cos, sin, rotated, bool(call.attribute("interleaved", 0)))
    return from_heads(out) if flat else out


def rotate(x: Traced, cos: Traced, sin: Traced, rotated: int, interleaved: bool) -> Traced:
    """Rotate the first ``rotated`` elements of each head; cos and sin have half that many."""
    turning, rest = torch.narrow(x, 3, 0, rotated), torch.narrow(x, 3, rotated, x.shape[3] - rotated)
    half = rotated // 2
    cos, sin = (torch.narrow(t, t.ndim - 1, 0, half) for t in (cos, sin))
    if interleaved:
        pairs = turning.reshape(*x.shape[:3], half, 2)
        a, b = torch.select(pairs, 4, 0), torch.select(pairs, 4, 1)
        out = torch.stack([a * cos - b * sin, a * sin + b * cos], 4).reshape(*x.shape[:3], rotated)
    else:
        a, b = torch.narrow(turning, 3, 0, half), torch.narrow(turning, 3, half, half)
        out = torch.cat([a * cos - b * sin, a * sin + b * cos], 3)
    return out if rotated == x.shape[3] else torch.cat([out, rest], 3)
