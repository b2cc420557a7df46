"""What accelerate's ``Accelerator`` is refused by a plan.

Batches of texts that are shorter than the plan's.
"""

import warnings
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from tensoropt.errors import PlanError
from tensoropt.integrations.accelerate import PlanAccelerator
from tests.integrations import accelerate_jobs as jobs
from tests.integrations.planned import ran_by, write_plan
from tests.integrations.trainer_jobs import GLOBAL, LENGTH, Texts, build, to_the_longest


def test_what_is_done_with_other_rows_or_whole_models_is_refused(ranks, tmp_path):
    said = ran_by(jobs, "misused", tmp_path, "data", ranks)
    assert "prepare the model before its loaders" in said["early"]
    assert "runs one model by its plan, but GPT2LMHeadModel is another" in said["second"]
    assert said["same"]
    assert "leave use_gather_object out" in said["gather"]
    assert "use tensoropt.save_checkpoint(path, model, optimizer, scheduler)" in said["save"]
    assert "use tensoropt.load_checkpoint" in said["load"]
    assert "use tensoropt.save_pretrained(model, folder)" in said["model"]
    assert "with tensoropt.whole(model) as plain" in said["state"]


@pytest.fixture
def fresh():
    """A process that has made no ``Accelerator``: the settings of the first one stay."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh")
def test_what_a_plan_cannot_do_is_refused():
    with pytest.raises(PlanError, match=r"cannot follow split_batches=True: each rank loads.*leave"):
        PlanAccelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(PlanError, match="configured for mixed precision, but the plan decides"):
        PlanAccelerator(cpu=True, mixed_precision="bf16")


@pytest.fixture
def accelerator(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)
    plan = write_plan(tmp_path, "alone", "tests.integrations.trainer_jobs:masked_recipe")
    yield PlanAccelerator(plan=plan, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def loader(collate: Any = to_the_longest, **more: Any) -> DataLoader[Any]:
    return DataLoader(Texts(8), GLOBAL, collate_fn=collate, **more)


def without_mask(rows: Any) -> dict[str, torch.Tensor]:
    batch = to_the_longest(rows)
    del batch["attention_mask"]
    return batch


def longer(rows: Any) -> dict[str, torch.Tensor]:
    return {name: value.repeat(1, LENGTH) for name, value in to_the_longest(rows).items()}


def test_batches_get_the_plans_length(accelerator):
    plain, model = build(), accelerator.prepare(build())
    batch = next(iter(loader()))
    with pytest.warns(UserWarning, match=r"plan's length of 8 tokens .*: 56% of the first one is padding"):
        (ours, *_) = accelerator.prepare(loader())
    assert {name: tuple(value.shape) for name, value in ours.items()} == dict.fromkeys(
        batch, (GLOBAL, LENGTH)
    )
    length = batch["labels"].shape[1]
    for name, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        assert torch.equal(ours[name][:, :length], batch[name])
        assert (ours[name][:, length:] == filler).all()
    assert float(model(**ours).loss.detach()) == pytest.approx(float(plain(**batch).loss.detach()), rel=1e-5)
    with warnings.catch_warnings():  # it was said
        warnings.simplefilter("error")
        assert next(iter(accelerator.prepare(loader())))["labels"].shape == (GLOBAL, LENGTH)
    assert next(iter(accelerator.prepare(loader(num_workers=1))))["labels"].shape == (GLOBAL, LENGTH)


@pytest.mark.slow
def test_longer_batches_are_refused_and_ones_without_a_mask_left(accelerator):
    model = accelerator.prepare(build())
    with pytest.raises(PlanError, match='padding="max_length", truncation=True, max_length=8'):
        model(**next(iter(accelerator.prepare(loader(longer)))))
    assert next(iter(accelerator.prepare(loader(without_mask))))["labels"].shape == (GLOBAL, 5)
