"""How long a person waits for a frontier: whole `tensoropt explore` processes. Not a test.

    python -m tests.benchmarks.explore.bench_explore [--quick] [--runs N] [name ...]

Each exploration is run in processes of its own, interpreter start included: *cold*, with an empty profile
store and nothing kept, then *warm*, the same again, then with a smaller gap, for which facts are known and
the search is not. Seconds are medians of ``--runs`` rounds. Nothing is timed on devices: all figures of
the explorations are data sheets'. Results: tests/benchmarks/results/explore/DATE-explore.{json,md}.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensoropt.console import json_text
from tensoropt.exploration.exploration import load_exploration
from tests.benchmarks.machine import Results, described, rows_described

ONNX = "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512"
"""The light models that the onnx package ships."""
LIMIT_S = 900.0
"""A process that takes longer is ended, and its row says so."""
LOOK_S = 0.02
"""How often is looked whether a process has ended."""
STAGES = ("capture", "costs", "search", "judge")


def cases(folder: Path) -> dict[str, list[str]]:
    """Command lines by name.

    Args:
        folder: for what has to be written before.
    """
    light = Path(importlib.util.find_spec("onnx").origin).parent / "backend/test/data/light"
    of_nodes = folder / "of_nodes.json"
    of_nodes.write_text(json_text(_of_nodes()), encoding="utf-8")
    scale = ["--dtype", "bfloat16", "--batch", "2048", "--micro-batches", "16"]
    wide = ["--dtype", "float32"]
    return {
        "gpt2": ["zoo:gpt2", "--cluster", "dgx-h100", *wide],
        "llama3-8b": ["zoo:llama3-8b", "--cluster", "dgx-h100x4", *wide],
        "llama3-405b": [
            "zoo:llama3-405b",
            "--cluster",
            "dgx-h100x128",
            "--constraints",
            str(of_nodes),
            *scale,
        ],
        "llama3-405b-all": ["zoo:llama3-405b", "--cluster", "dgx-h100x128", *scale[:4]],
        **{
            f"onnx-{name}": [
                str(light / f"light_{name}.onnx"),
                "--cluster",
                "dgx-v100",
                "--mode",
                "inference",
            ]
            for name in ONNX.split()
        },
    }


def _of_nodes() -> dict[str, Any]:
    """Constraints that hold on the mesh nodes x GPUs only, and forbid nothing there (papers/scale.py)."""
    from tests.benchmarks.papers.scale import OF_NODES

    return OF_NODES


QUICK = {
    "mlp": ["zoo:mlp", "--cluster", "dgx-h100"],
    "gpt2-tiny": ["zoo:gpt2-tiny", "--cluster", "dgx-h100", "--dtype", "float32"],
}


def run(arguments: list[str], cache: Path, out: Path) -> dict[str, Any]:
    """One process: its seconds, its peak memory, and what the exploration says of its stages."""
    command = [sys.executable, "-m", "tensoropt", "explore", *arguments, "--out", str(out)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TENSOROPT_CACHE": str(cache)}
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as told:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=told)
        # Not Popen's own wait, which keeps the peak memory of the process to itself.
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.perf_counter() - begun > LIMIT_S:
                process.kill()
                os.wait4(process.pid, 0)
                return {"seconds": None, "why": f"ended after {LIMIT_S:.0f} s"}
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode:
            told.seek(0)
            return {"seconds": None, "why": told.read().decode().strip().splitlines()[-1]}
    found = load_exploration(out)
    report = found.report
    return {
        "seconds": seconds,
        "peak_bytes": ended[2].ru_maxrss * 1024,
        "stages": report["seconds"],
        "points": len(found.points),
        "simulated": report["points_before_judging"],
        "worst_gap": max(point.gap for point in found.points),
    }


def measured(name: str, arguments: list[str], runs: int) -> dict[str, Any]:
    """A row: medians of cold, warm, and with smaller gap."""
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": [], "smaller gap": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            cache, out = Path(folder) / "cache", Path(folder) / "out"
            for kind, more in (("cold", []), ("warm", []), ("smaller gap", ["--epsilon", "0.0005"])):
                rounds[kind].append(run([*arguments, *more], cache, out))
                print(f"  {name}, {kind}: {rounds[kind][-1]}", flush=True)
                if rounds[kind][-1]["seconds"] is None:
                    return {"key": name, "why": rounds[kind][-1]["why"], "command": arguments}
    cold = rounds["cold"]
    return {
        "key": name,
        "command": arguments,
        "runs": runs,
        **{kind: statistics.median(one["seconds"] for one in of) for kind, of in rounds.items()},
        "stages": {s: statistics.median(one["stages"].get(s, 0.0) for one in cold) for s in STAGES},
        "peak_bytes": max(one["peak_bytes"] for one in cold),
        "points": cold[-1]["points"],
        "simulated": cold[-1]["simulated"],
        "worst_gap": cold[-1]["worst_gap"],
    }


def markdown(data: Mapping[str, Any]) -> str:
    """The result as a page."""
    lines = [
        f"# Seconds until a frontier, {data['date']}",
        "",
        "Whole processes, medians: *cold* with nothing known, *warm* the same again, *smaller gap* with "
        "operator graph and facts known and the search made anew. Stages are of the cold runs; the rest of "
        "them is the interpreter's start and the model's construction. Peak memory is that of the largest "
        "process.",
        "",
        f"Taken from {described(data)}.",
        "",
        "| exploration | runs | cold/s | warm/s | smaller gap/s | "
        "capture | costs | search | simulate | points | peak/GiB |",
        "|" + " --- |" * 11,
    ]
    for row in data["rows"]:
        if "why" in row:
            lines.append(f"| {row['key']} | | {row['why']} |" + " |" * 8)
            continue
        seconds = [row["cold"], row["warm"], row["smaller gap"]]
        seconds += [row["stages"][stage] for stage in STAGES]
        cells = [row["key"], str(row["runs"]), *(f"{one:.1f}" for one in seconds), str(row["points"])]
        cells.append(f"{row['peak_bytes'] / 2**30:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *rows_described(data["rows"], "key"), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="explorations; default: all")
    parser.add_argument("--quick", action="store_true", help="two small ones, once, to see that it works")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        every = QUICK if options.quick else cases(Path(folder))
        if unknown := [name for name in options.names if name not in every]:
            parser.error(f"unknown exploration {unknown[0]!r}; choose from {', '.join(every)}")
        results = Results("explore", "explore", {}, quick=options.quick)
        for name in options.names or every:
            results.add("key", measured(name, every[name], 1 if options.quick else options.runs))
            results.write(markdown(results.data))
    print(markdown(results.data))


if __name__ == "__main__":
    main()
