"""Writes into parts of complex tensors compute and differentiate as the model's own."""

import pytest
import torch
from torch import nn

from tensoropt.capture import capture, rebuild


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.a, self.write = nn.Linear(6, 16), write
        self.w = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x):
        f = torch.fft.rfft(self.a(x)) * self.w
        out = torch.zeros_like(f)
        self.write(out, f)
        return torch.fft.irfft(out, n=16).square().sum()


def _slice(out, f):
    out[..., :3] = f[..., 3:6]
    out[1:, 4:8:2] = f[1:, :2] * 2


def _first(out, f):
    out[:2] = f[2:]
    out[1] = f[3]


def _select(out, f):
    out[:, -1] = f[:, 0]
    out[2] = f[0]


def _diagonal(out, f):
    out.diagonal().copy_(f[0, :4])
    out.diagonal(1, -2, -1).mul_(2).add_(f[0, :4])


def _index(out, f):
    out[torch.tensor([0, 2]), torch.tensor([1, 3])] = f[0, :2]
    out[torch.tensor([1, 3])] += f[torch.tensor([0, 2])]


def _conjugate(out, f):
    out[..., :4] = f[..., :4].conj()
    out[..., 5] = 1.0


@pytest.mark.parametrize("write", [_slice, _first, _select, _diagonal, _index, _conjugate])
def test_writes_into_complex_tensors_are_equal_with_their_gradients(write):
    model, x = Net(write), torch.randn(4, 6)
    rebuilt = rebuild(capture(model, (x,)).graph, model)
    found = []
    for call in (model, rebuilt):
        loss = call(x)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss, *gradients))
    torch.testing.assert_close(found[1], found[0])
