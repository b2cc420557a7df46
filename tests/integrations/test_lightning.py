"""What Lightning's Trainer is refused by a plan, and modules of all kinds."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

import tensoropt
from tensoropt.errors import PlanError
from tensoropt.integrations.lightning import PlanStrategy
from tests.integrations import lightning_jobs as jobs
from tests.integrations.planned import ran_by, write_plan


def test_loaders_of_other_rows_are_refused(ranks, tmp_path):
    said = ran_by(jobs, "misused", tmp_path, "data", ranks)
    assert "this loader has batch_size=3; pass batch_size=2 or 4" in said["size"]
    assert "its data set makes the batches, and their rows cannot be divided" in said["items"]
    assert "has no length, so ranks cannot agree" in said["no length"]
    assert "gives rank 0 of 1 its rows, but the plan asks this rank for share 0 of 2" in said["other"]
    assert "has 1 rows, which cannot be divided among the 2 data-parallel ranks" in said["last"]
    assert "pass drop_last=True" in said["last"]
    assert "has 1 rows, which cannot be divided among the 2 data-parallel ranks" in said["last of own"]
    assert "range of this loader draws on one rank rows that it does not draw on another" in said["apart"]
    assert "has batch_size=4; pass batch_size=2" in said["own order, whole"]
    assert said["left out"] == said["own share"] == said["own order"] == ""


@pytest.fixture
def job():
    """A job of this process alone, as Lightning begins it, and its end."""
    with mock.patch.dict(os.environ):
        yield
        tensoropt.shutdown()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("plan"), "alone")


class Wider(jobs.Tuning):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2).requires_grad_(trained)


class Twofold(jobs.Tuning):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [jobs.groups(self.model), jobs.groups(self.model)]


class Configured(jobs.Tuning):
    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = plan

    def configure_model(self) -> None:
        tensoropt.parallelize(self.model, self.plan)


def refused(folder: Path, strategy: PlanStrategy, module: Any, **more: Any) -> str:
    made = jobs.trainer(folder, None, 2, strategy=strategy, **more)
    with pytest.raises(PlanError) as error:
        made.fit(module, *jobs.loaders())
    return str(error.value)


@pytest.mark.usefixtures("job")
def test_what_a_plan_cannot_do_is_refused(plan, tmp_path):
    said = refused(tmp_path, PlanStrategy(plan), jobs.Tuning(), precision="bf16-mixed")
    assert "cannot follow precision='bf16-mixed'" in said
    assert "explore with --dtype bfloat16" in said
    assert "PlanStrategy has no plan" in refused(tmp_path, PlanStrategy(), jobs.Tuning())
    assert "2 with trained parameters: model, other" in refused(tmp_path, PlanStrategy(plan), Wider(True))
    said = refused(tmp_path, PlanStrategy(plan, model="model"), Wider(True))
    assert "also trains other.weight, other.bias" in said
    said = refused(tmp_path, PlanStrategy(plan), Twofold(), gradient_clip_val=None, accumulate_grad_batches=1)
    assert "configure_optimizers returned 2" in said
    said = refused(tmp_path, PlanStrategy(plan), jobs.Tuning(), callbacks=[EMAWeightAveraging()])
    assert "EMAWeightAveraging averages a copy of the whole module" in said


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_a_module_that_parallelizes_and_one_with_frozen_parts(plan, tmp_path):
    losses = []
    for strategy, module in ((PlanStrategy(), Configured(plan)), (PlanStrategy(plan), Wider(False))):
        made = jobs.trainer(tmp_path, None, 2, strategy=strategy)
        made.fit(module, *jobs.loaders())
        losses.append(module.losses)
    assert losses[0] == losses[1]
    made.save_checkpoint(tmp_path / "whole")
    saved = torch.load(tmp_path / "whole" / "meta.pt")
    assert set(saved["state_dict"]) == {"other.weight", "other.bias"}
    plain = jobs.trainer(tmp_path / "plain", None, 2, strategy="auto")
    plain.fit(jobs.Tuning(), *jobs.loaders())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    again = jobs.trainer(tmp_path, None, 4, strategy=PlanStrategy(plan))
    with pytest.raises(PlanError, match="PlanStrategy did not write it"):
        again.fit(jobs.Tuning(), *jobs.loaders(), ckpt_path=tmp_path / "plain.ckpt")
    again.validate(jobs.Tuning(), jobs.loaders()[1], ckpt_path=tmp_path / "plain.ckpt", verbose=False)
