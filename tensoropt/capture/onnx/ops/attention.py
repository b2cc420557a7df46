"""The Attention operator (opset 23), in the forms that PyTorch's attention covers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError, Traced

_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap"}


@converter("Attention")
def _attention(call: Call) -> Any:
    q, k, v, mask = call[0], call[1], call[2], call.optional(3)
    causal = bool(call.attribute("is_causal", 0))
    beyond = any(call.optional(i) is not None for i in (4, 5, 6)) or any(map(call.wants, (1, 2, 3)))
    beyond = beyond or call.attribute("softcap", 0.0) or not call.attributes.keys() <= _KNOWN
    if beyond or (causal and mask is not None):
        raise OnnxError("past keys, lengths, windows, caps, or a mask beside is_causal cannot be imported")
    flat = q.ndim == 3
    if flat:
        q = _to_heads(q, call.attribute("q_num_heads"))
        k, v = (_to_heads(t, call.attribute("kv_num_heads")) for t in (k, v))
    if mask is not None and mask.shape[-1] != k.shape[2]:
        raise OnnxError("a mask for fewer keys than there are cannot be imported")
    options = {"scale": call.attribute("scale"), "enable_gqa": q.shape[1] != k.shape[1]}
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)
    if not flat:
        return out
    batch, heads, sequence, size = out.shape
    return out.permute(0, 2, 1, 3).reshape(batch, sequence, heads * size)


def _to_heads(x: Traced, heads: int) -> Traced:
    """Return (batch, sequence, heads * size) as (batch, heads, sequence, size)."""
    batch, sequence, hidden = x.shape
    return x.reshape(batch, sequence, heads, hidden // heads).permute(0, 2, 1, 3)
