"""FLOP of operators: PyTorch's counts, and of those it lacks our own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


def _recurrent_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    """One layer and direction: every step multiplies its input and its state with all gates' weights."""
    return 2 * int(x[0]) * int(x[1]) * (int(w[0]) * int(w[1]) + int(h[0]) * int(h[1]))


def _recurrent_backward_flops(x: Any, w: Any, h: Any, *_: Any, **__: Any) -> int:
    return 2 * _recurrent_flops(x, w, h)


_FLOPS = {
    **flop_registry,
    torch.ops.aten.mkldnn_rnn_layer: shape_wrapper(_recurrent_flops),
    torch.ops.aten.mkldnn_rnn_layer_backward: shape_wrapper(_recurrent_backward_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        _attention_backward_flops
    ),
}
"""PyTorch's counts, and those it lacks: it knows GPUs' kernels of attention and LSTM layers only."""


def _grouped_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * int(x[0]) * int(x[1]) * int(w[-1])


def _grouped_backward_flops(x: Any, w: Any, *_: Any, **__: Any) -> int:
    return 2 * _grouped_flops(x, w)


_EXPERTS = {
    "aten::_grouped_mm": shape_wrapper(_grouped_flops),
    "transformers::grouped_mm_fallback": shape_wrapper(_grouped_flops),
    "transformers::grouped_mm_fallback_backward": shape_wrapper(_grouped_backward_flops),
}
"""Products of mixtures of experts, by name: those of ``transformers`` exist where that is imported."""


def flops_of(operator: Any) -> Any:
    """What counts an operator's FLOP, called with its arguments and ``out_val``; None for one that is not
    counted."""
    return _FLOPS.get(operator._overloadpacket) or _EXPERTS.get(operator._schema.name)
