"""Points as launchers are told of them; scripts run with the plan's losses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tensoropt
from tensoropt.exploration.your_jobs import your_jobs
from tensoropt.launchers import JobError, LaunchedJob
from tensoropt.profiling.store import ProfileStore
from tensoropt.session.launched import job_prices, with_jobs
from tensoropt.session.told import degrees, done_otherwise, nearest, parts_of
from tests.session import watched_script

pytest.importorskip("transformers")
BATCH, MODEL = 4, "zoo:llama-tiny?sequence=32"
SHARDED = LaunchedJob(launcher="fsdp2", data=2, stage=3, root_once=True, recompute="full", micro_batches=2)
SPLIT = LaunchedJob(launcher="fsdp2", tensor=2)
PIPELINED = LaunchedJob(launcher="megatron", places=2, micro_batches=4)
JOBS = (SHARDED, SPLIT, PIPELINED, LaunchedJob(launcher="deepspeed", data=2, stage=2))


@pytest.fixture(scope="module")
def exploration():
    with ProfileStore(":memory:") as store:
        found = tensoropt.explore(
            tensoropt.load_model(MODEL, device="meta", batch=BATCH), cluster="dgx-a100[2]", store=store,
            dtype="float32", measure="never", micro_batches=(1,), epsilon=0.2, max_points=8,
            pipelines="never", placements="always",
        )  # fmt: skip
        return with_jobs(found, JOBS, store)


@pytest.fixture(scope="module")
def on_four_ranks():
    """Prices on CPU ranks, whose kernels are those of the script's."""
    with ProfileStore(":memory:") as store:
        found = tensoropt.explore(
            tensoropt.load_model(MODEL, device="meta", batch=BATCH), cluster="cpu:4", store=store,
            dtype="float32", measure="never", micro_batches=(1,), epsilon=0.2, max_points=8,
            pipelines="never", placements="never", progress=False,
        )  # fmt: skip
        with job_prices(found, store) as opened:
            yield opened


@pytest.fixture(scope="module")
def prices(exploration):
    with ProfileStore(":memory:") as store, job_prices(exploration, store) as opened:
        yield opened


def row_of(exploration, job: LaunchedJob) -> int:
    row = your_jobs(exploration)[JOBS.index(job)].row
    assert row is not None
    return row


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
    with pytest.raises(JobError, match=r"told to deepspeed: tensor parallelism.*; --nearest writes it"):
        tensoropt.export_job(exploration, "deepspeed", row + 1)
    told = tensoropt.export_job(exploration, "deepspeed", row + 1, nearest=True)
    assert not told.is_the_point
    assert '"stage"' in told.text


def test_a_script_says_what_it_does_otherwise_than_its_figures_count(prices):
    split, sharded = (prices.of(replace(job, batch=BATCH)) for job in (SPLIT, SHARDED))
    gathered, reduced = done_otherwise(split, parts_of(prices, split))
    assert "gathers its results before the loss" in gathered
    assert "reduces that of each layer, which is 6 all-reduces more in a step" in reduced
    assert done_otherwise(sharded, parts_of(prices, sharded)) == done_otherwise(split, None) == ()


def test_a_placed_plan_is_told_to_nobody(exploration):
    placed = [i for i, point in enumerate(exploration.all_points) if point.kind.placed]
    with pytest.raises(JobError, match="placed plan"):
        tensoropt.export_job(exploration, "torchtitan", placed[0] + 1)


def test_an_unknown_launcher_is_refused(exploration):
    with pytest.raises(JobError, match="give one of torchtitan, megatron, deepspeed, fsdp2"):
        tensoropt.export_job(exploration, "accelerate", 1)


def test_adapters_and_own_optimizers_are_told_to_nobody(prices):
    found = prices.exploration
    own = "lion.py:make?state=1&transient=0&traffic=9&largest=0&tensors=1&code="
    adapted = replace(found, model=found.model.model_copy(update={"adapters": "LoRA r4"}))
    stepped = replace(found, settings={**found.settings, "optimizer": own})
    for exploration, words in ((adapted, r"adapters \(LoRA r4\)"), (stepped, "lion.py:make; explore with")):
        with pytest.raises(JobError, match=f"not told of {words}"):
            nearest(replace(prices, exploration=exploration), 0, "fsdp2")


def unsplit_losses(steps: int) -> list[float]:
    loaded = tensoropt.load_model(MODEL, batch=BATCH)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = loaded.model(*loaded.args, **loaded.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def script_losses(script: Path, steps: int, ranks: int = 2, watched: Path | None = None) -> list[float]:
    """The losses of a script; what its second step does is written to ``watched``."""
    root = Path(tensoropt.__file__).parents[1]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    program = [script] if watched is None else [watched_script.__file__, script, watched]
    command = [sys.executable, *launcher, *program]
    ran = subprocess.run(
        [*map(str, command), "--steps", str(steps), "--cpu"],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", ran.stdout)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "job",
    [
        SHARDED,
        SPLIT,
        replace(SHARDED, stage=2, root_once=False, recompute="products"),
        replace(SHARDED, stage=0, root_once=False, recompute="none"),
    ],
    ids=["ZeRO-3", "TP", "ZeRO-2", "DDP"],
)
def test_a_script_trains_as_one_process_does(prices, exploration, job, tmp_path):
    from tensoropt.launchers import write_job

    priced = prices.of(replace(job, batch=BATCH))
    script = tmp_path / "train.py"
    script.write_text(write_job(priced.job, parts_of(prices, priced)))
    assert script_losses(script, 3) == pytest.approx(unsplit_losses(3), rel=2e-5)


AXES = {1: "replica", 2: "shard", 3: "tensor"}
"""Of the script's mesh."""
SMALL = 1024
"""Bytes of what a loss sends that is split, and less than of any activation."""


def bytes_by_kind(sent):
    """The bytes of a step's collectives, by kind and axis."""
    found = defaultdict(int)
    for kind, axis, size, count in sent:
        found[kind, axis] += size * count
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "job",
    [
        replace(SHARDED, tensor=2),
        replace(SHARDED, data=4, micro_batches=1),
        replace(SHARDED, data=4, stage=2, root_once=False, recompute="none", micro_batches=1),
        replace(SPLIT, data=2, stage=3, root_once=True),
    ],
    ids=["FSDP x TP, recomputed", "FSDP, recomputed", "ZeRO-2", "FSDP x TP"],
)
def test_a_script_on_four_ranks_does_what_its_figures_count(on_four_ranks, job, tmp_path):
    """Losses, bytes sent of each kind along each axis, and the most bytes of tensors alive at once; as far as
    the README says that FSDP2 and ``parallelize_module`` do otherwise."""
    from tensoropt.launchers import write_job

    priced = on_four_ranks.of(replace(job, batch=BATCH))
    parts = parts_of(on_four_ranks, priced)
    script, watched = tmp_path / "train.py", tmp_path / "watched.json"
    script.write_text(write_job(priced.job, parts))
    losses = script_losses(script, 3, ranks=4, watched=watched)
    assert losses == pytest.approx(unsplit_losses(3), rel=2e-5)
    measured = json.loads(watched.read_text())
    sent = bytes_by_kind(
        (row["kind"], AXES[row["axes"][0]], row["bytes"], row["count"]) for row in measured["sent"]
    )
    names = priced.space.mesh.names
    activation = BATCH // 2 * 32 * 64 * 4  # of a data-parallel rank, of which there are two
    counted = bytes_by_kind(
        (kind, names[axes[0]], size, count)
        for kind, axes, size, count in priced.point.collectives
        if kind != "all_reduce" or size > SMALL
    )
    logits = 0
    if job.tensor > 1:
        again = len(parts.blocks) if job.recompute == "full" else 0  # the last product is not needed again
        counted["all_reduce", "tensor"] += activation * (parts.reductions_more - again)
        logits = counted["all_gather", "tensor"] = BATCH // 2 * 32 * 512 * 4
    assert sent == counted
    # What is in flight is flat, and copied; gathered logits have a gradient.
    flat = max(row["bytes"] for row in measured["sent"] if row["kind"] == "all_gather")
    least = priced.point.memory_bytes
    most = least + flat + 2 * logits // (priced.job.micro_batches or 1)
    assert 0.95 * least <= measured["peak_bytes"] <= most
