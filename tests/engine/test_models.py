"""Models that are kept: small ones beside the last one, as long as their files do not change.

Models that are built without values: every process gives them the same.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tensoropt.engine import drawn_values, models
from tensoropt.engine.drawn_values import draw_values
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.errors import PlanError
from tensoropt.verify.reference import module_difference

FILE = """
from torch import nn, ones, sum

def build():
    return nn.Sequential(nn.Linear(8, {width}), nn.Flatten(0)), (ones(1, 8),), {{}}, sum
"""


def write(file: Path, width: int) -> ModelSpec:
    file.write_text(FILE.format(width=width))
    os.utime(file, ns=(width, width))
    return ModelSpec(f"{file}:build")


def test_small_models_are_kept_until_their_files_change(tmp_path, monkeypatch):
    first, second = write(tmp_path / "first.py", 4), write(tmp_path / "second.py", 4)
    model = load_model(first).captured.model
    load_model(second)
    assert load_model(first).captured.model is model
    # What the model gave is not kept beside another one.
    load_model(first).results["some"] = 1
    load_model(second)
    assert not load_model(first).results
    write(tmp_path / "first.py", 6)
    assert load_model(first).captured.model[0].out_features == 6
    kept = load_model(first).captured.model
    monkeypatch.setattr(models, "_KEPT_BYTES", 0)
    write(tmp_path / "second.py", 6)
    load_model(second)
    assert load_model(first).captured.model is not kept


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.shift = torch.linspace(0, 1, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.embed(ids) + self.shift)), ids)


def on_meta() -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Tied(), (torch.arange(6),)


def in_fake_mode() -> tuple[nn.Module, tuple[torch.Tensor]]:
    with FakeTensorMode():
        model = Tied()
    return model, (torch.arange(6),)


@pytest.mark.parametrize("build", [on_meta, in_fake_mode])
def test_a_model_without_values_is_compared_with_its_graph(build):
    found = module_difference(0, 1, ModelSpec(f"{__name__}:{build.__name__}"), 0)
    assert found is not None
    assert found.ok
    assert not found.not_finite


def test_every_process_draws_the_same_and_what_is_shared_stays_shared():
    first, second = (on_meta()[0] for _ in range(2))
    (ids,) = draw_values(first, (torch.zeros(3, dtype=torch.int64, device="meta"),), 7)
    draw_values(second, (), 7)
    assert ids.tolist() == [0, 0, 0]
    assert first.head.weight is first.embed.weight
    assert first.head.weight.requires_grad
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert (first.norm.running_var > 0).all()
    given = nn.Linear(2, 2)
    before = given.weight.detach().clone()
    draw_values(given, (), 7)
    assert torch.equal(given.weight, before)


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(drawn_values, "_SHARE", 2**60)
    with pytest.raises(PlanError, match=r"built without values .* too large .*; give it fewer layers"):
        draw_values(on_meta()[0], (), 0)
