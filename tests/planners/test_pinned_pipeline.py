"""A pinned pipeline does what a launcher was told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.launchers.job import NOTHING, LaunchedJob
from tensoropt.plan.point_records import StagesRecord
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pinned import PinnedPipelinePoint, simulate_pinned_pipeline
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.planners.test_pinned import model

SETTINGS = Settings(dtype="bfloat16", measure="never", recompute="never")


@cache
def pinned(name: str = "gpt-mini", **chosen) -> PinnedPipelinePoint:
    job = LaunchedJob(launcher="megatron", **chosen)
    settings = SETTINGS if job.recompute == NOTHING else replace(SETTINGS, recompute="auto")
    devices = job.data * job.context * job.tensor * job.places
    costs = CostSource(load_cluster(f"dgx-a100[{devices}]"), ProfileStore(":memory:"), settings)
    return simulate_pinned_pipeline(model(name), settings, costs, job)


def test_stages_schedule_and_micro_batches_are_those_asked_for():
    found = pinned(places=2, data=2, micro_batches=4, schedule="gpipe")
    strategy = found.evaluation.strategy
    assert (strategy.places, strategy.schedule, strategy.micro_batches) == (2, "gpipe", 4)
    assert strategy.mesh == (4, 2, 2)
    assert found.point.planner == "pinned"


def test_tensor_parallelism_stays_inside_stages():
    found = pinned(places=2, tensor=2, micro_batches=4)
    for stage in found.evaluation.strategy.stages:
        labels = {label for c in stage.configurations.values() for label in c.labels}
        assert any(label.startswith("in_features") for label in labels)
    kinds = {kind for kind, *_ in found.point.collectives}
    assert {"all_reduce", "send"} <= kinds


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_ranks_than_key_heads_share_them_inside_stages(sequence_parallel: bool):
    found = pinned("llama-tiny", places=2, tensor=4, micro_batches=4, sequence_parallel=sequence_parallel)
    strategy = found.evaluation.strategy
    assert strategy.mesh == (4, 2, 2, 2)
    for stage in strategy.stages:
        assert ("heads", "group") in {c.labels for c in stage.configurations.values()}


def test_tensors_cross_cuts_in_parts_of_sequences():
    found, whole = (pinned(places=2, context=context, micro_batches=4) for context in (2, 1))
    for stage in found.evaluation.strategy.stages:
        labels = [label for c in stage.configurations.values() for label in c.labels]
        assert "queries" in labels
    sent = [max(size for kind, _, size, _ in of.point.collectives if kind == "send") for of in (found, whole)]
    assert 2 * sent[0] == sent[1]


def test_a_pipeline_holds_less_of_the_model_and_zero_less_still():
    alone, sharded = (
        pinned(places=2, data=2, stage=stage, micro_batches=4).evaluation.memory[:, 2] for stage in (0, 2)
    )
    assert (sharded < 0.6 * alone).all()


def test_more_micro_batches_shrink_the_bubble():
    few, many = (pinned(places=2, data=1, micro_batches=m).evaluation.times.bubble for m in (2, 8))
    assert many < few


def test_stages_take_as_long_as_their_hosts_to_issue_them():
    """Of a model so small that the device waits for the host."""
    count = 8
    for stage in pinned(places=2, micro_batches=count).evaluation.stages:
        parts, metrics = stage.metrics.parts, stage.metrics
        assert metrics.idle_s[0] > 0
        times = [1, count - 2, 1]
        whole = float((parts.forward_s[0] + parts.backward_s[0]) @ times + parts.end_s[0])
        assert whole == pytest.approx(float(metrics.host_s[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "said"), [("full", "2 blocks recomputed"), ("products", "products of 2 blocks recomputed")]
)
def test_a_pipeline_is_named_by_the_recipe_of_its_blocks(recipe: str, said: str) -> None:
    record = pinned(places=2, micro_batches=4, recompute=recipe).point.record
    assert said in record.recomputing
    assert StagesRecord.from_data(record.to_data()) == record


def test_cuts_that_the_model_does_not_have_are_refused():
    with pytest.raises(UnsuitableError, match="fewer than 8 stages"):
        pinned(places=8, micro_batches=8)
    with pytest.raises(UnsuitableError, match="more micro-batches"):
        pinned(places=4, micro_batches=2)
