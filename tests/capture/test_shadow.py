"""A model is captured alike wherever its tensors lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.capture.shadow import shadowed


class Keeps(nn.Module):
    """Tied weights, a buffer, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.arange(8.0))
        self.plain = torch.arange(8.0) * 2

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shift = torch.arange(8.0, device=x.device) + self.plain
        return (self.second(self.first(x) * self.scale.exp()) + shift - y).square().mean()


def batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device)


def with_stored_values() -> Keeps:
    """Parameters on the meta device, and all else with its value."""
    with torch.device("meta"):
        model = Keeps()
    model.scale, model.plain = torch.arange(8.0), torch.arange(8.0) * 2
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_without_values_change_nothing(device: str) -> None:
    """Not even constants that are made from what the model stores; the model stays as it was."""
    wanted = capture(Keeps(), batch()).graph
    model = with_stored_values()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers()), "plain": model.plain}
    found = capture(model, batch(device)).graph
    assert found.fingerprint == wanted.fingerprint
    assert found.aliases == wanted.aliases
    assert [p.requires_grad for p in found.parameters] == [p.requires_grad for p in wanted.parameters]
    assert found.constants.keys() == wanted.constants.keys()
    assert len(found.constants) >= 2
    assert all(torch.equal(value, wanted.constants[name]) for name, value in found.constants.items())
    after = {**dict(model.named_parameters()), **dict(model.named_buffers()), "plain": model.plain}
    assert all(after[name] is value for name, value in before.items())
    assert model.second.weight is model.first.weight


def test_a_shadow_is_taken_away_after_an_error() -> None:
    model = Keeps()
    weight = model.first.weight

    def fail() -> None:
        with shadowed(model) as stored:
            assert model.first.weight.is_meta
            assert model.first.weight is model.second.weight
            assert model.plain.is_meta
            assert stored["first.weight"] is weight
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.first.weight is weight
    assert not model.plain.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_without_data_may_be_given_another_type(dtype):
    """Its buffers are cast in forward: a constant without data has none in another type either."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.register_buffer("frequencies", torch.arange(8.0), persistent=False)

        def forward(self, x):
            angles = self.frequencies.float().expand(1, 8).to(x.device)
            return (self.a(x) * angles.cos().to(x.dtype)).float().sum()

    with torch.device("meta"):
        model = Rotary()
    model.to(dtype)
    graph = capture(model, (torch.empty(4, 8, dtype=dtype, device="meta"),)).graph
    whole = Rotary().to(dtype)
    assert graph.operators == capture(whole, (torch.ones(4, 8, dtype=dtype),)).graph.operators
