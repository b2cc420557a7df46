"""Seconds of ``explore`` from the shell: with an empty store, asked again, and with other links. Not a test.

    python -m tests.benchmarks.explore.bench_explore [--quick] [ROW ...]

Of each row medians of five, with the seconds until the first answer and those of each stage. Kernels are
compiled before. Rows of one day are kept, so that it may be run in parts.

Results: tests/benchmarks/results/explore/DATE-explore.{json,md}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.benchmarks.machine import described, rows_described
from tests.benchmarks.program import Row, page, run_parts, table

_ROWS = {
    "gpt2": ("zoo:gpt2", "H100-80GB", 8, 1),
    "llama3-8b": ("zoo:llama3-8b", "H100-80GB", 8, 4, "--batch", "256", "--dtype", "bfloat16"),
    "llama3-8b-qlora": ("zoo:llama3-8b", "RTX-4090", 1, 1, "--lora", "r=16,base=nf4"),
    "resnet50": ("zoo:resnet50", "A100-80GB", 8, 1, "--batch", "2048"),
    "mixtral-8x7b": ("zoo:mixtral-8x7b", "H100-80GB", 8, 4),
}
"""Model, device, devices of a node, nodes, and what else is asked."""
_LINKS = {"cold": "NVLink4", "again": "NVLink4", "other links": "NVLink3"}


def _row(name: str, quick: bool) -> Iterator[Row]:
    repeats = [_asked(name) for _ in range(1 if quick else 5)]
    medians = {
        asked: {key: round(median(one[asked][key] for one in repeats), 2) for key in repeats[0][asked]}
        for asked in _LINKS
    }
    yield {"name": name, "asked": medians}


def _asked(name: str) -> dict[str, dict[str, float]]:
    model, kind, count, nodes, *more = _ROWS[name]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for asked, link in _LINKS.items():
            cluster, devices = Path(folder) / f"{link}.yaml", [{"kind": kind, "count": count}]
            links = {"intra_node": link, "inter_node": {"link": "IB-400G", "count": 8}}
            told = {"name": link, "devices": devices, "nodes": nodes, "links": links}
            cluster.write_text(yaml.safe_dump(told), encoding="utf-8")
            words = [model, "--cluster", str(cluster), *more, "--json", "--out", f"{folder}/{asked}"]
            found[asked] = _timed(words, {**os.environ, "TENSOROPT_CACHE": f"{folder}/store"})
    return found


def _timed(words: list[Any], env: dict[str, str]) -> dict[str, float]:
    command, start, first = [sys.executable, "-m", "tensoropt", "explore", *words], time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as answer:
        with subprocess.Popen(command, stdout=answer, stderr=subprocess.PIPE, text=True, env=env) as running:
            for line in running.stderr or ():
                first = time.perf_counter() - start if line.startswith("Before the search") else first
        seconds = time.perf_counter() - start
        assert running.returncode == 0, " ".join(command)
        answer.seek(0)
        return {"all": seconds, "first answer": first, **json.load(answer)["report"]["seconds"]}


def _markdown(data: Mapping[str, Any]) -> str:
    rows = [
        [row["name"], asked, ", ".join(f"{k} {s:.1f}" for k, s in told.items())]
        for row in data["rows"]
        for asked, told in row["asked"].items()
    ]
    return page(
        f"# Seconds of explore, {data['date']}",
        described(data),
        table(["row", "asked", "seconds"], rows),
        rows_described(data["rows"], "name"),
    )


if __name__ == "__main__":
    run_parts(
        __doc__,
        "once, written into out/explore",
        ("explore", "explore"),
        {name: partial(_row, name) for name in _ROWS},
        lambda data: (_markdown(data), None),
        key="name",
    )
