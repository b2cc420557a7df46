"""torchtitan's trainer by a plan, beside the same in one process."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tensoropt.errors import MissingExtraError, PlanError
from tensoropt.ranks.pool import RankPool
from tests.integrations.planned import close, ran_by, write_plan

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")

import tests.integrations.titan_on_cpu  # noqa: F401, before torchtitan's own modules

# isort: split
from torch.nn.attention.flex_attention import and_masks, create_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
from torchtitan.config import CompileConfig, ConfigManager
from torchtitan.models.common.attention import (
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
)

from tensoropt.integrations.torchtitan import PlanTitanTrainer, by_plan
from tensoropt.integrations.torchtitan_model import document_mask, explored_model, explored_spec
from tests.integrations import titan_jobs as jobs


def ran(what: str, folder: Path, kind: str, ranks: RankPool | None = None) -> Any:
    return ran_by(jobs.__file__, what, folder, kind, ranks, jobs.SOURCE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process finds without a plan."""
    return cache(lambda what: jobs.alone(what, tmp_path_factory.mktemp(what)))


@pytest.mark.distributed
def test_trains_as_one_process_does(ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran("briefly_trained", tmp_path, "data", ranks), alone("briefly_trained"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["data", "tensor", "data in micro-batches"])
def test_trains_and_continues_as_one_process_does(
    kind: str, ranks: RankPool, alone: Any, tmp_path: Path
) -> None:
    """Losses, norms, rates, tokens and validation of 50 steps of two batches by groups, an average, and a run
    from the middle."""
    found = ran("trained", tmp_path, kind, ranks)
    assert (len(found["losses"]), len(found["resumed"]["losses"])) == (jobs.STEPS, jobs.STEPS // 2)
    close(found, alone("trained"))


@pytest.mark.slow
@pytest.mark.distributed
def test_trains_under_torchrun(alone: Any, tmp_path: Path) -> None:
    close(ran("briefly_trained", tmp_path, "tensor"), alone("briefly_trained"))


@pytest.mark.slow
@pytest.mark.distributed
def test_continues_under_another_plan(ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    ran("trained", tmp_path, "data", ranks)
    close(ran("continued", tmp_path, "tensor", ranks), alone("trained")["resumed"])


@pytest.mark.slow
@pytest.mark.distributed
def test_trains_in_stages_and_keeps_no_checkpoint_of_torchtitan(
    ranks: RankPool, alone: Any, tmp_path: Path
) -> None:
    close(ran("briefly_trained", tmp_path, "pipeline", ranks), alone("briefly_trained"))
    said = ran("saved_in_stages", tmp_path, "pipeline", ranks)["said"]
    assert "leave checkpoint.enable out, and write tensoropt.save_checkpoint(" in said


def test_documents_are_masked_as_by_torchtitan() -> None:
    loader = jobs.Texts.Config().build(dp_world_size=1, dp_rank=0, seq_len=16, local_batch_size=3)
    positions = next(iter(loader))[0]["positions"]
    theirs = and_masks(get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions))
    assert torch.equal(document_mask(positions), create_mask(theirs, 3, 1, 16, 16, device="cpu"))


def test_torchtitans_command_line_takes_the_plan() -> None:
    words = ["--module", jobs.__name__, "--config", "planned", "--plan", "plan.json", "--training.steps", "7"]
    config = ConfigManager().parse_args(words)
    assert (type(config), config.plan, config.training.steps) == (PlanTitanTrainer.Config, "plan.json", 7)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_plan(tmp_path_factory.mktemp("plan"), "alone", jobs.SOURCE)


def changed(**changes: Any) -> Any:
    """A configuration with other settings, named by section."""
    config = jobs.config()
    parts = {
        section: replace(getattr(config, section), **change) if isinstance(change, dict) else change
        for section, change in changes.items()
    }
    return replace(config, **parts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"parallelism": {"tensor_parallel_degree": 2}},
            "cannot follow parallelism.tensor_parallel_degree=2",
        ),
        ({"parallelism": {"data_parallel_replicate_degree": 2}}, "how the model is divided; leave it out"),
        ({"compile": CompileConfig(enable=True)}, "cannot follow compile.enable=True"),
        ({"training": {"enable_cpu_offload": True}}, "where the model's parameters are"),
        ({"checkpoint": {"create_seed_checkpoint": True}}, "are the same under every plan"),
        ({"comm": {"mode": "fake_backend"}}, "comm.mode='fake_backend'"),
        ({"override": {"imports": ["a.b"]}}, "write them into its configuration"),
        (
            {"training": {"mixed_precision_param": "bfloat16"}},
            "pass float32, or explore with --dtype bfloat16",
        ),
        ({"model_spec": None}, "but model_spec is missing"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_plan_cannot_do_is_refused(change: dict[str, Any], says: str, plan: str) -> None:
    with pytest.raises(PlanError) as error:
        by_plan(changed(**change), plan).build()
    assert says in str(error.value)


def test_a_plan_is_needed_and_a_cross_entropy() -> None:
    with pytest.raises(PlanError, match="PlanTitanTrainer has no plan; pass --plan"):
        by_plan(jobs.config()).build()
    with pytest.raises(PlanError, match="but loss is MSELoss"):
        explored_model(changed(loss=MSELoss.Config()), explored_spec(jobs.config().model_spec))
    chunked = changed(loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()))
    with torch.device("meta"):
        explored_model(chunked, explored_spec(chunked.model_spec))


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PlanTitanTrainer.__module__, explored_model.__module__):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # importing it fails
    with pytest.raises(MissingExtraError, match=r"package torchtitan, which.*'tensoropt\[torchtitan\]'"):
        importlib.import_module(PlanTitanTrainer.__module__)
