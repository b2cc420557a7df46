"""A model is as it was after its code has run."""

from __future__ import annotations

import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.unchanged import unchanged


class Busy(nn.Module):
    """Counts, remembers and keeps statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.calls, self.seen, self.last = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.layer(x)
        return self.norm(self.last).square().mean()


def test_everything_is_put_back():
    model, x = Busy(), torch.randn(8, 4)
    mean, seen = model.norm.running_mean.clone(), model.seen
    with unchanged(model, values=True):
        model(x)
        model.more = torch.ones(1)
        assert model.calls == 1
    assert (model.calls, model.seen, model.last) == (0, [], None)
    assert model.seen is seen
    assert not hasattr(model, "more")
    assert torch.equal(model.norm.running_mean, mean)
    assert int(model.norm.num_batches_tracked) == 0


def test_a_capture_computes_and_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4)
    generator = torch.get_rng_state()
    capture(model, (x,), loss=torch.sum)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
