"""A loss that is cut off from the parameters is refused with the line that does it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import CaptureError

X = torch.randn(4, 8)


class Cut(nn.Module):
    """A layer, then something."""

    def __init__(self, cut):
        super().__init__()
        self.layer, self.cut = nn.Linear(8, 8), cut

    def forward(self, x):
        return self.cut(self.layer(x)).square().mean()


def without_gradients(h):
    with torch.no_grad():
        return torch.tanh(h)


def in_inference_mode(h):
    with torch.inference_mode():
        return torch.tanh(h)


@pytest.mark.parametrize(
    ("cut", "how"),
    [
        (lambda h: h.detach(), r"detach\(\)"),
        (lambda h: torch.tanh(h.data), r"\.data"),
        (without_gradients, r"tanh\(\), without gradients"),
        (in_inference_mode, r"tanh\(\), without gradients"),
    ],
)
def test_the_line_is_named(cut, how):
    line = cut.__code__.co_firstlineno
    with pytest.raises(
        CaptureError, match=rf"cut off from the parameters at .*test_detaching\.py:\d+ \({how}"
    ) as e:
        capture(Cut(cut), (X,))
    found = int(str(e.value).split("test_detaching.py:")[1].split(" ")[0])
    assert line <= found <= line + 2
    with pytest.raises(CaptureError, match=r"loss= returns has no gradient: it is cut off .*test_detaching"):
        capture(Cut(cut), (X,), loss=lambda out: out * 2)
