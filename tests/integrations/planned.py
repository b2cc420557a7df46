"""Plans for two ranks, the jobs that run by them, and the comparison of what they found."""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tensoropt
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import Configuration, batch_strategies, enumerate_configurations
from tensoropt.verify.random_strategies import micro_strategies, random_strategy
from tests.docs.programs import run_job
from tests.execute.test_jobs import finished, torchrun
from tests.execute.test_train import write_strategy

SOURCE = "tests.integrations.trainer_jobs:recipe"
RECIPES = {"lengthened": "masked_recipe", "tuned": "adapted_recipe"}
"""What the plans of these jobs are made for."""
KINDS = ["data", "tensor", "data in micro-batches", "pipeline"]


def write_plan(folder: Path, kind: str, source: str = SOURCE) -> str:
    """A plan for two ranks that divides the batch and nothing else, or everything but the batch; or one for a
    single device."""
    graph = load_model(ModelSpec(source)).graph
    mesh = (2,) if kind == "alone" else (1 + ("micro" in kind), 2)
    along, data, rng = micro_strategies(graph, mesh[0]), batch_strategies(graph), random.Random(1)
    given = {}
    for group in graph.groups:
        kept = [Configuration(group, (along[group.name], data[group.name]))]
        if kind == "tensor":
            others = enumerate_configurations(graph.atoms, group, mesh, along[group.name])
            kept = [c for c in others if c.strategies[1] != data[group.name]] or list(others)
        if kind != "alone":
            given[group.name] = rng.choice(kept)
    strategy = random_strategy(graph, mesh, along, rng, given=given)
    assert kind == "alone" or {label for c in given.values() for label in c.labels} != {"none"}
    shares = 2 if "data" in kind else 1
    return str(write_strategy(folder / f"plan{shares}", strategy, source))


def ran_by(module: Any, what: str, folder: Path, kind: str, ranks: RankPool | None) -> Any:
    """What two ranks found in a job of a module's file under a plan: real processes, or those of the pool,
    which start sooner."""
    source = SOURCE.replace("recipe", RECIPES[what]) if what in RECIPES else getattr(module, "SOURCE", SOURCE)
    plan = kind if kind in ("pipeline", "placed") else write_plan(folder, kind, source)
    words = [module.__file__, what, str(folder), plan]
    if ranks is None:
        code, output = finished(torchrun(*words))
        assert code == 0, output
    else:
        run_job(ranks, ["--nproc-per-node", "2", *words])
    return json.loads((folder / "found.json").read_text())


def take_part(jobs: Mapping[str, Callable[[Path, str | None], Any]]) -> None:
    """What a file of jobs does under torchrun (``FILE WHAT FOLDER PLAN``): rank 0 writes what it found to
    ``FOLDER/found.json``."""
    what, folder, plan = sys.argv[1:]
    found = jobs[what](Path(folder), plan)
    if int(os.environ.get("RANK", 0)) == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    tensoropt.shutdown()


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Whether all figures, of which there are some of each kind, are the expected ones."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, dict):
            close(found[name], values)
        else:
            assert found[name] == pytest.approx(values, rel=1e-5), name
            assert values != [], name
