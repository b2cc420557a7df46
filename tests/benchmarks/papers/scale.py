"""Scale on paper: Llama-3-405B on 64 to 16,384 H100s, beside what was published of that job. Not a test.

    python -m tests.benchmarks.papers.scale [--quick] [devices ...]

The job of the Llama 3 paper (arXiv 2407.21783, table 4): sequences of 8,192 tokens, 2,048 of them in a step
(16 million tokens), bfloat16 with Adam; the same step on every number of DGX H100 nodes. Nothing is run:
seconds are data sheets'. Results: tests/benchmarks/results/papers/DATE-scale.{json,md,svg}, written after
each cluster; ``--quick`` takes two layers and 64 devices and writes into out/papers.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.console import Progress
from tensoropt.plan import Exploration
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import Results, described

DEVICES = (64, 256, 1024, 16384)
PER_NODE, CAPACITY_BYTES = 8, 80 * 2**30
BATCH, SEQUENCE = 2048, 8192
POINTS, EPSILON = 200, 0.005
PUBLISHED = {
    16384: "TP 8 in the node, PP 16, DP 128 (FSDP), batch 16 per DP group, 400 TFLOP/s per GPU",
}
"""Grattafiori et al., table 4: the row of 16,384 GPUs with sequences of 8,192."""


def micro_batches(devices: int) -> tuple[int, ...]:
    """Counts that leave each node one sequence at a time, and four."""
    most = max(1, BATCH * PER_NODE // devices)
    return tuple(sorted({most, max(1, most // 4)}))


def measure(devices: int, layers: int | None) -> dict[str, Any]:
    built = zoo.build(
        "llama3-405b", device="meta", batch=BATCH, sequence=SEQUENCE, **({"layers": layers} if layers else {})
    )
    begun, cpu = time.perf_counter(), time.process_time()
    found = explore(
        built.model, built.args, built.kwargs, cluster=f"dgx-h100x{devices // PER_NODE}", dtype="bfloat16",
        micro_batches=micro_batches(devices), epsilon=EPSILON, max_points=POINTS, source="zoo:llama3-405b",
        progress=Progress(),
    )  # fmt: skip
    spent = time.perf_counter() - begun, time.process_time() - cpu
    fits = [i for i, p in enumerate(found.points) if p.memory_bytes <= CAPACITY_BYTES]
    chosen = fits[-1] if fits else 0
    return {
        "devices": devices,
        "micro_batches": micro_batches(devices),
        "points": len(found.points),
        "worst_gap": max(p.gap for p in found.points),
        "explore_s": spent[0],
        "cpu_s": spent[1],
        "seconds": found.report["seconds"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "frontier": [[p.memory_bytes, p.time_s] for p in found.points],
        "points_that_fit": len(fits),
        "notes": found.report["notes"],
        "chosen": told(found, chosen, built.parameter_count),
    }


def told(found: Exploration, index: int, parameters: int) -> dict[str, Any]:
    """What a plan does: its mesh, which dims its axes split, where parameters live."""
    point, plan = found.points[index], found.plan(index)
    tokens = BATCH * SEQUENCE
    splits = {
        axis: Counter(of.axes.get(axis, "none") for of in plan.operators.values()).most_common(6)
        for axis in plan.mesh.names
    }
    stored = Counter(
        ", ".join(of.stored) for of in plan.parameters.values()
    ).most_common(4)  # fmt: skip
    return {
        "memory_bytes": point.memory_bytes,
        "memory_split": list(point.memory),
        "time_s": point.time_s,
        "compute_s": point.compute_s,
        "communication_s": point.communication_s,
        "exposed_s": point.exposed_s,
        "mesh": plan.mesh.label,
        "axes": dict(zip(plan.mesh.names, plan.mesh.shape, strict=True)),
        "micro_batches": plan.micro_batches,
        "recomputed_regions": len(plan.recomputed),
        "splits": {axis: [list(pair) for pair in pairs] for axis, pairs in splits.items()},
        "stored": [list(pair) for pair in stored],
        "tflops_per_device": 6 * parameters * tokens / point.time_s / found.devices / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("devices", nargs="*", type=int, help="numbers of GPUs; default: all four")
    parser.add_argument("--quick", action="store_true", help="two layers on 64 devices, to see that it works")
    options = parser.parse_args()
    about = {"batch": BATCH, "sequence": SEQUENCE, "epsilon": EPSILON}
    results = Results("papers", "scale", about, quick=options.quick)
    for devices in options.devices or (DEVICES[:1] if options.quick else DEVICES):
        results.add("devices", measure(devices, 2 if options.quick else None))
        results.write(markdown(results.data, results.stem.name), picture(results.data))
        print(markdown(results.data, results.stem.name), flush=True)


def markdown(data: dict[str, Any], stem: str) -> str:
    lines = [
        f"# Llama-3-405B on H100s, on paper, {data['date']}",
        "",
        f"![frontiers]({stem}.svg)",
        "",
        f"One step of {BATCH:,} sequences of {SEQUENCE:,} tokens, bfloat16 with float32 master weights,",
        "Adam; DGX H100 nodes. Nothing was run: seconds are data-sheet figures. TFLOP/s count 6 FLOP per",
        "parameter and token. Exploring: seconds on a machine with the load below, and CPU seconds.",
        "",
        f"Machine: {described(data['machine'])}.",
        "",
        "| GPUs | points | fit 80 GiB | least memory | chosen: memory, step | TFLOP/s per GPU |"
        " mesh, micro-batches | explored in (CPU) | peak |",
        "|" + " --- |" * 9,
    ]
    for row in data["rows"]:
        one = row["chosen"]
        cells = [
            f"{row['devices']:,}",
            f"{row['points']}, gap at most {row['worst_gap']:.2%}",
            str(row["points_that_fit"]),
            f"{row['frontier'][0][0] / 2**30:.1f} GiB",
            f"{one['memory_bytes'] / 2**30:.1f} GiB, {one['time_s']:.1f} s",
            f"{one['tflops_per_device']:.0f}",
            f"{one['mesh']}, {one['micro_batches']}",
            f"{row['explore_s']:.0f} s ({row['cpu_s']:.0f} s)",
            f"{row['peak_mib'] / 1024:.1f} GiB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "*Chosen*: the fastest plan that fits 80 GiB, else the leanest.", ""]
    for row in data["rows"]:
        lines += [f"## {row['devices']:,} GPUs", "", *_words(row), ""]
    return "\n".join(lines)


def _words(row: dict[str, Any]) -> list[str]:
    one = row["chosen"]
    lines = [
        f"- axis `{axis}` of {one['axes'][axis]}: "
        + ", ".join(f"{dim} ({count} groups)" for dim, count in pairs)
        for axis, pairs in one["splits"].items()
    ]
    lines.append(
        "- parameters stored (micro-batches, then axes): "
        + "; ".join(f"{stored} ({count})" for stored, count in one["stored"])
    )
    lines.append(
        f"- {one['recomputed_regions']} blocks recomputed; {one['compute_s']:.1f} s compute, "
        f"{one['exposed_s']:.1f} s of {one['communication_s']:.1f} s communication waited for"
    )
    if row["devices"] in PUBLISHED:
        lines.append(f"- published (Llama 3 paper, table 4): {PUBLISHED[row['devices']]}")
    return lines


def picture(data: dict[str, Any]) -> str:
    stairs = {
        f"{row['devices']:,} GPUs": [(m / 2**30, t) for m, t in row["frontier"]] for row in data["rows"]
    }
    limit = {"80 GiB": CAPACITY_BYTES / 2**30}
    chart = Chart("Llama-3-405B", "memory per GPU, GiB", "step, s", stairs, {}, limit, stairs=True)
    return figure([chart], columns=1)


if __name__ == "__main__":
    main()
