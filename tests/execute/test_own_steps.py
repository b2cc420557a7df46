"""Steps of a script's own training are timed beside its plan, and the training is as it was."""

from __future__ import annotations

import json

import pytest
import torch

import tensoropt
from tensoropt.errors import PlanError
from tensoropt.execute.own_steps import STEPS, WARM_UP, read_steps, steps_file
from tensoropt.profiling.store import ProfileStore

MODEL, BATCH = "zoo:mlp", 8
NEEDED = WARM_UP + STEPS + 1


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with ProfileStore(folder / "p.sqlite") as store:
        found = tensoropt.explore(
            tensoropt.load_model(MODEL, batch=BATCH), cluster="cpu:1", measure="never", store=store
        )
    found.plan(0).save(folder / "plan.json")
    return folder / "plan.json"


def losses(plan, steps: int, *, tune: bool) -> list[float]:
    loaded = tensoropt.load_model(MODEL, batch=BATCH)
    model = tensoropt.parallelize(loaded.model, plan, tune=tune, as_measured=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        loss = model(*loaded.args, **loaded.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_a_training_that_is_timed_is_the_same(plan):
    steps_file(plan).unlink(missing_ok=True)
    assert losses(plan, NEEDED + 2, tune=True) == losses(plan, NEEDED + 2, tune=False)
    (rank,) = read_steps(plan)
    assert len(rank["steps"]) == STEPS
    assert all(0 < end < 10 for _, end in rank["steps"])


def test_a_job_that_is_too_short_says_how_long_it_should_be(plan):
    steps_file(plan).unlink(missing_ok=True)
    losses(plan, NEEDED - 2, tune=True)
    with pytest.raises(PlanError, match=f"at least {NEEDED} steps"):
        read_steps(plan)


def test_damage_is_said(plan):
    for text in (
        "",
        json.dumps({"schema": "other"}),
        json.dumps({"schema": "tensoropt.steps/1", "ranks": [{}]}),
    ):
        steps_file(plan).write_text(text)
        with pytest.raises(PlanError, match="run the job again"):
            read_steps(plan)
    steps_file(plan).unlink()


def test_it_needs_the_plans_file(plan):
    loaded = tensoropt.load_model(MODEL, batch=BATCH)
    with pytest.raises(PlanError, match="pass its path"):
        tensoropt.parallelize(loaded.model, tensoropt.load_plan(plan), tune=True)
