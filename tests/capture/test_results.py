"""Outputs of any form, taken apart and put together again, with all their tensors or with the loss alone."""

from __future__ import annotations

import collections
import dataclasses
from collections import namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from tensoropt.capture import OutputPlaces, Returned, WithResults, capture
from tensoropt.capture.loss import find_loss
from tensoropt.errors import CaptureError
from tests.models import Call


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: Any
    scores: Any = None


@dataclasses.dataclass
class LooksAtItsFields:
    scores: torch.Tensor
    loss: torch.Tensor
    classes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.classes = self.scores.shape[-1]


class Attributes:
    def __init__(self, loss: torch.Tensor, scores: torch.Tensor):
        self.loss, self.scores = loss, [scores]


class Otherwise(NamedTuple):
    scores: torch.Tensor
    objective: torch.Tensor


class Computed:
    """The loss is no attribute that can be set."""

    def __init__(self, values: torch.Tensor):
        self.values = values

    @property
    def loss(self) -> torch.Tensor:
        return self.values.mean()


Pair = namedtuple("Pair", "loss scores")
LOSS, SCORES = torch.ones((), requires_grad=True), torch.zeros(2, 3)
OUTPUTS = [
    LOSS,
    (LOSS, SCORES),
    {"scores": SCORES, "loss": LOSS, "name": "x", "none": None},
    collections.OrderedDict(scores=SCORES, loss=LOSS),
    collections.defaultdict(list, scores=SCORES, total=LOSS),
    collections.UserDict(scores=SCORES, loss=LOSS),
    [SCORES, LOSS],
    Pair(LOSS, SCORES),
    Otherwise(SCORES, LOSS),
    Frozen(LOSS, SCORES),
    LooksAtItsFields(SCORES, LOSS),
    Attributes(LOSS, SCORES),
    SimpleNamespace(loss=LOSS, scores=SCORES),
    CausalLMOutput(loss=LOSS, logits=SCORES),
]


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: type(output).__name__)
def test_outputs_are_made_again(output: Any) -> None:
    returned, found = find_loss(output)
    assert found is LOSS
    results, tensors = OutputPlaces.of(output, LOSS)
    assert results.loss is not None
    assert tensors[results.loss] is LOSS
    again = results.rebuild([tensor * 2 for tensor in tensors])
    assert type(again) is type(output)
    assert float(returned.loss_in(again)) == 2.0
    assert len(tensors) == len(OutputPlaces.of(again, None)[1])
    if "name" in getattr(output, "keys", tuple)():
        assert (again["name"], again["none"]) == ("x", None)
    alone = returned.rebuild(torch.tensor(3.0))
    assert type(alone) is type(output)
    assert float(returned.loss_in(alone)) == 3.0
    assert len(OutputPlaces.of(alone, None)[1]) == 1


def test_attrs_classes() -> None:
    attrs = pytest.importorskip("attrs")
    kind = attrs.make_class("Out", {"_logits": attrs.field(), "loss": attrs.field()}, frozen=True)
    again = find_loss(kind(logits=SCORES, loss=LOSS))[0].rebuild(torch.tensor(3.0))
    assert (float(again.loss), again._logits) == (3.0, None)


def test_what_cannot_be_made_is_refused_by_its_name() -> None:
    returned, _ = find_loss(Computed(torch.randn(3, requires_grad=True)))
    with pytest.raises(CaptureError, match=r"test_results\.Computed, and no object of this class"):
        returned.rebuild(torch.tensor(3.0))


def test_the_graph_has_all_results() -> None:
    def forward(m: Any, x: torch.Tensor, also: bool = False) -> Any:
        scores = m.linear(x)
        return Attributes(scores.sum(), scores) if also else "nothing"

    module = WithResults(Call(forward, linear=nn.Linear(3, 2)), None, Returned(Attributes, "loss"))
    graph = capture(module, (torch.ones(4, 3),), {"also": True}, mode="inference").graph
    assert [graph.tensors[name].shape for name in graph.outputs] == [(), (4, 2)]
    assert module.results.loss == 0
    with pytest.raises(CaptureError, match="returns no tensor in this call, but str"):
        capture(module, (torch.ones(4, 3),), mode="inference")


def test_a_call_without_a_loss() -> None:
    module = WithResults(nn.Linear(3, 2), None, Returned(tuple, 1, item=True))
    module(torch.ones(4, 3))
    assert module.results.loss is None
