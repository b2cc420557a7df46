"""What a model does while gradients are switched off changes values, not the gradients of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.rebuild import rebuild


def bounded(v: torch.Tensor) -> None:
    v.clamp_(min=0.4)


def a_part_set(v: torch.Tensor) -> None:
    v[:, 1:3] = 2.0


def a_part_bounded(v: torch.Tensor) -> None:
    v[:, 0].clamp_(max=0.1)


def added(v: torch.Tensor) -> None:
    v += v.round()


def written(v: torch.Tensor) -> None:
    v.copy_(v.sort(dim=-1)[0])


class Writes(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], None]):
        super().__init__()
        self.a, self.write = nn.Linear(4, 4), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = nn.functional.softplus(self.a(x)).clone()
        with torch.no_grad():
            self.write(v)
        return (v * x).square().mean()


@pytest.mark.parametrize("write", [bounded, a_part_set, a_part_bounded, added, written])
def test_what_is_written_without_gradients_keeps_the_gradient_of_what_was_there(
    write: Callable[[torch.Tensor], None],
) -> None:
    torch.manual_seed(0)
    model, x = Writes(write), torch.randn(3, 4)
    graph = capture(model, (x,), compare=False).graph
    found = torch.autograd.grad(rebuild(graph, model)(x), list(model.parameters()))
    wanted = torch.autograd.grad(model(x), list(model.parameters()))
    assert all(float(w.abs().max()) > 1e-3 for w in wanted)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w)
