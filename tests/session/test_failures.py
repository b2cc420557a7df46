"""An error of PyTorch's becomes a refusal that names stage, operator and line; our own stays what it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensoropt.capture import capture
from tensoropt.errors import InfeasibleError, UnsupportedError
from tensoropt.profiling.fact_finding import find_facts_of_all
from tensoropt.session.failures import failures_named


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.body(x)).sum()


def test_the_operator_in_hand_is_named_with_its_line():
    graph = capture(Net(), (torch.ones(2, 4),)).graph

    def run(op):
        return torch.ones(2, 3) @ torch.ones(2, 3)

    with (
        pytest.raises(
            UnsupportedError, match=r"^Net is not supported: .* aten\.linear\.default of `body` \(.*"
        ),
        failures_named("Net", graph),
    ):
        run(graph.operators[0])


def test_the_stage_is_the_one_that_failed():
    with (
        pytest.raises(UnsupportedError, match="finding what its operators keep and take failed"),
        failures_named("Net"),
    ):
        find_facts_of_all([Broken()])


class Broken:
    """A workload whose tensors PyTorch refuses to make."""

    @property
    def inputs(self):
        return torch.zeros(-1)


@pytest.mark.parametrize("error", [KeyError("x"), AssertionError("y"), InfeasibleError("z"), MemoryError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as found, failures_named("Net"):
        raise error
    assert found.value is error
