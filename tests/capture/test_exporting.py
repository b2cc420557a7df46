"""What a model does only because it is exported is left out, and a refusal is one message.

A model's own checkpoints: gradients as in the model, and a note.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tensoropt.capture import capture
from tensoropt.capture.exporting import _EAGER_NOTE
from tensoropt.errors import CaptureError
from tests.models import Call, trained_by
from tests.situations import gradients

NOTE = "the model's own checkpointing is replaced"


def test_both_kinds_give_the_graph_of_a_model_without():
    graphs = [capture(*build()).graph for build in (gradients.build_reentrant, gradients.build_not_reentrant)]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert all(tensor.requires_grad for tensor in graphs[0].parameters)
    assert all(any(note.startswith(NOTE) for note in graph.notes) for graph in graphs)


def test_a_reentrant_checkpoint_of_what_has_no_gradient_trains_nothing():
    graph = capture(*gradients.build_idle_reentrant()).graph
    assert trained_by(graph) == {"head.weight", "head.bias"}
    assert any("gives no gradient, as in the model" in note for note in graph.notes)


def test_a_selective_checkpoint():
    """Keeps products and computes the rest again."""

    def policy(ctx, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "mm" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(m, x):
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        made = checkpoint(functools.partial(m.layer), x, use_reentrant=False, context_fn=context)
        return torch.tanh(made).sum()

    graph = capture(Call(forward, layer=nn.Linear(8, 8)), (torch.randn(4, 8),)).graph
    assert trained_by(graph) == {"layer.weight", "layer.bias"}
    assert any(note.startswith(NOTE) for note in graph.notes)


def moved(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Keeps its router's type in forward, as sparse models of ``transformers`` do."""

    def forward(m, x):
        m.router = m.router.to(dtype)
        return m.router(x.to(dtype)).sum()

    return Call(forward, router=nn.Linear(4, 2))


def test_a_layer_that_has_its_type_already_stays():
    graph = capture(moved(), (torch.randn(3, 4),)).graph
    assert [op.target.split(".")[1] for op in graph.operators] == ["linear", "sum"]
    with pytest.raises(CaptureError, match=r"m\.router\.to"):
        capture(moved(torch.float64), (torch.randn(3, 4),))


def test_a_model_that_needs_eager_mode_is_exported_so():
    """It leaves its mask out under a compiler and then reads it, as some encoder-decoders do."""

    def forward(m, x):
        mask = None if torch.compiler.is_compiling() else x.new_ones(x.shape)
        return (m.layer(x) * mask.cos()).sum()

    captured = capture(Call(forward, layer=nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert _EAGER_NOTE in captured.graph.notes
    assert _EAGER_NOTE not in capture(moved(), (torch.randn(3, 4),)).graph.notes


def test_a_refusal_prints_nothing(capfd):
    def branches(m, x):
        y = m.layer(x)
        return y.sum() if y.mean() > 0 else y.prod()

    with pytest.raises(CaptureError, match=r"use torch\.where"):
        capture(Call(branches, layer=nn.Linear(4, 4)), (torch.randn(3, 4),))
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""
