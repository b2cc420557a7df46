"""What accelerate's ``Accelerator`` is refused by a plan."""

from __future__ import annotations

import pytest
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState

from tensoropt.errors import PlanError
from tensoropt.integrations.accelerate import PlanAccelerator
from tests.integrations import accelerate_jobs as jobs
from tests.integrations.planned import ran_by


@pytest.mark.distributed
def test_what_is_done_with_other_rows_or_whole_models_is_refused(ranks, tmp_path):
    said = ran_by(jobs, "misused", tmp_path, "data", ranks)
    assert "prepare the model before its loaders" in said["early"]
    assert "this loader has batch_size=3; pass batch_size=2 or 4" in said["size"]
    assert "runs one model by its plan, but GPT2LMHeadModel is another" in said["second"]
    assert said["rows"] == [2, 2]
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
