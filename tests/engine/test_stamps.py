"""Stamps of a step: every operator forward and backward, and nothing left behind."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import fx

from tensoropt.engine.engine import unsplit_strategy
from tensoropt.engine.models import ModelSpec, load_model
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.engine.stamps import stamped
from tensoropt.verify.fake_ranks import RunStep
from tensoropt.verify.random_strategies import micro_strategies, random_strategy


@pytest.fixture(scope="module")
def step() -> RunStep:
    loaded = load_model(ModelSpec("zoo:gpt-mini"))
    made = RunStep(ShardedEngine(unsplit_strategy(loaded.graph), loaded.values), loaded.inputs, "adam")
    made()
    return made


def test_operators_have_both_directions_and_add_up(step):
    with stamped(step.engine) as stamps:
        begun = time.perf_counter()
        step.model()
        took_s = time.perf_counter() - begun
    operators = step.engine.source.operators
    products = [op.name for op in operators if "linear" in op.target or "addmm" in op.target]
    assert products
    for name in products:
        assert stamps.forward_s[name] > 0, name
        assert stamps.backward_s[name] > 0, name
    assert stamps.forward_s.keys() >= {op.name for op in operators}
    assert "" in stamps.backward_s  # the leaves
    assert 0 < sum(stamps.forward_s.values()) + sum(stamps.backward_s.values()) <= took_s


def test_the_next_micro_batchs_forward_is_not_counted_to_the_leaves_of_the_one_before(monkeypatch):
    loaded = load_model(ModelSpec("zoo:gpt-mini"))
    micro = micro_strategies(loaded.graph, 2)
    strategy = random_strategy(loaded.graph, (2, 1), micro, random.Random(0))
    step = RunStep(ShardedEngine(strategy, loaded.values), loaded.inputs, "adam")
    step()
    run = fx.Interpreter.run
    monkeypatch.setattr(fx.Interpreter, "run", lambda *args: time.sleep(1.0) or run(*args))
    with stamped(step.engine) as stamps:
        step.model()
    assert stamps.backward_s[""] < 1.0


def test_results_are_those_of_the_plain_step_and_no_hook_stays(step):
    def gradients():
        step.model()
        return [g.clone() for g in step.engine.gradient_tensors()]

    plain = gradients()
    with stamped(step.engine) as stamps:
        inside = gradients()
    seen = dict(stamps.backward_s)
    after = gradients()
    for first, second, third in zip(plain, inside, after, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)
    assert stamps.backward_s == seen


def test_a_device_that_is_not_done_when_a_call_returns_is_refused(step, monkeypatch):
    monkeypatch.setattr(step.engine.runtime, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match="profiler"), stamped(step.engine):
        pass
