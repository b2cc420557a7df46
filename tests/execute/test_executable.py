"""Plans in every form they are passed in become one thing that runs."""

import json
import random

import pytest
import torch

from tensoropt.engine.engine import Engine
from tensoropt.engine.models import load_model
from tensoropt.errors import PlanError
from tensoropt.execute.executable import engine_of, resolve_plan, strategy_from_data
from tensoropt.sharding.strategy import ParallelStrategy
from tensoropt.verify.random_strategies import random_pipeline
from tests.execute import jobs
from tests.placement.execute.random_placed import random_placed


def strategies() -> list[ParallelStrategy]:
    graph = load_model(jobs.spec("mlp")).graph
    return [
        jobs.strategy_of(load_model(jobs.spec("mlp")), (2, 2, 2), 1),
        random_placed(graph, 3, random.Random(1)),
        random_pipeline(graph, (4, 2, 2), "1f1b", random.Random(1), 0.3),
    ]


@pytest.mark.parametrize(
    ("number", "devices", "micro", "text", "stages", "places"),
    [(0, 4, 2, "2x2", 1, 1), (1, 3, 1, "placed on 3", 3, 3), (2, 4, 4, "pp2x2", 2, 2)],
)
def test_a_strategy_says_what_it_takes(number, devices, micro, text, stages, places):
    strategy = strategies()[number]
    assert (strategy.devices, strategy.micro_batches, strategy.mesh_text) == (devices, micro, text)
    assert (len(strategy.stages), strategy.places) == (stages, places)
    assert {strategy.place_of(stage) for stage in range(stages)} == set(range(places))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_stages_make_results_and_hold_parameters(number):
    strategy = strategies()[number]
    source = strategy.graph.atoms.graph
    assert strategy.maker(source.outputs[0]) in range(len(strategy.stages))
    for tensor in source.parameters:
        assert set(strategy.holders(tensor.name)) <= set(range(len(strategy.stages)))
        assert strategy.holders(tensor.name)
    assert not strategy.sent_buffers


@pytest.mark.parametrize("number", [0, 1, 2])
def test_plain_data_give_the_same_strategy(number):
    strategy = strategies()[number]
    data = json.loads(json.dumps(strategy.to_data()))
    again = strategy_from_data(data, load_model(jobs.spec("mlp")).graph)
    assert type(again) is type(strategy)
    assert again.to_data() == strategy.to_data()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_strategy_resolves_to_itself_on_another_capture(number):
    strategy = strategies()[number]
    resolved = resolve_plan(strategy)
    assert (resolved.mode, resolved.compute_dtype) == ("train", "float32")
    bound = resolved.bind(load_model(jobs.spec("mlp")).graph)
    assert bound.to_data() == strategy.to_data()
    resolved.warn_of_other_devices(torch.device("cuda"))  # it does not know what it was made for
    with pytest.raises(PlanError, match="a strategy has no example call"):
        resolved.example_call()


def test_engines_answer_what_a_tracker_counts():
    loaded = load_model(jobs.spec("mlp"))
    engine = engine_of(jobs.strategy_of(loaded, (1, 1), 1), loaded.values)
    assert isinstance(engine, Engine)
    counted = {t.untyped_storage().data_ptr() for t in engine.parameter_tensors()}
    assert {leaf.untyped_storage().data_ptr() for leaf in engine.shards.leaves.values()} <= counted
    assert len(engine.gradient_tensors()) >= 1
