"""What a plan would not follow is refused in one process as well: modes, settings and buffers of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.engine.agreement import content_hash
from tensoropt.engine.counts import unsplit_strategy
from tensoropt.errors import PlanError
from tensoropt.execute import original_shape, parallelize
from tensoropt.sharding.atoms import refine_graph
from tensoropt.sharding.groups import group_operators

X = torch.randn(8, 4)


class StaysInEvaluation(nn.BatchNorm1d):
    """As frozen norms are written."""

    def train(self, mode: bool = True) -> StaysInEvaluation:
        return super().train(False)


def parallel(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), norm(4), nn.Dropout(0.3), nn.Linear(4, 1))
    model[3].weight.requires_grad_(False)
    captured = capture(model, (X,), loss=torch.sum)
    strategy = unsplit_strategy(group_operators(refine_graph(captured.graph)))
    return parallelize(model, strategy, (X,), loss=torch.sum, as_measured=False)


def set_buffer(model: Any) -> None:
    model[1].running_mean = torch.zeros(4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m[1].eval(), "1 is in evaluation mode while the plan runs it in training mode"),
        (lambda m: m.eval()[2].train(), "2 is in training mode while the plan runs it in evaluation mode"),
        (lambda m: setattr(m[2], "p", 0.1), "2.p is 0.1 now, but was 0.3 when the model was parallelized"),
        (lambda m: delattr(m[2], "p"), "2.p is None now"),
        (lambda m: setattr(m[1], "momentum", 0.01), "1.momentum is 0.01 now"),
        (set_buffer, "the buffer 1.running_mean was replaced after parallelize"),
        (lambda m: m[3].weight.requires_grad_(), "3.weight requires a gradient now, but was frozen"),
    ],
)
def test_what_a_module_reads_of_itself(change: Any, says: str) -> None:
    model = parallel()
    model(X)
    change(model)
    with pytest.raises(PlanError, match=says):
        model(X)


def test_what_is_followed_or_not_read() -> None:
    model = parallel()
    model[0].in_features = 5  # which no forward reads
    model[1].running_mean.zero_()
    model[0].eval()
    assert torch.isfinite(model.eval()(X))
    assert torch.isfinite(model.train()(X))
    assert original_shape(model[0].weight) == (4, 4)


@pytest.mark.parametrize("training", [False, True])
def test_modules_that_stay_in_evaluation(training: bool) -> None:
    """Also where the model as a whole was in evaluation when it was parallelized."""
    model = nn.Sequential(nn.Linear(4, 4), StaysInEvaluation(4)).train(training)
    captured = capture(model, (X,), loss=torch.sum)
    strategy = unsplit_strategy(group_operators(refine_graph(captured.graph)))
    parallelize(model, strategy, (X,), loss=torch.sum, as_measured=False)
    model.train()
    model(X)
    model[1].training = True
    with pytest.raises(PlanError, match="1 is in training mode"):
        model(X)


def test_hashes_tell_bits_shapes_and_types() -> None:
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
        torch.randn(70_001),
        torch.randn(5).bfloat16(),
        torch.tensor(True),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(0),
    ]
    hashes = [int(content_hash(value)) for value in values]
    assert len(set(hashes)) == len(values)
    assert hashes == [int(content_hash(value.clone())) for value in values]
    large = torch.randn(1 << 20)
    before = int(content_hash(large))
    large[777_777] = torch.nextafter(large[777_777], torch.tensor(torch.inf))
    assert int(content_hash(large)) != before
    # Of a piece that begins anywhere, and of one that is not contiguous.
    assert content_hash(large[3:9]) == content_hash(large[3:9].clone())
    assert content_hash(large.view(4, -1).t()) == content_hash(large.view(4, -1).t().contiguous())
