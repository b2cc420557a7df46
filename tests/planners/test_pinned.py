"""A pinned configuration does what a launcher was told."""

from __future__ import annotations

from functools import cache

import pytest

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.evaluation.problem import prepare
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pinned import PinnedConfiguration, PinnedPoint, simulate_pinned
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings

BATCH, LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 16, 2, 64, 32, 512
SETTINGS = Settings(dtype="bfloat16", measure="never")


@cache
def model():
    built = zoo.build("gpt-mini", batch=BATCH, device="meta")
    return prepare(capture(built.model, built.args, built.kwargs, dtype=SETTINGS.dtype))


@cache
def pinned(**chosen) -> PinnedPoint:
    configuration = PinnedConfiguration(**chosen)
    costs = CostSource(load_cluster(f"dgx-a100[{configuration.devices}]"), ProfileStore(":memory:"), SETTINGS)
    return simulate_pinned(model(), costs, configuration)


def sent(point: PinnedPoint, kind: str) -> int:
    return sum(size * count for of, _, size, count in point.point.collectives if of == kind)


def test_data_parallelism_reduces_every_gradient_once():
    found = pinned(data=4, micro_batches=2)
    # Gradients are as wide as the float32 master weights.
    parameters = sum(t.elements for t in model().graph.atoms.graph.parameters)
    assert sent(found, "all_gather") == sent(found, "reduce_scatter") == 0
    assert sent(found, "all_reduce") == pytest.approx(4 * parameters, rel=0.01)


def test_stages_shard_more_and_more():
    whole, two, three = (pinned(data=4, stage=stage, micro_batches=2) for stage in (0, 2, 3))
    assert whole.point.memory_bytes > two.point.memory_bytes > three.point.memory_bytes
    # Stage 3 gathers in every micro-batch, forward and backward; stage 2 once per step.
    assert sent(three, "all_gather") > 2 * sent(two, "all_gather") > 0


def test_stage_one_of_one_micro_batch_is_said_to_be_stage_two():
    found = pinned(data=4, stage=1)
    assert "stage 2" in found.notes[0]
    assert found.point.collectives == pinned(data=4, stage=2).point.collectives


def test_stage_one_reduces_gradients_once():
    first, second = (pinned(data=4, stage=stage, micro_batches=2) for stage in (1, 2))
    assert not first.notes
    reduced = [
        sum(size * count for kind, _, size, count in found.point.collectives if kind == "reduce_scatter")
        for found in (first, second)
    ]
    # Of either use of the tied weight the gradients are added up before they are sent.
    assert 0 < 2 * reduced[0] == reduced[1]


def test_recomputing_runs_each_blocks_forward_twice():
    plain, again = pinned(data=2, stage=3), pinned(data=2, stage=3, recompute=True)
    twice = [c for c in again.computed() if c.forwards == 2]
    assert {c.forwards for c in plain.computed()} == {1}
    assert len(twice) >= 3 * LAYERS
    extra = sum(c.facts.forward_flops for c in twice)
    assert again.point.compute_s > plain.point.compute_s
    assert extra < sum(c.facts.forward_flops for c in again.computed())  # the head is in no block


@pytest.mark.parametrize("recipe", ["attention core", "products", "products/2", "norms and activations"])
def test_a_recipe_lies_between_all_and_nothing(recipe):
    plain, part, full = (pinned(data=2, recompute=recompute) for recompute in (False, recipe, True))
    assert plain.point.compute_s < part.point.compute_s < full.point.compute_s
    kept = [found.point.additive_memory_bytes for found in (full, part, plain)]
    assert kept == sorted(set(kept))


def test_shards_over_a_part_of_the_replicas():
    part, every = pinned(data=4, stage=3, shard_group=2), pinned(data=4, stage=3)
    assert PinnedConfiguration(data=4, stage=3, shard_group=2).mesh.names == ("replica", "shard")
    assert part.point.memory_bytes > every.point.memory_bytes
    assert sent(part, "all_reduce") > sent(every, "all_reduce")


def test_tensor_parallelism_splits_products_and_the_sequence():
    apart = pinned(data=2, tensor=2, stage=0)
    along = pinned(data=2, tensor=2, stage=0, sequence_parallel=True)
    flops = sum(c.facts.forward_flops * c.forwards for c in apart.computed())
    whole = sum(c.facts.forward_flops * c.forwards for c in pinned(data=2).computed())
    assert flops == pytest.approx(whole / 2, rel=0.05)
    assert along.point.additive_time_s <= apart.point.additive_time_s


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"data": 0}, "below 1"),
        ({"stage": 4}, "no stage 4"),
        ({"recompute": "product"}, "did you mean 'products'"),
        ({"data": 4, "stage": 3, "shard_group": 3}, "do not divide"),
    ],
)
def test_what_means_nothing_is_refused(chosen, words):
    with pytest.raises(UnsuitableError, match=words):
        PinnedConfiguration(**chosen)


def test_what_does_not_divide_is_refused_with_the_mesh():
    with pytest.raises(UnsuitableError, match="cannot be split as pinned on mesh 3"):
        pinned(data=3)


def test_another_number_of_devices_is_refused():
    costs = CostSource(load_cluster("dgx-a100[2]"), ProfileStore(":memory:"), SETTINGS)
    with pytest.raises(UnsuitableError, match="takes 4 devices"):
        simulate_pinned(model(), costs, PinnedConfiguration(data=4))
