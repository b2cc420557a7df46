"""Models whose forward changes buffers: in any plan each step changes them as the model itself does."""

import random
from pathlib import Path
from typing import Any

import pytest

from tensoropt.engine.models import CapturedModel, ModelSpec, load_model
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import MicroBatchRefused
from tensoropt.verify.fake_ranks import check_on_fake_ranks
from tensoropt.verify.random_strategies import micro_strategies, random_pipeline, random_strategy
from tensoropt.verify.rank_checks import CheckOptions
from tensoropt.verify.real_ranks import verify_strategies
from tests.simulate.strategies import facts_by_group, memory_curve
from tests.verify.test_verify import assert_sent

FILE = Path(__file__).parents[1] / "situations" / "state.py"
BATCH_ALONE = ["step_counter", "queue", "codebook", "running_scale", "shifted", "instance_norms", "set_data"]
"""Which run in one micro-batch only, most as their buffers follow the batch."""
ANY = ["decay", "teacher", "spectral", "spectral_hooks", "group_norms"]
OPTIONS = CheckOptions(optimizer="sgd", memory=False, timed_steps=0)


def spec(name: str) -> ModelSpec:
    return ModelSpec(f"{FILE}:build_{name}", 0)


def agree(loaded: CapturedModel, strategies: list[Any], pool: RankPool) -> None:
    """After three steps all ranks have the buffers, parameters and gradients of the unsplit model."""
    found = verify_strategies(loaded.spec, [one.to_data() for one in strategies], pool=pool, options=OPTIONS)
    for one in found:
        assert one.error is None
        assert one.numerics_ok
        assert one.differences.buffer is not None
        assert one.differences.buffer < 1e-5


@pytest.mark.parametrize("name", BATCH_ALONE)
def test_micro_batches_are_refused(name):
    with pytest.raises(MicroBatchRefused):
        micro_strategies(load_model(spec(name)).graph, 2)


@pytest.mark.slow
@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize(
    ("name", "micro_batches"), [*((n, 4) for n in ANY[:4]), *((n, 1) for n in BATCH_ALONE)]
)
def test_any_strategy_changes_buffers_once_a_step(name, micro_batches, ranks):
    loaded, rng, mesh = load_model(spec(name)), random.Random(0), (micro_batches, 2)
    micro = micro_strategies(loaded.graph, micro_batches)
    agree(loaded, [random_strategy(loaded.graph, mesh, micro, rng, recompute=0.3) for _ in range(2)], ranks)


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize(
    ("name", "micro_batches", "schedule"),
    [*((n, 1, "gpipe") for n in ("running_scale", "shifted", "instance_norms")), ("decay", 2, "1f1b")],
)
def test_stages_are_sent_the_buffers_that_they_read(name, micro_batches, schedule, ranks):
    loaded, rng = load_model(spec(name)), random.Random(0)
    drawn = [random_pipeline(loaded.graph, (micro_batches, 2), schedule, rng) for _ in range(3)]
    if name in ("running_scale", "decay"):
        assert any(one.sent_buffers for one in drawn)
    agree(loaded, drawn, ranks)


@pytest.mark.sweep(quick=2)
@pytest.mark.parametrize("name", ["queue", "codebook", "teacher", "decay", "running_scale", "instance_norms"])
def test_memory_and_collectives_are_predicted(name):
    loaded, rng = load_model(spec(name)), random.Random(0)
    for micro_batches in (1, 2) if name in ANY else (1,):
        mesh, micro = (micro_batches, 2), micro_strategies(loaded.graph, micro_batches)
        for _ in range(3):
            strategy = random_strategy(loaded.graph, mesh, micro, rng, recompute=0.3)
            found = check_on_fake_ranks(loaded, strategy, "sgd")
            predicted = memory_curve(strategy, facts_by_group(strategy), "sgd").peak.total
            assert predicted == pytest.approx(found.memory_tracked_bytes, rel=0.01, abs=64)
            assert_sent(strategy, found)
