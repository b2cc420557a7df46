"""A pinned configuration does what a launcher was told."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensoropt import zoo
from tensoropt.capture import capture
from tensoropt.cluster import load_cluster
from tensoropt.costs.cost_graph import edge_keys
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.evaluation.problem import prepare
from tensoropt.launchers.job import FULL, NOTHING, JobError, LaunchedJob
from tensoropt.ops.calls import BY_VALUES
from tensoropt.ops.layouts import PARTIAL_GRAD
from tensoropt.planners.errors import UnsuitableError
from tensoropt.planners.pinned import PinnedPoint, mesh_of, simulate_pinned
from tensoropt.profiling.facts import Facts
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings

BATCH, LAYERS, HIDDEN, SEQUENCE = 16, 2, 64, 32
SETTINGS = Settings(dtype="bfloat16", measure="never", process_memory=False)


@cache
def model(name: str = "gpt-mini", batch: int = BATCH):
    built = zoo.build(name, batch=batch, device="meta")
    return prepare(capture(built.model, built.args, built.kwargs, dtype=SETTINGS.dtype))


def job_of(**chosen) -> LaunchedJob:
    return LaunchedJob(launcher="megatron", **chosen)


def simulated(problem, **chosen) -> PinnedPoint:
    job = job_of(**chosen)
    devices = job.data * job.context * job.tensor
    costs = CostSource(load_cluster(f"dgx-a100[{devices}]"), ProfileStore(":memory:"), SETTINGS)
    return simulate_pinned(problem, costs, job)


@cache
def pinned(name="gpt-mini", **chosen) -> PinnedPoint:
    return simulated(model(name), **chosen)


def sent(point: PinnedPoint, kind: str) -> int:
    return sum(size * count for of, _, size, count in point.point.collectives if of == kind)


def split(point: PinnedPoint) -> list[tuple[str, ...]]:
    """What each group splits on each axis."""
    return [point.tables.labels(group.name, point.choice[group.name]) for group in model().graph.groups]


class Computed(NamedTuple):
    facts: Facts
    forwards: int


def computed(point: PinnedPoint) -> Iterator[Computed]:
    """What each group computes, and how often its forward runs in a step."""
    tables = point.tables
    for group in tables.graph.groups:
        template, index = tables.templates[group.name], point.choice[group.name]
        again = tables.of[group.name].again
        # Recomputed configurations come after the plain ones, in the same order (TableBuilder._group).
        facts = template.facts[index % len(template.works)]
        yield Computed(facts, tables.mesh[0] * (2 if again and again[index] else 1))


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


def test_a_root_is_gathered_once_beside_blocks_that_are_gathered_for_each_use():
    three, root = (pinned(data=4, stage=3, root_once=once) for once in (False, True))
    # The tied table is read in forward and at the end; its copy lasts.
    assert 0 < sent(root, "all_gather") < sent(three, "all_gather")
    assert root.point.memory[0] > three.point.memory[0]
    assert root.point.memory_bytes < pinned(data=4, stage=2).point.memory_bytes


def test_more_tensor_parallel_ranks_than_key_heads_share_them():
    """Two key heads of two query heads each on four ranks, beside two data-parallel ones."""
    pytest.importorskip("transformers")
    problem = model("llama-tiny", 4)
    found = simulated(problem, data=2, tensor=4)
    graph, tables = problem.graph, found.tables
    attention = [g for g in graph.groups if "scaled_dot" in g.anchor.target]
    assert len(attention) == LAYERS
    for group in attention:
        chosen = tables.configuration(group, found.choice[group.name])
        queries, keys, _ = group.anchor.inputs()
        batch, head, copy = chosen.layout(queries)[1:]
        assert (batch, head >= 0, copy >= 0, head != copy) == (0, True, True, True)
        # Every rank has one key head whole, and a part of its gradient.
        assert chosen.layout(keys)[1:] == (0, head, PARTIAL_GRAD)


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
    plain, again = pinned(data=2, stage=3), pinned(data=2, stage=3, recompute=FULL)
    twice = [c for c in computed(again) if c.forwards == 2]
    assert {c.forwards for c in computed(plain)} == {1}
    assert len(twice) >= 3 * LAYERS
    extra = sum(c.facts.forward_flops for c in twice)
    assert again.point.compute_s > plain.point.compute_s
    assert extra < sum(c.facts.forward_flops for c in computed(again))  # the head is in no block


@pytest.mark.parametrize("recipe", ["attention core", "products", "products/2", "norms and activations"])
def test_a_recipe_lies_between_all_and_nothing(recipe):
    plain, part, full = (pinned(data=2, recompute=recompute) for recompute in (NOTHING, recipe, FULL))
    assert plain.point.compute_s < part.point.compute_s < full.point.compute_s
    kept = [found.point.additive_memory_bytes for found in (full, part, plain)]
    assert kept == sorted(set(kept))


@pytest.mark.parametrize("chosen", [{"every": 2}, {"first": 1}])
def test_some_blocks_are_recomputed(chosen):
    some, full = (pinned(data=2, recompute=FULL, **more) for more in (chosen, {}))
    twice = [sum(c.forwards == 2 for c in computed(found)) for found in (some, full)]
    assert twice[1] == LAYERS * twice[0] > 0
    plain = pinned(data=2)
    assert plain.point.compute_s < some.point.compute_s < full.point.compute_s


def test_shards_over_a_part_of_the_replicas():
    part, every = pinned(data=4, stage=3, replicas=2), pinned(data=4, stage=3)
    assert mesh_of(job_of(data=4, stage=3, replicas=2)).names == ("replica", "shard")
    assert part.point.memory_bytes > every.point.memory_bytes
    assert sent(part, "all_reduce") > sent(every, "all_reduce")


def test_tensor_parallelism_splits_products_and_the_sequence():
    apart = pinned(data=2, tensor=2, stage=0)
    along = pinned(data=2, tensor=2, stage=0, sequence_parallel=True)
    flops = sum(c.facts.forward_flops * c.forwards for c in computed(apart))
    whole = sum(c.facts.forward_flops * c.forwards for c in computed(pinned(data=2)))
    assert flops == pytest.approx(whole / 2, rel=0.05)
    assert along.point.additive_time_s <= apart.point.additive_time_s


def test_inputs_of_products_are_gathered_again_or_kept():
    kept, again = (pinned(tensor=4, sequence_parallel=True, gathered_inputs=way) for way in (False, True))
    assert not kept.tables.moves
    # No pair of choices keeps what it could gather again.
    edges = dict(zip(edge_keys(again.tables.edges), again.tables.edges, strict=True))
    tables = [edges[key].table for key in again.tables.moves.values()]
    assert tables
    assert all(np.isinf(table[:, :, 0, 0])[np.isfinite(table[:, :, 1, 0])].all() for table in tables)
    assert again.point.additive_time_s >= kept.point.additive_time_s


def test_context_parallelism_splits_sequences_and_gathers_keys_and_values():
    found, whole = pinned(data=2, context=2, micro_batches=2), pinned(data=2, micro_batches=2)
    assert split(found).count(("batch0", "queries")) == LAYERS
    # Keys and values of each layer: gathered in forward, their gradients reduce-scattered; 2 bytes each.
    keys = 2 * (BATCH // 2) * SEQUENCE * HIDDEN * 2
    assert sent(found, "all_gather") == LAYERS * keys
    assert sent(found, "reduce_scatter") == LAYERS * keys
    flops, of_whole = (sum(c.facts.forward_flops * c.forwards for c in computed(of)) for of in (found, whole))
    # Attention too: each rank has queries from both ends of the sequences.
    assert flops == pytest.approx(of_whole / 2, rel=1e-3)


def test_keys_and_values_go_around_the_ranks_of_a_context():
    gathered, around = (pinned(data=2, context=2, micro_batches=2, ring=ring) for ring in (False, True))
    assert split(around).count(("batch0", "ring")) == LAYERS
    assert sent(around, "all_gather") == sent(around, "reduce_scatter") == 0
    # Keys and values of a rank once in forward and once in backward, and their gradients twice.
    keys = 2 * (BATCH // 2) * SEQUENCE // 2 * HIDDEN * 2
    assert sent(around, "ring_send") == LAYERS * 4 * keys
    assert around.point.memory_bytes < gathered.point.memory_bytes


class Biased(nn.Module):
    """Attention with a term for each pair of positions, which learns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.bias = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Parameter(torch.zeros(SEQUENCE, SEQUENCE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.enter(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, self.bias.tanh()).square().mean()


def test_a_mask_that_learns_goes_around_no_ring():
    problem = prepare(capture(Biased(), (torch.randn(4, SEQUENCE, HIDDEN),), {}))
    assert simulated(problem, data=2, context=2)
    with pytest.raises(UnsuitableError, match=r"no trained mask; .*set ring=False"):
        simulated(problem, data=2, context=2, ring=True)


def test_shards_span_the_context_too():
    apart = pinned(data=2, context=2, stage=0, micro_batches=2)
    sharded = pinned(data=2, context=2, stage=1, micro_batches=2)
    alone = pinned(context=4, stage=1, micro_batches=2)
    assert mesh_of(job_of(data=2, context=2, stage=1)).names == ("shard", "context")
    assert mesh_of(job_of(context=4, stage=1)).names == ("context",)
    # Parameters are gathered on both axes; keys and values on that of the context.
    axes = {axes for kind, axes, *_ in sharded.point.collectives if kind == "all_gather"}
    assert axes == {(0, 1), (1,)}
    assert max(sharded.point.memory_bytes, alone.point.memory_bytes) < apart.point.memory_bytes


def test_context_and_tensor_parallelism_compose():
    found = pinned(data=1, context=2, tensor=2, sequence_parallel=True, micro_batches=2)
    assert split(found).count(("queries", "heads")) == LAYERS


def test_experts_over_data_parallel_ranks_send_rows_instead_of_gradients():
    pytest.importorskip("transformers.integrations.moe")
    # Rows of two experts for each token, forth and back in both directions, in two layers.
    rows = 2 * 4 * 2 * (BATCH // 4) * SEQUENCE * HIDDEN * 2
    for stage in (0, 3):
        copies = pinned("mixtral-tiny", data=4, stage=stage)
        split = pinned("mixtral-tiny", data=4, stage=stage, experts=4)
        assert sent(copies, BY_VALUES) == 0
        assert sent(split, BY_VALUES) == rows
        reduced = "all_reduce" if stage == 0 else "reduce_scatter"
        assert sent(split, reduced) < sent(copies, reduced) / 2
    inside = pinned("mixtral-tiny", data=2, tensor=2, experts=2)
    assert sent(inside, BY_VALUES) == 2 * rows
    assert inside.point.memory_bytes < pinned("mixtral-tiny", data=2, tensor=2).point.memory_bytes


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"stage": 4}, "no stage 4"),
        ({"recompute": "product"}, "did you mean 'products'"),
        ({"data": 4, "stage": 3, "replicas": 3}, "do not divide"),
        ({"data": 5}, "cannot be split as the job asks on mesh 5"),  # parts of 4 samples, one of them empty
        ({"data": 4, "experts": 2}, "expert-parallel degree of 2 is not supported.*give 1 or 4"),
    ],
)
def test_what_means_nothing_is_refused(chosen, words):
    with pytest.raises(TensorOptError, match=words):
        pinned(**chosen)


def test_another_number_of_devices_is_refused():
    costs = CostSource(load_cluster("dgx-a100[2]"), ProfileStore(":memory:"), SETTINGS)
    with pytest.raises(JobError, match="data 4, which is not 2 devices"):
        simulate_pinned(model(), costs, job_of(data=4))
