"""Converters of whole layers in forms that PyTorch has: attention (opset 23), norms, dropout, LSTM, GRU, RNN.

A batch norm uses the file's running statistics unless its node is exported for training. ONNX stacks gates as
i, o, f, c (LSTM) and z, r, h (GRU); PyTorch as i, f, g, o and r, z, n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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
        raise OnnxError(
            "past keys, sequence lengths, windows, a softcap, or a mask beside is_causal cannot be imported"
        )
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
    """Reshape ``(batch, sequence, heads * size)`` to ``(batch, heads, sequence, size)``."""
    batch, sequence, hidden = x.shape
    return x.reshape(batch, sequence, heads, hidden // heads).permute(0, 2, 1, 3)


# -- norms, dropout -------------------------------------------------------------------------------


@converter("BatchNormalization")
def _batch_norm(call: Call) -> Any:
    x, scale, bias, mean, var = (call[i] for i in range(5))
    epsilon, momentum = call.attribute("epsilon", 1e-5), call.attribute("momentum", 0.9)
    if not call.attribute("training_mode", 0):
        mean, var, scale, bias = (v.to(x.dtype) for v in (mean, var, scale, bias))
        if mean.data is None or var.data is None:  # a file may share equal statistics and weights
            mean, var = torch.detach(mean), torch.detach(var)
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    if not call.wants(1) and not call.wants(2) and mean.data is not None and var.data is not None:
        # ONNX applies its momentum to the old statistics, PyTorch to the new ones.
        return F.batch_norm(x, mean, var, scale, bias, True, 1.0 - momentum, epsilon)
    dims = [d for d in range(x.ndim) if d != 1]
    # ONNX's running variance uses the batch's own, PyTorch's the unbiased one, so it is written out.
    batch_mean, batch_var = torch.mean(x, dims), torch.var(x, dims, correction=0)
    out = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    running = [a * momentum + b * (1.0 - momentum) for a, b in ((mean, batch_mean), (var, batch_var))]
    return (out, *running)


@converter("InstanceNormalization")
def _instance_norm(call: Call) -> Traced:
    x = call[0]
    return F.group_norm(x, x.shape[1], call[1], call[2], call.attribute("epsilon", 1e-5))


@converter("GroupNormalization")
def _group_norm(call: Call) -> Traced:
    x, scale, bias, groups = call[0], call[1], call[2], call.attribute("num_groups")
    if scale.numel != x.shape[1]:
        raise OnnxError("it has a scale per group, as before opset 21; export it in opset 21 or newer")
    return F.group_norm(x, groups, scale, bias, call.attribute("epsilon", 1e-5))


@converter("LayerNormalization")
def _layer_norm(call: Call) -> Traced:
    if call.wants(1) or call.wants(2):
        raise OnnxError("its mean and deviation (outputs 1 and 2) cannot be imported")
    x, scale, bias = call[0], call.optional(1), call.optional(2)
    shape, epsilon = x.shape[call.dim("axis", -1) :], call.attribute("epsilon", 1e-5)
    if all(v is None or v.shape == shape for v in (scale, bias)):
        return F.layer_norm(x, shape, scale, bias, epsilon)
    out = F.layer_norm(x, shape, None, None, epsilon)
    out = out if scale is None else out * scale
    return out if bias is None else out + bias


@converter("RMSNormalization")
def _rms_norm(call: Call) -> Traced:
    x, scale = call[0], call[1]
    shape, epsilon = x.shape[call.dim("axis", -1) :], call.attribute("epsilon", 1e-5)
    if scale.shape == shape:
        return F.rms_norm(x, shape, scale, epsilon)
    return F.rms_norm(x, shape, None, epsilon) * scale


@converter("Dropout")
def _dropout(call: Call) -> Any:
    ratio = call.scalar(1, 0.5, "ratio")
    if not call.scalar(2, False, "training_mode") or ratio == 0.0:
        return call[0], torch.ones_like(call[0], dtype=torch.bool) if call.wants(1) else None
    if call.wants(1):
        raise OnnxError("the mask of a dropout in training cannot be imported")
    return F.dropout(call[0], ratio, True)


# -- recurrent ------------------------------------------------------------------------------------

_TORCH_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Positions of the gates in ONNX's stacked weights, in PyTorch's order."""
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@converter("LSTM", "GRU", "RNN")
def _recurrent(call: Call) -> Any:
    x, size = call[0], call.attribute("hidden_size") or call[2].shape[-1]
    direction = call.attribute("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    activations = call.attribute("activations") or _ACTIVATIONS[call.op] * directions
    _refuse_other_forms(call, x.shape[0], activations)
    steps, batch = x.shape[:2]

    def state(index: int) -> Traced:
        if call.optional(index) is not None:
            return call[index]
        return call.builder.known(torch.zeros((), dtype=x.dtype).expand(directions, batch, size))

    weights = _weights(call, directions, size)
    options = (call.optional(3) is not None, 1, 0.0, False, directions == 2, False)
    if call.op == "LSTM":
        out, *states = call.builder.call(torch.lstm, x, [state(5), state(6)], weights, *options)
    else:
        relu = activations[0].capitalize() == "Relu"
        function = torch.gru if call.op == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
        out, *states = call.builder.call(function, x, state(5), weights, *options)
    return out.reshape(steps, batch, directions, size).permute(0, 2, 1, 3), *states


def _refuse_other_forms(call: Call, steps: int, activations: list[str]) -> None:
    count = len(_ACTIVATIONS[call.op])
    kinds = [
        [name.capitalize() for name in activations[i : i + count]] for i in range(0, len(activations), count)
    ]
    usual = [_ACTIVATIONS[call.op]] + [["Relu"]] * (call.op == "RNN")
    other = {
        "direction='reverse'": call.attribute("direction", "forward") == "reverse",
        "layout=1": call.attribute("layout", 0),
        "clip": call.attribute("clip") is not None,
        "input_forget": call.attribute("input_forget", 0),
        "peepholes": call.op == "LSTM" and call.optional(7) is not None,
        "linear_before_reset=0": call.op == "GRU" and not call.attribute("linear_before_reset", 0),
        "other activations": kinds[0] not in usual or kinds[1:] not in ([], kinds[:1]),
        "sequences of several lengths": call.optional(4) is not None
        and any(n != steps for n in call.ints(4, "sequence lengths")),
    }
    for form, present in other.items():
        if present:
            raise OnnxError(f"a recurrent layer with {form} cannot be imported; export PyTorch's own layer")


def _weights(call: Call, directions: int, size: int) -> list[Traced]:
    order = _TORCH_ORDER[call.op]
    weights: list[Traced] = []
    for d in range(directions):
        weights += [_reordered(torch.select(call[i], 0, d), size, order) for i in (1, 2)]
        if call.optional(3) is not None:
            # ONNX stores both biases in one row, the input's first, as PyTorch's layers take them.
            both, rows = torch.select(call[3], 0, d), len(order) * size
            weights += [_reordered(torch.narrow(both, 0, start, rows), size, order) for start in (0, rows)]
    return weights


def _reordered(value: Traced, size: int, order: Sequence[int]) -> Traced:
    if len(order) == 1:
        return value
    return torch.cat([torch.narrow(value, 0, gate * size, size) for gate in order], 0)
