"""What forward makes lies where the model does, with its values; what no plan can hold is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture, rebuild
from tensoropt.errors import CaptureError


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.step = nn.Linear(4, 4), forward

    def forward(self, x):
        return self.step(self, x)


def _labels(m, x):
    return nn.functional.cross_entropy(m.a(x), torch.arange(4))


def _positions(m, x):
    near = torch.arange(4)[:, None] >= torch.arange(4)[None]
    return (m.a(x) * torch.zeros(4, 4).masked_fill(near, 2.0)).sum() + torch.linspace(0, 1, 3).sum()


def _values(m, x):
    return (m.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.as_tensor([[5.0]])).sum()


def _named_device(m, x):
    return (m.a(x.to("cpu")) * torch.ones(4, device="cpu")).cpu().sum()


def _data(m, x):
    return (m.a(x) * m.a(x).data.exp()).sum()


@pytest.mark.parametrize("forward", [_labels, _positions, _values, _named_device, _data])
def test_constants_have_their_values_wherever_the_model_is_captured(forward):
    model, x = Net(forward), torch.randn(4, 4)
    with torch.device("meta"):
        empty = Net(forward)
    graph = capture(empty, (x.to("meta"),)).graph
    assert graph.operators == capture(model, (x,)).graph.operators
    assert not any(value.is_meta for value in graph.constants.values())
    found = rebuild(graph, model)(x)
    torch.testing.assert_close(found, model(x))


def _written_data(m, x):
    m.count.data.mul_(2.0).add_(1.0)
    m.count.data = m.count + 1
    return m.a(x).sum() * m.count


def test_a_buffer_changed_through_data_is_seen():
    model = Net(_written_data)
    model.register_buffer("count", torch.ones(()))
    graph = capture(model, (torch.randn(4, 4),)).graph
    assert list(graph.mutations) == ["b_model_count"]


@pytest.mark.parametrize(
    ("forward", "pattern"),
    [
        (lambda m, x: (m.a(x) * torch.eye(4).to_sparse().to_dense()).sum(), "sparse tensor"),
        (lambda m, x: torch.autograd.grad(m.a(x).sum(), m.a.weight)[0].sum(), "gradient inside forward"),
        (lambda m, x: nn.Linear(4, 4)(m.a(x)).sum(), "parameter in forward"),
        (lambda m, x: m.a(x + torch.randn(4, generator=torch.Generator())).sum(), "Generator"),
    ],
)
def test_a_refusal_has_the_models_line_and_a_remedy(forward, pattern):
    with pytest.raises(CaptureError, match=rf"test_forward_calls\.py:\d+ .*{pattern}.*not supported; \w+"):
        capture(Net(forward), (torch.randn(4, 4),))


def test_seeding_in_forward_is_noted_and_does_not_touch_the_scripts_numbers():
    def forward(m, x):
        torch.manual_seed(3)
        return m.a(x).sum()

    model = Net(forward)
    before = torch.get_rng_state()
    graph = capture(model, (torch.zeros(4, 4),)).graph
    assert any("seeds the random numbers" in note for note in graph.notes)
    assert torch.equal(before, torch.get_rng_state())
