"""Jobs that launchers run, as points beside an exploration."""

from dataclasses import replace

import pytest

import tensoropt
from tensoropt.exploration.frontier_table import frontier_text
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.launchers import LaunchedJob
from tensoropt.planners.pinned import simulate_pinned
from tensoropt.report.detail import detail
from tensoropt.session.launched import job_prices, with_jobs

BATCH = 8
SHARDED = LaunchedJob(launcher="torchtitan", data=4, stage=3, recompute="full", batch=BATCH)
PIPELINED = LaunchedJob(launcher="megatron", data=2, places=2, micro_batch=1, batch=BATCH)


@pytest.fixture(scope="module")
def exploration(store):
    return tensoropt.explore(
        tensoropt.load_model("zoo:gpt-mini", device="meta", batch=BATCH), cluster="dgx-a100[4]", store=store,
        dtype="bfloat16", measure="never", micro_batches=(1,), epsilon=0.2, max_points=8, pipelines="never",
        placements="never", recompute="never",
    )  # fmt: skip


@pytest.fixture(scope="module")
def beside(exploration, store):
    return with_jobs(exploration, [SHARDED, PIPELINED], store=store)


def test_a_job_is_priced_as_it_is_pinned(exploration, store):
    with job_prices(exploration, store) as prices:
        priced = prices.of(SHARDED)
        pinned = simulate_pinned(prices.problem, prices.costs, SHARDED)
    assert priced.point.memory_bytes == pinned.point.memory_bytes
    assert priced.point.time_s == pinned.point.time_s


def test_jobs_are_points_beside_the_frontier(exploration, beside):
    assert beside.points == exploration.points
    jobs = your_jobs(beside)
    assert [job.launcher for job in jobs] == ["torchtitan", "megatron"]
    for job in jobs:
        assert not job.refusal
    table = frontier_text(beside)
    assert "<- you are here (torchtitan)" in table
    assert "<- you are here (megatron)" in table
    assert "PP 2" in beside.names[jobs[1].row]
    assert "your job (megatron)" in beside.title(jobs[1].row)


def test_what_a_better_plan_brings_is_better(beside):
    for job in your_jobs(beside):
        point = beside.all_points[job.row]
        if job.faster is not None:
            better = beside.points[job.faster]
            assert better.memory_bytes <= point.memory_bytes
            assert better.time_s < point.time_s
            assert f"point {job.faster + 1}" in job.sentences()[0]
        if job.leaner is not None:
            better = beside.points[job.leaner]
            assert better.memory_bytes < point.memory_bytes
            assert better.time_s <= point.time_s
        if job.faster is job.leaner is None:
            assert "No point of the frontier is better" in job.sentences()[0]


def test_jobs_are_saved_and_explained(beside, tmp_path):
    beside.save(tmp_path)
    again = tensoropt.load(tmp_path)
    assert your_jobs(again)[1].to_data() == your_jobs(beside)[1].to_data()
    for job in your_jobs(again):
        assert detail(again, job.row).step.time_s == pytest.approx(again.all_points[job.row].time_s)


def test_a_job_that_the_model_refuses_says_why(exploration, store):
    # Four heads do not go over three ranks.
    found = with_jobs(exploration, [replace(SHARDED, data=1, tensor=4, context=1, experts=3)], store=store)
    (job,) = your_jobs(found)
    assert job.row is None
    assert "expert-parallel degree of 3" in job.refusal
    assert "has no prediction" in job.sentences()[0]
    assert found.others == exploration.others


def test_what_differs_from_the_exploration_is_noted(exploration, store):
    other = replace(SHARDED, batch=64, dtype="float32", optimizer="sgd", sequence=7)
    notes = " ".join(your_jobs(with_jobs(exploration, [other], store=store))[0].notes)
    for words in ("64 samples", "computes in float32", "optimizer is sgd", "have 7 tokens"):
        assert words in notes
