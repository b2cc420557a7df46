"""Outputs of any form, taken apart and put together again."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from tensoropt.capture import OutputPlaces, Returned, WithResults, capture, find_loss
from tensoropt.errors import CaptureError


@dataclass(frozen=True)
class Own:
    loss: Any
    scores: Any = None


class Attributes:
    def __init__(self, loss: torch.Tensor, scores: torch.Tensor):
        self.loss, self.scores = loss, [scores]


Pair = namedtuple("Pair", "loss scores")
LOSS, SCORES = torch.ones((), requires_grad=True), torch.zeros(2, 3)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        (LOSS, SCORES),
        {"scores": SCORES, "loss": LOSS, "name": "x", "none": None},
        [SCORES, LOSS],
        Pair(LOSS, SCORES),
        Own(LOSS, SCORES),
        Attributes(LOSS, SCORES),
        CausalLMOutput(loss=LOSS, logits=SCORES),
    ],
    ids=lambda output: type(output).__name__,
)
def test_outputs_are_made_again(output: Any) -> None:
    returned, _ = find_loss(output)
    results, tensors = OutputPlaces.of(output, returned)
    assert results.loss is not None
    assert tensors[results.loss] is LOSS
    again = results.rebuild([tensor * 2 for tensor in tensors])
    assert type(again) is type(output)
    assert float(returned.loss_in(again)) == 2.0
    assert len(tensors) == len(OutputPlaces.of(again, returned)[1])
    if isinstance(output, dict) and "name" in output:
        assert (again["name"], again["none"]) == ("x", None)
    alone, kept = OutputPlaces.of(output, returned, everything=False)
    assert [tensor is LOSS for tensor in kept] == [True]
    assert len(OutputPlaces.of(alone.rebuild([LOSS]), returned)[1]) == 1


def test_a_call_without_a_loss() -> None:
    results, tensors = OutputPlaces.of((SCORES,), Returned(tuple, 0, (0, 1)))
    assert results.loss is None
    assert len(tensors) == 1
    assert OutputPlaces.of({"scores": SCORES}, None)[0].loss is None


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, also: bool = False) -> Any:
        scores = self.linear(x)
        return Own(scores.sum(), scores) if also else "nothing"


def test_the_graph_has_all_results() -> None:
    module = WithResults(Scores(), None, Returned(Own, "loss", attributes=("loss", "scores")))
    graph = capture(module, (torch.ones(4, 3),), {"also": True}, mode="inference").graph
    assert [graph.tensors[name].shape for name in graph.outputs] == [(), (4, 2)]
    assert module.results.loss == 0
    with pytest.raises(CaptureError, match="returns no tensor in this call, but str"):
        capture(module, (torch.ones(4, 3),), mode="inference")
