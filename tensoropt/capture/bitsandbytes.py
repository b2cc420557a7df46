"""Conversion of ``bitsandbytes`` layers to TensorOpt's quantised layers, whose weights have the same bytes.

A layer of bitsandbytes keeps its scales outside of the state dict, and multiplies in a function that takes
Python objects; neither can be exported or split. TensorOpt's layers compute the same: ``Linear4bit`` in its
compute dtype, ``Linear8bitLt`` as in training on a CPU, without rounding of activations (on a GPU, LLM.int8()
rounds activations to int8, too). If the scales are quantised, too, bitsandbytes has one second-level scale
for each 256 blocks of weights, which may lie in several rows. TensorOpt's layers have one for each group of
blocks within a row, which takes a few bytes more.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn

from tensoropt.errors import CaptureError
from tensoropt.ops.quantised import QuantisedLinear, Scheme, WeightBytes, nested_table, quantised

_LARGEST_INT8 = 127
_NESTED = "-double"


def replace_layers(model: nn.Module) -> tuple[str, ...]:
    """Replace the quantised linear layers of ``bitsandbytes`` in a model, in place.

    Returns:
        A note for the user, or nothing if the model has no such layer.

    Raises:
        CaptureError: a layer cannot be converted; the message has the layer's name and the remedy.
    """
    package: Any = sys.modules.get("bitsandbytes")
    if package is None:  # then no layer is one of its
        return ()
    made: dict[nn.Module, QuantisedLinear] = {}
    for path, holder in [*model.named_modules()]:
        for name, layer in holder._modules.items():
            if isinstance(layer, package.nn.Linear4bit):
                convert = _of_4_bits
            elif isinstance(layer, package.nn.Linear8bitLt) and not layer.state.has_fp16_weights:
                convert = _of_8_bits
            else:
                continue
            if layer not in made:
                made[layer] = convert(f"{path}.{name}".lstrip("."), layer)
                made[layer].train(layer.training)
            holder._modules[name] = made[layer]
    if not made:
        return ()
    schemes = {str(layer.scheme) for layer in made.values()}
    rounded = "; on GPUs, bitsandbytes also rounds their inputs to int8" if "int8" in schemes else ""
    return (
        f"{len(made)} layers of bitsandbytes became layers with the same weight bytes "
        f"({', '.join(sorted(schemes))}), which can be split{rounded}",
    )


def _of_4_bits(name: str, layer: Any) -> QuantisedLinear:
    weight, bias = layer.weight, layer.bias
    state = getattr(weight, "quant_state", None) or layer.quant_state
    compute = layer.compute_dtype if layer.compute_type_is_set else None
    if state is None:
        scheme = weight.quant_type + _NESTED * bool(weight.compress_statistics)
        if not weight.is_meta:
            raise CaptureError(f"`{name}` is not quantised yet; move the model to a device first: .to('cpu')")
        return QuantisedLinear(quantised(weight, scheme), scheme, bias, compute)
    if getattr(state, "packing_format_for_cpu", False):
        raise CaptureError(
            f"`{name}` was packed for inference on this CPU, which reorders its bytes; load the model anew, "
            "or train it before it runs in eval mode"
        )
    rows, columns = state.shape
    if columns != layer.in_features or columns % state.blocksize:
        raise CaptureError(
            f"`{name}` has a scale for every {state.blocksize} weights, which do not divide the "
            f"{columns} inputs of a row, so that rows cannot be divided over ranks; leave the layer out of "
            "quantisation (llm_int8_skip_modules)"
        )
    scheme = state.quant_type + _NESTED * state.nested
    _check_table(name, state.code, Scheme.of(scheme).table)
    blocks = columns // state.blocksize
    codes, scales = weight.data.view(torch.uint8).view(rows, columns // 2), state.absmax.view(rows, blocks)
    if not state.nested:
        stored = WeightBytes(codes, scales.float())
        return QuantisedLinear(stored, scheme, bias, compute)
    nested = state.state2
    _check_table(name, nested.code, nested_table())
    group = math.gcd(blocks, nested.blocksize)
    firsts = torch.arange(0, rows * blocks, group, device=codes.device)
    of_groups = nested.absmax[firsts // nested.blocksize].view(rows, blocks // group)
    stored = WeightBytes(codes, scales, of_groups.float(), state.offset.float().reshape(()))
    return QuantisedLinear(stored, scheme, bias, compute)


def _of_8_bits(name: str, layer: Any) -> QuantisedLinear:
    weight = layer.weight
    if weight.dtype != torch.int8:
        if not weight.is_meta:
            raise CaptureError(f"`{name}` is not quantised yet; move the model to a device first: .to('cpu')")
        return QuantisedLinear(quantised(weight, "int8"), "int8", layer.bias)
    scales = layer.state.SCB if weight.SCB is None else weight.SCB
    if scales is None:
        raise CaptureError(f"`{name}` has quantised weights without scales (SCB); load the model anew")
    stored = WeightBytes(weight.data, scales.float() * (1.0 / _LARGEST_INT8))
    return QuantisedLinear(stored, "int8", layer.bias)


def _check_table(name: str, own: torch.Tensor, ours: tuple[float, ...]) -> None:
    if own.is_meta or (
        own.numel() == len(ours) and torch.allclose(own.float().cpu(), torch.tensor(ours), atol=1e-6)
    ):
        return
    raise CaptureError(
        f"`{name}` has a custom table of values (quant_map), and only the tables of bitsandbytes for nf4 and "
        "fp4 are supported; quantise the layer with nf4 or fp4"
    )
