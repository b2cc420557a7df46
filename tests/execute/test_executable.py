"""Plans in every form they are passed in become one thing that runs."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tensoropt.engine.engine import Engine
from tensoropt.engine.models import load_model
from tensoropt.errors import PlanError
from tensoropt.execute.executable import (
    AnyStrategy,
    Executable,
    devices_in,
    executable_from_dict,
    executable_of,
    is_spmd,
    resolve_plan,
)
from tests.execute import jobs
from tests.placement.execute.random_placed import random_placed


def strategies() -> list[AnyStrategy]:
    loaded = load_model(jobs.spec("mlp"))
    return [jobs.strategy_of(loaded, (2, 2, 2), 1), random_placed(loaded.graph, 3, random.Random(1))]


@pytest.mark.parametrize(("number", "devices", "micro", "text"), [(0, 4, 2, "2x2"), (1, 3, 1, "placed on 3")])
def test_an_executable_says_what_it_takes(number: int, devices: int, micro: int, text: str) -> None:
    executable = executable_of(strategies()[number])
    assert (executable.devices, executable.micro_batches, executable.mesh_text) == (devices, micro, text)


@pytest.mark.parametrize("number", [0, 1])
def test_plain_data_give_the_same_executable(number: int) -> None:
    loaded = load_model(jobs.spec("mlp"))
    executable = executable_of(strategies()[number])
    data = json.loads(json.dumps(executable.to_dict()))
    again = executable_from_dict(data, loaded.graph)
    assert type(again) is type(executable)
    assert again.to_dict() == executable.to_dict()
    assert (devices_in(data), is_spmd(data)) == (executable.devices, executable.spmd)
    with pytest.raises(PlanError, match="no mesh"):
        devices_in({})


@pytest.mark.parametrize("number", [0, 1])
def test_a_strategy_resolves_to_itself_on_another_capture(number: int) -> None:
    strategy = strategies()[number]
    resolved = resolve_plan(strategy)
    assert (resolved.mode, resolved.compute_dtype) == ("train", "float32")
    bound = resolved.bind(load_model(jobs.spec("mlp")).graph)
    assert isinstance(bound, Executable)
    assert bound.to_dict() == executable_of(strategy).to_dict()
    resolved.warn_of_other_devices(torch.device("cuda"))  # it does not know what it was made for
    with pytest.raises(PlanError, match="a strategy does not say how the model is called"):
        resolved.example_call()


def test_engines_answer_what_a_tracker_counts() -> None:
    loaded = load_model(jobs.spec("mlp"))
    engine = executable_of(jobs.strategy_of(loaded, (1, 1), 1)).engine(loaded.values)
    assert isinstance(engine, Engine)
    counted = {t.untyped_storage().data_ptr() for t in engine.parameter_tensors()}
    assert {leaf.untyped_storage().data_ptr() for leaf in engine.shards.leaves.values()} <= counted
    assert len(engine.gradient_tensors()) >= 1
