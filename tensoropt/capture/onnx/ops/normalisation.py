"""Normalisation. Batch norm uses the file's running statistics, unless it was exported for training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tensoropt.capture.onnx.importer import Call, converter
from tensoropt.capture.onnx.values import OnnxError, Traced


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
        raise OnnxError("a scale per group, as before opset 21, cannot be imported")
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
