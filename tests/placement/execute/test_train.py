"""Placed plan files: trained by a job, verified, and run in a user's process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import tensoropt
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.placement import simulate_placement
from tensoropt.placement.points import plan_part
from tensoropt.placement.prices import PlacedPrices
from tensoropt.plan.plan import CollectiveCount, MeshInfo, ModelInfo, Plan, Predicted, load_plan
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tensoropt.ranks.pool import RankPool
from tensoropt.verify import verify_plan
from tensoropt.verify.predict import predict_placed
from tensoropt.verify.random_strategies import random_placement, random_splits
from tests.docs.programs import run_job
from tests.execute import jobs
from tests.execute.test_train import SOURCE
from tests.placement.execute.cases import opened


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random placement of the perceptron on two ranks of this machine, as a planner would write it."""
    folder = tmp_path_factory.mktemp("placed")
    groups, cluster, rng = opened("mlp").graph, load_cluster("local:2"), random.Random(2)
    costs = CostSource(cluster, ProfileStore(folder / "profiles.db"), Settings(), None)
    priced = PlacedPrices(groups, cluster, costs).price(random_splits(groups, 2, rng, 0.5))
    simulated = simulate_placement(priced.problem, random_placement(priced.graph, 2, rng))
    _, prediction = predict_placed(priced, simulated.placement)
    part = plan_part(priced.graph, simulated)
    sends = [row for row in prediction.collectives if row["kind"] == "send"]
    plan = Plan(
        planner="random",
        model=ModelInfo(source=SOURCE, fingerprint=groups.atoms.graph.fingerprint),
        cluster=cluster.to_dict(),
        mesh=MeshInfo(shape=(2,), names=("device",), placed=True),
        micro_batches=1,
        optimizer="adam",
        operators=part.operators,
        hubs={},
        parameters=part.parameters,
        stages=part.stages,
        predicted=Predicted(
            memory_bytes=simulated.memory_bytes,
            time_s=simulated.time_s,
            compute_s=0,
            communication_s=0,
            additive_memory_bytes=0,
            collectives=tuple(CollectiveCount.model_validate(row) for row in sends),
        ),
    )
    plan.save(folder / "plan.json")
    return folder / "plan.json"


@pytest.mark.distributed
def test_ranks_of_a_job_train_it(plan_file: Path, tmp_path: Path, ranks: RankPool) -> None:
    """What each of torchrun's processes does; ``tests/execute/test_train.py`` has jobs of real processes."""
    file = tmp_path / "result.json"
    command = f"--nproc-per-node 2 -m tensoropt.execute {plan_file} --steps 4 --json {file}"
    run_job(ranks, command.split())
    result = json.loads(file.read_text())
    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]


@pytest.mark.distributed
def test_verify_a_plan(plan_file: Path) -> None:
    result = verify_plan(load_plan(plan_file), where="fake", progress=lambda *_: None)
    (found,) = result["plans"]
    assert result["ok"], found
    assert found["collectives_predicted"]
    assert found["mesh"] == "placed on 2"
    # 42 KB are tracked where 40 KB are predicted, and up to 3 KB more in a process that ran other tests
    # before; where these come from is not known. Larger placed plans are held closer in test_ranks.py.
    assert found["memory_tracked_bytes"] == pytest.approx(found["memory_predicted_bytes"], rel=0.13)


def test_a_plan_file_in_one_process(plan_file: Path) -> None:
    (model, args, _), (plain, _, _) = jobs.spec("mlp").build(), jobs.spec("mlp").build()
    tensoropt.parallelize(model, plan_file, args)
    assert float(model(*args).detach()) == pytest.approx(float(plain(*args).detach()), rel=1e-6)
