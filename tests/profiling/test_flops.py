"""FLOP that PyTorch does not count itself, against products counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tensoropt.profiling.flops import flops_of

STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 7, 11
GATES = 4 * HIDDEN
LSTM = 2 * STEPS * BATCH * (GATES * WIDTH + GATES * HIDDEN)
"""Multiplications and additions: every step multiplies its input and its state with all gates' weights."""


@pytest.mark.parametrize(
    ("name", "flop"), [("mkldnn_rnn_layer", LSTM), ("mkldnn_rnn_layer_backward", 2 * LSTM)]
)
def test_a_recurrent_layer(name, flop):
    shapes = ((STEPS, BATCH, WIDTH), (GATES, WIDTH), (GATES, HIDDEN))
    operator = getattr(torch.ops.aten, name).default
    assert flops_of(operator)(*(torch.empty(s) for s in shapes), out_val=None) == flop


def test_attention_is_counted_as_its_products():
    q, k = torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(2, 4, 10, 8, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping={}) as counted:
        loss = (torch.softmax(q @ k.transpose(-1, -2), -1) @ k).sum()
        loss.backward()
    forward = flops_of(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    once = forward(q, k, k, out_val=None)
    assert once == 2 * (2 * 2 * 4 * 6 * 10 * 8)
    backward = flops_of(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    # Flash attention keeps no scores: its backward multiplies queries and keys once more.
    assert once + backward(q, q, k, k, out_val=None) == counted.get_total_flops() + once // 2


@pytest.mark.parametrize(("queries", "keys", "seen"), [(6, 6, 21), (4, 6, 10), (6, 4, 18)])
def test_causal_attention_is_counted_as_what_is_seen(queries, keys, seen):
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 4, keys, 8)
    aten = torch.ops.aten
    forward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert forward(q, k, k, 0.0, True, out_val=None) == 2 * 2 * (2 * 4 * 8) * seen
    backward = flops_of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    assert backward(q, q, k, k, q, q, 0.0, True, out_val=None) == 5 * 2 * (2 * 4 * 8) * seen


@pytest.mark.parametrize(("name", "times"), [("grouped_mm_fallback", 1), ("grouped_mm_fallback_backward", 2)])
def test_experts_are_counted_by_the_rows_they_get(name, times):
    pytest.importorskip("transformers.integrations.moe")
    operator = getattr(torch.ops.transformers, name).default
    rows, experts = torch.empty(12, 8), torch.empty(4, 8, 16)
    assert flops_of(operator)(rows, experts, out_val=None) == times * 2 * 12 * 8 * 16


def test_what_is_no_product_is_not_counted():
    assert flops_of(torch.ops.aten.relu.default) is None
    assert flops_of(torch.ops.aten.mm.default)(torch.empty(2, 3), torch.empty(3, 5), out_val=None) == 60
