"""What a model does only because it is exported is left out, and a refusal is one message."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.exporting import EAGER_NOTE
from tensoropt.errors import CaptureError


class Moved(nn.Module):
    """Keeps its router's type in forward, as sparse models of ``transformers`` do."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.router, self.dtype = nn.Linear(4, 2), dtype

    def forward(self, x):
        self.router = self.router.to(self.dtype)
        return self.router(x.to(self.dtype)).sum()


def test_a_layer_that_has_its_type_already_stays():
    graph = capture(Moved(), (torch.randn(3, 4),)).graph
    assert [op.target.split(".")[1] for op in graph.operators] == ["linear", "sum"]
    with pytest.raises(CaptureError, match=r"self\.router\.to"):
        capture(Moved(torch.float64), (torch.randn(3, 4),))


class Masked(nn.Module):
    """Leaves its mask out under a compiler and then reads it, as some encoder-decoders do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        mask = None if torch.compiler.is_compiling() else x.new_ones(x.shape)
        return (self.layer(x) * mask.cos()).sum()


def test_a_model_that_needs_eager_mode_is_exported_so():
    captured = capture(Masked(), (torch.randn(3, 4),))
    assert EAGER_NOTE in captured.graph.notes
    assert EAGER_NOTE not in capture(Moved(), (torch.randn(3, 4),)).graph.notes


def test_a_refusal_prints_nothing(capfd):
    class Branches(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sum() if y.mean() > 0 else y.prod()

    with pytest.raises(CaptureError, match=r"use torch\.where"):
        capture(Branches(4, 4), (torch.randn(3, 4),))
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""
