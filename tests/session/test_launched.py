"""Jobs that launchers run, as points beside an exploration; and points as launchers are told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

import tensoropt
from tensoropt.exploration.frontier_table import frontier_text
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.launchers import JobError, LaunchedJob
from tensoropt.planners.pinned import simulate_pinned
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.detail import detail
from tensoropt.session.launched import job_prices, with_jobs
from tensoropt.session.told import degrees, nearest

pytest.importorskip("transformers")
BATCH, MODEL = 4, "zoo:llama-tiny?sequence=32"
HOW = {"root_once": True, "recompute": "full", "micro_batches": 2}
SHARDED = LaunchedJob(launcher="accelerate", data=2, stage=3, **HOW)
SPLIT = LaunchedJob(launcher="megatron", tensor=2)
PIPELINED = LaunchedJob(launcher="megatron", places=2, micro_batches=4)
JOBS = (SHARDED, SPLIT, PIPELINED, LaunchedJob(launcher="deepspeed", data=2, stage=2))


@pytest.fixture(scope="module")
def alone(store):
    return tensoropt.explore(
        tensoropt.load_model(MODEL, device="meta", batch=BATCH), cluster="dgx-a100[2]", store=store,
        dtype="float32", measure="never", micro_batches=(1,), epsilon=0.2, max_points=8, pipelines="never",
        placements="always",
    )  # fmt: skip


@pytest.fixture(scope="module")
def exploration(alone, store):
    return with_jobs(alone, JOBS, store=store)


@pytest.fixture(scope="module")
def prices(exploration):
    with ProfileStore(":memory:") as store, job_prices(exploration, store) as opened:
        yield opened


def row_of(exploration, job: LaunchedJob) -> int:
    return your_jobs(exploration)[JOBS.index(job)].row


def test_a_job_is_priced_as_it_is_pinned(prices):
    priced, pinned = prices.of(SHARDED), simulate_pinned(prices.problem, prices.costs, SHARDED)
    assert priced.point.memory_bytes == pinned.point.memory_bytes
    assert priced.point.time_s == pinned.point.time_s


def test_jobs_are_points_beside_the_frontier(alone, exploration):
    assert exploration.points == alone.points
    jobs, table = your_jobs(exploration), frontier_text(exploration)
    assert [job.launcher for job in jobs] == [job.launcher for job in JOBS]
    for job in jobs:
        assert not job.refusal
        assert f"<- you are here ({job.launcher})" in table
    row = row_of(exploration, PIPELINED)
    assert "PP 2" in exploration.names[row]
    assert "your job (megatron)" in exploration.title(row)


def test_what_a_better_plan_brings_is_better(exploration):
    for job in your_jobs(exploration):
        point = exploration.all_points[job.row]
        if job.faster is not None:
            better = exploration.points[job.faster]
            assert better.memory_bytes <= point.memory_bytes
            assert better.time_s < point.time_s
            assert f"point {job.faster + 1}" in job.sentences()[0]
        if job.leaner is not None:
            better = exploration.points[job.leaner]
            assert better.memory_bytes < point.memory_bytes
            assert better.time_s <= point.time_s
        if job.faster is job.leaner is None:
            assert "No point of the frontier is better" in job.sentences()[0]


def test_jobs_are_saved_and_explained(exploration, tmp_path):
    exploration.save(tmp_path)
    again = tensoropt.load(tmp_path)
    assert [job.to_data() for job in your_jobs(again)] == [job.to_data() for job in your_jobs(exploration)]
    for job in your_jobs(again):
        assert detail(again, job.row).step.time_s == pytest.approx(again.all_points[job.row].time_s)


def test_a_job_that_the_model_refuses_says_why(alone, store):
    found = with_jobs(alone, [replace(SHARDED, data=1, tensor=2, experts=3)], store=store)
    (job,) = your_jobs(found)
    assert job.row is None
    assert "expert-parallel degree of 3" in job.refusal
    assert "has no prediction" in job.sentences()[0]
    assert found.others == alone.others


def test_what_differs_from_the_exploration_is_noted(alone, store):
    other = replace(SHARDED, batch=64, dtype="bfloat16", optimizer="sgd", sequence=7)
    notes = " ".join(your_jobs(with_jobs(alone, [other], store=store))[0].notes)
    for words in ("64 samples", "computes in bfloat16", "optimizer is sgd", "have 7 tokens"):
        assert words in notes


@pytest.mark.sweep(quick=1)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.launcher} {job.data}x{job.tensor}x{job.places}")
def test_the_degrees_of_a_pinned_plan_are_those_that_were_pinned(prices, exploration, job):
    found = degrees(prices, exploration.plan(row_of(exploration, job)))
    axes = ("data", "tensor", "context", "places")
    for name in (*axes, "stage", "replicas", "recompute", "every", "micro_batches"):
        wanted = getattr(job, name) or 1
        assert (getattr(found, name) or 1) == wanted, name


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.launcher} {job.data}x{job.tensor}x{job.places}")
def test_a_plan_that_a_launcher_can_be_told_is_told_as_it_is(prices, exploration, job):
    told = nearest(prices, row_of(exploration, job), job.launcher)
    assert told.is_the_point, told.sentence()
    assert "as the point" in told.sentence()


def test_what_cannot_be_told_is_refused_with_the_nearest_and_its_price(exploration):
    row = row_of(exploration, SPLIT)
    with pytest.raises(JobError, match=r"expressed by deepspeed: tensor parallelism.*; --nearest writes it"):
        tensoropt.export_job(exploration, "deepspeed", row + 1)
    told = tensoropt.export_job(exploration, "deepspeed", row + 1, nearest=True)
    assert not told.is_the_point
    assert '"stage"' in told.text


def test_a_placed_plan_is_told_to_nobody(exploration):
    placed = [i for i, point in enumerate(exploration.all_points) if point.kind.placed]
    with pytest.raises(JobError, match="placed plan"):
        tensoropt.export_job(exploration, "torchtitan", placed[0] + 1)


def test_adapters_and_own_optimizers_are_told_to_nobody(prices):
    found = prices.exploration
    own = "lion.py:make?state=1&transient=0&traffic=9&largest=0&tensors=1&code="
    adapted = replace(found, model=found.model.model_copy(update={"adapters": "LoRA r4"}))
    stepped = replace(found, settings={**found.settings, "optimizer": own})
    for exploration, words in ((adapted, r"adapters \(LoRA r4\)"), (stepped, "lion.py:make; explore with")):
        with pytest.raises(JobError, match=f"cannot express {words}"):
            nearest(replace(prices, exploration=exploration), 0, "accelerate")


def test_accelerate_is_told_the_class_of_the_models_blocks(prices, exploration):
    row = row_of(exploration, SHARDED)
    told = yaml.safe_load(nearest(prices, row, "accelerate").text)
    assert told["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    assert (told["num_processes"], told["num_machines"]) == (2, 1)
    elsewhere = replace(exploration, model=exploration.model.model_copy(update={"source": "gone.py:build"}))
    with pytest.raises(JobError, match=r"class of the model's blocks.*gone\.py.*; export where it can be"):
        nearest(replace(prices, exploration=elsewhere), row, "accelerate")
