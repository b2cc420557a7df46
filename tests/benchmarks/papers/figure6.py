"""TensorOpt's Figure 6: frontiers of four models on 16 devices, other planners marked. Not a test.

    python -m tests.benchmarks.papers.figure6 [--quick] [model ...]

Models: VGG16, WideResNet, RNN, Transformer, at the paper's sizes, on the preset of its cluster (two servers
of eight V100) from data-sheet figures. A step is one pass over the batch: no micro-batches, no
recomputation; parameters may be stored in shards (ZeRO).
OptCNN, Tofu and data parallelism choose from the same tables and are scored by the same judge.
Results: tests/benchmarks/results/papers/DATE-figure6.{json,md,svg}; ``--quick`` takes laptop-size models and
writes into out/papers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.console import ProgressDisplay
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import described, rows_described
from tests.benchmarks.program import Row, page, run_parts, table

CLUSTER = "tensoropt-paper"
RIVALS = {"optcnn": "OptCNN", "tofu": "Tofu", "data_parallel": "data parallelism"}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "VGG16": ("vgg16", {}),
    "WideResNet": ("wide-resnet-152", {}),
    "RNN": ("rnn-lm", {"steps": 4}),
    "Transformer": ("transformer-2.6b", {}),
}
QUICK: dict[str, tuple[str, dict[str, int]]] = {
    "VGG16": ("vgg11-tiny", {}),
    "RNN": ("rnn-lm-tiny", {"steps": 3, "batch": 16}),
    "Transformer": ("transformer-tiny", {"batch": 16}),
}
ABOUT = (
    "Each planner answers with one plan: OptCNN with the fastest, Tofu with the one that sends least, data",
    "parallelism with whole parameters on every device. The frontier may store parameters in shards (ZeRO).",
)
OPTIMIZER = "sgd"
NOTE = 120
"""Characters shown of a planner's note; the JSON has it whole."""
POINTS, SHOWN = 500, 200
"""Kept per table while searching (the gap says what that costs), and in the result."""


def _measured(name: str, quick: bool) -> Iterator[Row]:
    """Explore one model; the frontier thinned, and rivals' rows."""
    source, settings = (QUICK if quick else MODELS)[name]
    built = zoo.build(source, device="meta", **settings)
    begun, cpu = time.perf_counter(), time.process_time()
    found = explore(
        built.model, built.args, built.kwargs, cluster=CLUSTER, optimizer=OPTIMIZER, micro_batches=(1,),
        dtype="float32", recompute="never", max_points=POINTS, source=f"zoo:{source}", planners=tuple(RIVALS),
        process_memory=False, progress=ProgressDisplay(),
    )  # fmt: skip
    spent = time.perf_counter() - begun, time.process_time() - cpu
    points = found.points
    shown = sorted({round(i * (len(points) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    yield {
        "model": name,
        "source": source,
        "settings": settings,
        "parameters": found.model.parameters,
        "points": len(points),
        "exact": all(p.exact for p in points),
        "worst_gap": max(p.gap for p in points),
        "explore_s": spent[0],
        "cpu_s": spent[1],
        "notes": [note for space in found.spaces for note in space.notes],
        "frontier": [[points[i].memory_bytes, points[i].time_s] for i in shown],
        "planners": [
            {k: row[k] for k in ("planner", "memory_bytes", "time_s", "search_s", "gap", "notes")}
            for row in found.comparison
            if row["planner"] in RIVALS
        ],
    }


def markdown(data: Mapping[str, Any], picture: str) -> str:
    notes: list[str] = []
    for row in data["rows"]:
        settings = "".join(f", {key} {value}" for key, value in row["settings"].items())
        notes.append(f"- {row['model']}: `zoo:{row['source']}`{settings}")
        notes += [f"- {row['model']}: {shortened(note)}" for note in dict.fromkeys(row["notes"])]
        notes += [
            f"- {row['model']}, {RIVALS[p['planner']]}: {note if p['time_s'] is None else shortened(note)}"
            for p in row["planners"]
            for note in p["notes"]
        ]
    return page(
        f"# Frontiers of the paper's four models on 16 devices, {data['date']}",
        f"![frontiers]({picture})",
        (
            f"After TensorOpt (arXiv 2004.10856), Figure 6. Preset `{CLUSTER}`, {OPTIMIZER}, one pass over",
            "the batch per step. Step times are predictions from data sheets, not measurements, so they are",
            "not set beside the paper's. Exploring (planners included): seconds at each row's load, and CPU",
            "seconds.",
        ),
        f"Taken from {described(data)}.",
        table(
            ["model", "parameters", "points", "leanest", "fastest", *RIVALS.values(), "explored in (CPU)"],
            map(_cells, data["rows"]),
        ),
        "`+` of a planner: its time over the best known within the same memory.",
        ABOUT,
        notes,
        "Each row was taken from:",
        rows_described(data["rows"], "model"),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    rivals = {p["planner"]: p for p in row["planners"]}
    gap = "exact" if row["exact"] else f"gap at most {row['worst_gap']:.2%}"
    cells = [row["model"], f"{row['parameters'] / 1e9:.2f} G", f"{row['points']}, {gap}"]
    cells += [_place(*row["frontier"][0]), _place(*row["frontier"][-1])]
    cells += [_rival(rivals.get(name)) for name in RIVALS]
    return [*cells, f"{row['explore_s']:.0f} s ({row['cpu_s']:.0f} s)"]


def shortened(note: str) -> str:
    """Lists of hundreds of operators are cut."""
    return note if len(note) <= NOTE else note[:NOTE].rsplit(",", 1)[0] + ", ..."


def _place(memory_bytes: float, time_s: float) -> str:
    return f"{memory_bytes / 2**30:.2f} GiB, {1e3 * time_s:.0f} ms"


def _rival(row: dict[str, Any] | None) -> str:
    if row is None or row["time_s"] is None:
        return "refuses"
    above = "" if row["gap"] is None else f" (+{row['gap']:.1%})" if row["gap"] > 0 else " (on it)"
    return _place(row["memory_bytes"], row["time_s"]) + above


def picture(data: Mapping[str, Any]) -> str:
    """A chart per model."""
    charts = []
    for row in data["rows"]:
        rivals = {p["planner"]: p for p in row["planners"] if p["time_s"] is not None}
        marks = {
            title if name in rivals else f"{title} (refuses)": [
                (p["memory_bytes"] / 2**30, 1e3 * p["time_s"]) for p in [rivals.get(name)] if p
            ]
            for name, title in RIVALS.items()
        }
        stairs = {"frontier": [(m / 2**30, 1e3 * t) for m, t in row["frontier"]]}
        axes = "memory per device, GiB", "step time, ms"
        charts.append(Chart(row["model"], *axes, stairs, marks, stairs=True))
    return figure(charts)


if __name__ == "__main__":
    run_parts(
        __doc__,
        "laptop-size models, to see that it works",
        ("papers", "figure6"),
        {name: partial(_measured, name) for name in MODELS},
        lambda data: (markdown(data, f"{data['date']}-figure6.svg"), picture(data)),
        few=tuple(QUICK),
        order=lambda row: list(MODELS).index(row["model"]),
        about={"cluster": CLUSTER, "optimizer": OPTIMIZER},
    )
