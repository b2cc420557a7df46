"""The fused operators that ONNX Runtime's optimizer writes (domain com.microsoft)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import MICROSOFT, Call, converter
from tensoropt.capture.onnx.ops.attention import causal_bias, from_heads, rotate, to_heads
from tensoropt.capture.onnx.ops.math import gemm, product
from tensoropt.capture.onnx.ops.normalisation import layer, rms
from tensoropt.capture.onnx.values import OnnxError, Traced


@converter("Gelu", "BiasGelu", domain=MICROSOFT)
def _gelu(call: Call) -> Traced:
    return F.gelu(_with_bias(call))


@converter("FastGelu", domain=MICROSOFT)
def _fast_gelu(call: Call) -> Traced:
    return F.gelu(_with_bias(call), approximate="tanh")


def _with_bias(call: Call) -> Traced:
    return call[0] if call.optional(1) is None else call[0] + call[1]


@converter("QuickGelu", domain=MICROSOFT)
def _quick_gelu(call: Call) -> Traced:
    return call[0] * torch.sigmoid(call[0] * call.attribute("alpha", 1.702))


@converter("FusedMatMul", domain=MICROSOFT)
def _fused_matmul(call: Call) -> Traced:
    a, b = call[0], call[1]
    if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
        raise OnnxError("transposed batch dims cannot be imported")
    a = torch.transpose(a, -1, -2) if call.attribute("transA", 0) else a
    b = torch.transpose(b, -1, -2) if call.attribute("transB", 0) else b
    out, alpha = product(a, b), call.attribute("alpha", 1.0)
    return out if alpha == 1.0 else out * alpha


@converter("FusedGemm", domain=MICROSOFT)
def _fused_gemm(call: Call) -> Traced:
    out, name = gemm(call), call.attribute("activation", "")
    functions: Any = {"": lambda v: v, "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh}
    if name not in functions:
        raise OnnxError(f"its activation '{name}' is unknown")
    return functions[name](out)


@converter("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(call: Call) -> Any:
    """norm(input + skip + bias); the fourth output is the sum."""
    simplified = "Simplified" in call.op
    total = call[0] + call[1]
    bias = call.optional(3 if simplified else 4)
    total = total if bias is None else total + bias
    epsilon = call.attribute("epsilon", 1e-5 if simplified else 1e-12)
    if simplified:
        out = rms(total, call[2], total.ndim - 1, epsilon)
    else:
        out = layer(total, call[2], call.optional(3), total.ndim - 1, epsilon)
    if call.wants(1) or call.wants(2):
        raise OnnxError("its mean and deviation (outputs 1 and 2) cannot be imported")
    return out, None, None, total


@converter("EmbedLayerNormalization", domain=MICROSOFT)
def _embed_layer_norm(call: Call) -> Any:
    ids, segments, words, positions, kinds = call[0], call.optional(1), call[2], call[3], call.optional(4)
    batch, sequence = ids.shape
    total = F.embedding(ids, words)
    position_ids = call.optional(8)
    total = total + (
        torch.narrow(positions, 0, 0, sequence)
        if position_ids is None
        else F.embedding(position_ids, positions)
    )
    if segments is not None and kinds is not None:
        total = total + F.embedding(segments, kinds)
    out = layer(total, call[5], call[6], 2, call.attribute("epsilon", 1e-12))
    lengths = None
    if call.wants(1):
        mask = call.optional(7)
        lengths = (
            call.builder.known(torch.full((batch,), sequence, dtype=torch.int32))
            if mask is None
            else torch.sum(mask, [1]).to(torch.int32)
        )
    return out, lengths, total


def _key_bias(call: Call, mask: Traced, batch: int, keys: int, dtype: torch.dtype) -> Traced:
    """Return a padding mask of 0 and 1, by key or by query and key, converted to a term added to the
    scores.
    """
    lowest = call.attribute("mask_filter_value", -10000.0)
    if mask.ndim == 1:
        if mask.numel != batch:
            raise OnnxError("a mask of start and end positions cannot be imported")
        places = call.builder.known(torch.arange(keys, dtype=mask.dtype))
        keep = torch.lt(places, mask.reshape(batch, 1))
    else:
        keep = mask.method("ne", 0)
    shape = {2: (keep.shape[0], 1, 1, keys), 3: (keep.shape[0], 1, *keep.shape[1:])}.get(keep.ndim)
    if shape is None and keep.ndim != 4:
        raise OnnxError(f"a mask of {keep.ndim} dims cannot be imported")
    keep = keep if shape is None else keep.reshape(*shape)
    return (1.0 - keep.to(dtype)) * lowest


def _attended(call: Call, q: Traced, k: Traced, v: Traced, bias: Traced, causal: bool) -> Traced:
    scale = call.attribute("scale") or 1.0 / math.sqrt(q.shape[-1])
    if causal and bias is not None:
        bias = bias + causal_bias(call, q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.dtype)
        causal = False
    # The last query sees the last key; PyTorch's flag would align the first ones.
    if causal and q.shape[2] != k.shape[2]:
        bias = causal_bias(call, q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.dtype)
        causal = False
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return from_heads(out)


@converter("Attention", domain=MICROSOFT)
def attention(call: Call) -> Any:
    """Return a projection to q, k, v in one matrix, followed by attention."""
    x, weight, bias = call[0], call[1], call.optional(2)
    if call.optional(4) is not None or call.attribute("do_rotary", 0):
        raise OnnxError("a cache or rotary embedding inside cannot be imported")
    heads, batch = call.attribute("num_heads"), x.shape[0]
    sizes = call.attribute("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3
    joined = product(x, weight)
    joined = joined if bias is None else joined + bias
    q, k, v = (to_heads(part, heads) for part in torch.split(joined, sizes, 2))
    added = None
    if call.optional(3) is not None:
        added = _key_bias(call, call[3], batch, k.shape[2], x.dtype)
    if call.optional(5) is not None:
        added = call[5] if added is None else added + call[5]
    return _attended(call, q, k, v, added, bool(call.attribute("unidirectional", 0))), None


@converter("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(call: Call) -> Any:
    q, k, v, bias = call[0], call.optional(1), call.optional(2), call.optional(3)
    heads = call.attribute("num_heads")
    if q.ndim != 3 or k is None or v is None or k.ndim != 3:
        raise OnnxError("packed queries, keys and values cannot be imported")
    if any(call.optional(i) is not None for i in (6, 7)):
        raise OnnxError("a cache cannot be imported")
    if bias is not None:
        sizes = [q.shape[2], k.shape[2], v.shape[2]]
        q, k, v = (t + b for t, b in zip((q, k, v), torch.split(bias, sizes, 0), strict=True))
    q, k, v = (to_heads(t, heads) for t in (q, k, v))
    added = None
    if call.optional(4) is not None:
        added = _key_bias(call, call[4], q.shape[0], k.shape[2], q.dtype)
    if call.optional(5) is not None:
        added = call[5] if added is None else added + call[5]
    return _attended(call, q, k, v, added, bool(call.attribute("unidirectional", 0))), None, None


@converter("RotaryEmbedding", domain=MICROSOFT)
def _rotary_embedding(call: Call) -> Traced:
    x, positions, cos, sin = call[0], call[1], call[2], call[3]
    flat = x.ndim == 3
    size = call.attribute("rotary_embedding_dim", 0) or 2 * cos.shape[-1]
    heads = call.attribute("num_heads", 0) or (x.shape[2] // size if flat else 0)
    sequence = x.shape[1] if flat else x.shape[2]
    x = to_heads(x, heads) if flat else x
    if positions.ndim == 1:
        positions = positions + call.builder.known(torch.arange(sequence))
        positions = positions.reshape(1, sequence)
    cos, sin = (torch.unsqueeze(F.embedding(positions, t), 1) for t in (cos, sin))
    out = rotate(x, cos, sin, size, bool(call.attribute("interleaved", 0)))
    return from_heads(out) if flat else out
