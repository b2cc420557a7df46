"""Placed plan files: trained by a job, verified, and run in a user's process."""

from __future__ import annotations

import json
import random

import pytest

import tensoropt
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.plan import load_plan
from tensoropt.verify import verify_plan
from tensoropt.verify.predict import predict_placed
from tensoropt.verify.random_strategies import random_placement, random_splits
from tests.docs.programs import run_job
from tests.execute import jobs
from tests.execute.test_train import SOURCE
from tests.placement.execute.cases import costs_on, opened, plan_of


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """A random placement of the perceptron on two ranks of this machine."""
    groups, costs, rng = opened("mlp").graph, costs_on("local:2"), random.Random(2)
    priced = PlacedPrices(groups, costs.cluster, costs).price(random_splits(groups, 2, rng, 0.5))
    placement = random_placement(priced.graph, 2, rng)
    _, prediction = predict_placed(priced, placement)
    sends = [row for row in prediction.collectives if row["kind"] == "send"]
    file = tmp_path_factory.mktemp("placed") / "plan.json"
    plan_of(priced, placement, SOURCE, sends).save(file)
    return file


@pytest.mark.distributed
def test_ranks_of_a_job_train_it(plan_file, tmp_path, ranks):
    """What each of torchrun's processes does; ``tests/execute/test_train.py`` has jobs of real processes."""
    file = tmp_path / "result.json"
    command = f"--nproc-per-node 2 -m tensoropt.execute {plan_file} --steps 4 --json {file}"
    run_job(ranks, command.split())
    result = json.loads(file.read_text())
    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.distributed
def test_verify_a_plan(plan_file):
    result = verify_plan(load_plan(plan_file), where="fake", progress=lambda *_: None)
    (found,) = result["plans"]
    assert result["ok"], found
    assert found["collectives_predicted"]
    assert found["mesh"] == "placed on 2"
    # 42 KB are tracked where 40 KB are predicted, and up to 3 KB more in a process that ran other tests
    # before; where these come from is not known. Larger placed plans are held closer in test_ranks.py.
    assert found["memory_tracked_bytes"] == pytest.approx(found["memory_predicted_bytes"], rel=0.13)


def test_a_plan_file_in_one_process(plan_file):
    (model, args, _), (plain, _, _) = jobs.spec("mlp").build(), jobs.spec("mlp").build()
    tensoropt.parallelize(model, plan_file, args)
    assert float(model(*args).detach()) == pytest.approx(float(plain(*args).detach()), rel=1e-6)
