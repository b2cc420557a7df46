"""Norms. A batch norm keeps its running statistics, as in the file, unless it was exported for training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter, positive
from tensoropt.capture.onnx.ops.shape import pad_constant
from tensoropt.capture.onnx.values import OnnxError, Traced


@converter("BatchNormalization")
def _batch_norm(call: Call) -> Any:
    x, scale, bias, mean, var = (call[i] for i in range(5))
    if not call.attribute("spatial", 1):
        raise OnnxError("spatial=0 (statistics per position) cannot be imported")
    epsilon = call.attribute("epsilon", 1e-5)
    if call.opset >= 14 and call.attribute("training_mode", 0):
        return _batch_norm_training(call, x, scale, bias, mean, var, epsilon)
    mean, var, scale, bias = (v.to(x.dtype) for v in (mean, var, scale, bias))
    if mean.data is None or var.data is None:  # a file may store equal statistics and weights once
        mean, var = torch.detach(mean), torch.detach(var)
    return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)


def _batch_norm_training(
    call: Call, x: Traced, scale: Traced, bias: Traced, mean: Traced, var: Traced, epsilon: float
) -> Any:
    momentum = call.attribute("momentum", 0.9)
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
def instance_norm(call: Call) -> Traced:
    x = call[0]
    return F.group_norm(x, x.shape[1], call[1], call[2], call.attribute("epsilon", 1e-5))


@converter("GroupNormalization")
def _group_norm(call: Call) -> Traced:
    """Group norm; scale and bias are per group before opset 21, per channel from then on."""
    x, scale, bias, groups = call[0], call[1], call[2], call.attribute("num_groups")
    if scale.numel == groups != x.shape[1]:
        repeat = x.shape[1] // groups
        scale, bias = (torch.repeat_interleave(v, repeat) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.attribute("epsilon", 1e-5))


@converter("LayerNormalization", "SimplifiedLayerNormalization")
def layer_norm(call: Call) -> Any:
    """Layer norm and RMS norm, which ONNX Runtime calls SimplifiedLayerNormalization."""
    x = call[0]
    axis = positive(call.attribute("axis", -1), x.ndim)
    epsilon = call.attribute("epsilon", 1e-5)
    if call.op == "SimplifiedLayerNormalization":
        return rms(x, call[1], axis, epsilon)
    out = layer(x, call.optional(1), call.optional(2), axis, epsilon)
    if not (call.wants(1) or call.wants(2)):
        return out
    dims = list(range(axis, x.ndim))
    mean = torch.mean(x, dims, keepdim=True)
    deviation = torch.rsqrt(torch.var(x, dims, correction=0, keepdim=True) + epsilon)
    return out, mean, deviation


def layer(x: Traced, scale: Traced, bias: Traced, axis: int, epsilon: float) -> Traced:
    shape = x.shape[axis:]
    if scale is not None and scale.shape == shape and (bias is None or bias.shape == shape):
        return F.layer_norm(x, shape, scale, bias, epsilon)
    out = F.layer_norm(x, shape, None, None, epsilon)
    out = out if scale is None else out * scale
    return out if bias is None else out + bias


@converter("RMSNormalization")
def _rms_norm(call: Call) -> Traced:
    return rms(
        call[0], call[1], positive(call.attribute("axis", -1), call[0].ndim), call.attribute("epsilon", 1e-5)
    )


def rms(x: Traced, scale: Traced, axis: int, epsilon: float) -> Traced:
    shape = x.shape[axis:]
    if scale is None or scale.shape == shape:
        return F.rms_norm(x, shape, scale, epsilon)
    return F.rms_norm(x, shape, None, epsilon) * scale


@converter("MeanVarianceNormalization")
def _mean_variance_norm(call: Call) -> Traced:
    x, dims = call[0], call.attribute("axes") or [0, 2, 3]
    centred = x - torch.mean(x, dims, keepdim=True)
    deviation = torch.sqrt(torch.mean(centred * centred, dims, keepdim=True))
    # The constant comes from the standard's own definition.
    return centred / (deviation + 1e-9)


@converter("LpNormalization")
def _lp_norm(call: Call) -> Traced:
    x, axis, p = call[0], call.dim("axis", -1), call.attribute("p", 2)
    size = torch.linalg.vector_norm(x, p, [axis], keepdim=True)
    zero = size.method("eq", 0)
    return torch.where(zero, torch.zeros_like(x), x / size)


@converter("LRN")
def _local_response_norm(call: Call) -> Traced:
    """Local response norm; the window over channels is a sum of a few shifted copies, so every other dim can
    be split."""
    x, size = call[0], call.attribute("size")
    alpha, beta, bias = (
        call.attribute("alpha", 1e-4),
        call.attribute("beta", 0.75),
        call.attribute("bias", 1.0),
    )
    if not 1 <= size <= 4 * max(x.shape[1], 1):
        raise OnnxError(f"its window of {size} channels makes no sense over {x.shape[1]}")
    before = (size - 1) // 2
    pads = [(before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    squares = pad_constant(x * x, pads)
    total = torch.narrow(squares, 1, 0, x.shape[1])
    for start in range(1, size):
        total = total + torch.narrow(squares, 1, start, x.shape[1])
    return x / torch.pow(total * (alpha / size) + bias, beta)


@converter("Dropout")
def _dropout_attribute(call: Call) -> Any:
    """Dropout in inference: the input unchanged, and a mask of ones if it is requested."""
    mask = torch.ones_like(call[0], dtype=torch.bool) if call.wants(1) else None
    return call[0], mask


@converter("Dropout", since=12)
def dropout(call: Call) -> Any:
    ratio = call.scalar(1, 0.5, "ratio")
    if not call.scalar(2, False, "training_mode") or ratio == 0.0:
        return _dropout_attribute(call)
    if call.wants(1):
        raise OnnxError("the mask of a dropout in training cannot be imported")
    return F.dropout(call[0], ratio, True)
