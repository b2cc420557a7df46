"""Scale on paper: Llama-3-405B on 64 to 16,384 H100s, beside what was published of that job. Not a test.

    python -m tests.benchmarks.papers.scale [--quick] [devices ...]

The job of the Llama 3 paper (arXiv 2407.21783, table 4): sequences of 8,192 tokens, 2,048 of them in a step
(16 million tokens), bfloat16 with a fused Adam; the same step on every number of DGX H100 nodes. Nothing is
run: seconds are data sheets'. Searched is the mesh nodes x GPUs of a node, whole and as places of pipelines.
Results: tests/benchmarks/results/papers/DATE-scale.{json,md,svg}, written after each cluster; ``--quick``
takes two layers and 64 devices and writes into out/papers.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.console import ProgressDisplay
from tensoropt.exploration.exploration import Exploration
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import described, rows_described
from tests.benchmarks.program import Row, page, run_parts, table

DEVICES = (64, 256, 1024, 16384)
PER_NODE, CAPACITY_BYTES = 8, 80 * 2**30
BATCH, SEQUENCE = 2048, 8192
POINTS, EPSILON = 200, 0.005
BYTES_PER_PARAMETER = 16
"""A float32 parameter, its gradient and Adam's two moments."""
OF_NODES = {"pin": [{"operators": "*cross_entropy*", "axes": {
    axis: ["none", "d0.0", "d0.1", "classes"] for axis in ("node", "gpu")
}}]}  # fmt: skip
"""Forbids nothing (these are all the loss' dims), but holds on a mesh with just these axes only."""


TITLES = (
    "GPUs", "points", "fit 80 GiB", "least memory", "chosen: memory, step", "TFLOP/s per GPU",
    "mesh, micro-batches", "searched in (CPU), load", "peak memory",
)  # fmt: skip


def micro_batches(devices: int) -> tuple[int, ...]:
    """The count that leaves each node one sequence at a time."""
    return (max(1, BATCH * PER_NODE // devices),)


def _measured(devices: int, quick: bool) -> Iterator[Row]:
    cut = {"layers": 2} if quick else {}
    built = zoo.build("llama3-405b", device="meta", batch=BATCH, sequence=SEQUENCE, **cut)
    begun, cpu = time.perf_counter(), time.process_time()
    found = explore(
        built.model, built.args, built.kwargs, cluster=f"dgx-h100x{devices // PER_NODE}", dtype="bfloat16",
        optimizer="adam_fused", micro_batches=micro_batches(devices), epsilon=EPSILON, max_points=POINTS,
        source="zoo:llama3-405b", constraints=OF_NODES, process_memory=False, progress=ProgressDisplay(),
    )  # fmt: skip
    spent = time.perf_counter() - begun, time.process_time() - cpu
    fits = [i for i, p in enumerate(found.points) if p.memory_bytes <= CAPACITY_BYTES]
    chosen = fits[-1] if fits else 0
    yield {
        "key": str(devices),
        "devices": devices,
        "state_bytes": BYTES_PER_PARAMETER * built.parameter_count / devices,
        "points": len(found.points),
        "worst_gap": max((p.gap for p in found.points if p.gap is not None), default=0.0),
        "explore_s": spent[0],
        "cpu_s": spent[1],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "frontier": [[p.memory_bytes, p.time_s] for p in found.points],
        "points_that_fit": len(fits),
        "chosen": told(found, chosen, built.parameter_count),
    }


def told(found: Exploration, index: int, parameters: int) -> Row:
    """What a plan takes, on which mesh."""
    point, plan = found.points[index], found.plan(index)
    seconds = ("time_s", "compute_s", "communication_s", "exposed_s")
    return {
        **{name: getattr(point, name) for name in ("memory_bytes", *seconds)},
        "mesh": plan.mesh.label,
        "micro_batches": plan.micro_batches,
        "tflops_per_device": 6 * parameters * BATCH * SEQUENCE / point.time_s / found.devices / 1e12,
    }


def markdown(data: Mapping[str, Any], picture: str) -> str:
    return page(
        f"# Llama-3-405B on H100s, on paper, {data['date']}",
        f"![frontiers]({picture})",
        (
            f"One step of {BATCH:,} sequences of {SEQUENCE:,} tokens, bfloat16 with float32 master weights,",
            "Adam; DGX H100 nodes, mesh nodes x GPUs of a node. Nothing was run: seconds are data-sheet",
            "figures. TFLOP/s count 6 FLOP per parameter and token. Searched in: seconds and CPU seconds,",
            "from the module to the judged frontier, and the load of the machine when it was done.",
        ),
        f"Taken from {described(data)}.",
        table(TITLES, map(_cells, data["rows"])),
        "*Chosen*: the fastest plan that fits 80 GiB, else the leanest. Rows were taken from:",
        rows_described(data["rows"], "key"),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    one = row["chosen"]
    return [
        f"{row['devices']:,}",
        f"{row['points']}, gap at most {row['worst_gap']:.2%}",
        str(row["points_that_fit"]),
        f"{row['frontier'][0][0] / 2**30:.1f} GiB",
        f"{one['memory_bytes'] / 2**30:.1f} GiB, {one['time_s']:.1f} s",
        f"{one['tflops_per_device']:.0f}",
        f"{one['mesh']}, {one['micro_batches']}",
        f"{row['explore_s']:.0f} s ({row['cpu_s']:.0f} s), {row['taken']['load']:.0f}",
        f"{row['peak_mib'] / 1024:.1f} GiB",
    ]


def picture(data: Mapping[str, Any]) -> str:
    stairs = {f"{row['key']} GPUs": [(m / 2**30, t) for m, t in row["frontier"]] for row in data["rows"]}
    limit = {"80 GiB": CAPACITY_BYTES / 2**30}
    chart = Chart("Llama-3-405B", "memory per GPU, GiB", "step, s", stairs, {}, limit, stairs=True)
    return figure([chart], columns=1)


if __name__ == "__main__":
    run_parts(
        __doc__,
        "two layers on 64 devices, to see that it works",
        ("papers", "scale"),
        {str(devices): partial(_measured, devices) for devices in DEVICES},
        lambda data: (markdown(data, f"{data['date']}-scale.svg"), picture(data)),
        key="key",
        few=("64",),
        order=lambda row: row["devices"],
        about={"batch": BATCH, "sequence": SEQUENCE, "epsilon": EPSILON},
    )
