"""Which stages may have their backward taken apart, by the ways that gradients take."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensoropt.capture import capture
from tensoropt.pipeline.apart import Unfit, unfit_parameter
from tensoropt.pipeline.stages import Cutter
from tensoropt.plan.problem import prepare
from tests.situations import readers

W = readers.WIDTH


class Several(nn.Module):
    """What PyTorch computes as one operator, with parameters that its parts read once or several times."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(W, W), nn.Linear(W, W)
        self.own = nn.Parameter(torch.randn(1, W))
        self.recurrent = {"gru": nn.GRU, "lstm": nn.LSTM}.get(how, nn.Identity)(W, W)
        self.norm = nn.GroupNorm(2, W)
        self.tower = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.how in ("gru", "lstm"):
            h = self.recurrent(h[None].expand(3, -1, -1))[0][-1]
        elif self.how == "cosine":
            h = h * F.cosine_similarity(h, self.own)[:, None]
        elif self.how == "norm":
            h = self.norm(h) * self.own
        elif self.how == "a tower read once":
            h = h * torch.tanh(self.tower(x))
        elif self.how == "a tower read twice":
            side = torch.tanh(self.tower(x))
            h = torch.tanh(h * side) + side
        elif self.how == "penalty":
            return self.last(h).square().mean() + self.last.weight.square().mean()
        return self.last(h).square().mean()


@cache
def cutter_of(how: str) -> Cutter:
    torch.manual_seed(0)
    return Cutter(prepare(capture(Several(how), (torch.randn(8, W),), {})).graph)


def behind_the_first(cutter: Cutter) -> Unfit | None:
    """Of the stage behind the first layer."""
    return unfit_parameter(cutter.stage(1, len(cutter.graph.groups)).graph)


@pytest.mark.parametrize("how", ["norm", "cosine", "lstm", "a tower read once"])
def test_one_way_from_a_parameter_to_what_arrived_is_found(how):
    assert behind_the_first(cutter_of(how)) is None


@pytest.mark.parametrize(
    ("how", "parameter"),
    [
        ("gru", "recurrent_weight_hh"), ("a tower read twice", "tower_weight"), ("penalty", "last_weight"),
    ],
)  # fmt: skip
def test_several_ways_are_not(how, parameter):
    unfit = behind_the_first(cutter_of(how))
    assert unfit is not None
    assert parameter in unfit.parameter


@pytest.mark.parametrize("how", ["early", "split", "merged", "normed"])
def test_what_is_made_of_parameters_alone_may_not_depart(how):
    model, args = readers.made_of_parameters(how)
    cutter = Cutter(prepare(capture(model, args, {})).graph)
    ends, lost = [0, *cutter.cuts, len(cutter.graph.groups)], 0
    for start in ends[1:-1]:
        for stop in (one for one in ends if one > start):
            stage = cutter.stage(start, stop)
            fixed = {t.name for t in stage.graph.atoms.graph.parameters}
            made = set(fixed)
            for op in stage.graph.atoms.graph.operators:
                if op.inputs() and made.issuperset(op.inputs()):
                    made.update(op.outputs)
            if any(name in made for name in stage.departing):
                lost += 1
                unfit = unfit_parameter(stage.graph)
                assert unfit is not None
    assert lost
