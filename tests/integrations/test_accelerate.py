"""accelerate's ``Accelerator`` by a plan, beside the same in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import DataLoaderConfiguration
from accelerate.state import AcceleratorState

from tensoropt.errors import PlanError
from tensoropt.integrations.accelerate import PlanAccelerator
from tensoropt.ranks.pool import RankPool
from tests.integrations import accelerate_jobs as jobs
from tests.integrations.planned import KINDS, close, ran_by


def ran(what: str, folder: Path, kind: str, ranks: RankPool | None = None) -> Any:
    return ran_by(jobs.__file__, what, folder, kind, ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["briefly_trained", "sampled"])
def test_trains_as_one_process_does(what: str, ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran(what, tmp_path, "data", ranks), alone(what))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS[1:])
def test_trains_in_the_loaders_own_order(kind: str, ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran("sampled", tmp_path, kind, ranks), alone("sampled"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_continues_as_one_process_does(
    kind: str, ranks: RankPool, alone: Any, tmp_path: Path
) -> None:
    """Losses, norms, rates and evaluations of 54 steps, an average, and a run from the middle again."""
    found = ran("trained", tmp_path, kind, ranks)
    assert (len(found["first"]["losses"]), len(found["again"]["norms"])) == (2 * jobs.EPOCHS * 3, 27)
    close(found, alone("trained"))


@pytest.mark.slow
@pytest.mark.distributed
def test_data_without_a_length(ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran("streamed", tmp_path, "data", ranks), alone("streamed"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    ["data", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tensor", "pipeline", "placed"))],
)
def test_metrics_of_an_evaluation(kind: str, ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran("measured", tmp_path, kind, ranks), alone("measured"))


@pytest.mark.slow
@pytest.mark.distributed
def test_trains_under_torchrun(alone: Any, tmp_path: Path) -> None:
    close(ran("briefly_trained", tmp_path, "tensor"), alone("briefly_trained"))


@pytest.mark.distributed
def test_what_is_done_with_other_rows_or_whole_models_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    said = ran("misused", tmp_path, "data", ranks)
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
def fresh() -> Iterator[None]:
    """A process that has made no ``Accelerator``: the settings of the first one stay."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh")
def test_what_a_plan_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cannot follow split_batches=True: each rank loads.*leave"):
        PlanAccelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(PlanError, match="configured for mixed precision, but the plan decides"):
        PlanAccelerator(cpu=True, mixed_precision="bf16")
