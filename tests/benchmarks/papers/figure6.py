"""TensorOpt's Figure 6: frontiers of four models on 16 devices, other planners marked. Not a test.

    python -m tests.benchmarks.papers.figure6 [--quick] [model ...]

Models: VGG16, WideResNet, RNN, Transformer, at the paper's sizes, on the preset of its cluster (two servers
of eight V100) from data-sheet figures. A step is one pass over the batch: no micro-batches, no
recomputation; parameters may be stored in shards (ZeRO).
OptCNN, Tofu and data parallelism choose from the same tables and are scored by the same judge. Dotted, as in
the paper, are the seconds of computing and of collectives at each point of the frontier.
Results: tests/benchmarks/results/papers/DATE-figure6.{json,md,svg} and DATE-figure6-MODEL.csv; ``--quick``
takes laptop-size models and writes into out/papers.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.console import ProgressDisplay
from tensoropt.exploration.export import write_frontier_csv
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import Results, described, rows_described
from tests.benchmarks.program import arguments, table

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
DOTTED = {"compute_s": "computing", "communication_s": "collectives"}
"""Columns of the CSV that are drawn dotted."""
POINTS, SHOWN = 500, 200
"""Kept per table while searching (the gap says what that costs), and in the result."""


def measure(name: str, source: str, settings: dict[str, int], path: Path) -> dict[str, Any]:
    """Explore one model; the frontier thinned, rivals' rows, seconds by stage."""
    built = zoo.build(source, device="meta", **settings)
    begun, cpu = time.perf_counter(), time.process_time()
    found = explore(
        built.model, built.args, built.kwargs, cluster=CLUSTER, optimizer=OPTIMIZER, micro_batches=(1,),
        dtype="float32", recompute="never", max_points=POINTS, source=f"zoo:{source}", planners=tuple(RIVALS),
        process_memory=False, progress=ProgressDisplay(),
    )  # fmt: skip
    spent = time.perf_counter() - begun, time.process_time() - cpu
    path.parent.mkdir(parents=True, exist_ok=True)
    write_frontier_csv(found, path)
    points = found.points
    shown = sorted({round(i * (len(points) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    return {
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
        "seconds": found.report["seconds"],
        "frontier": [[points[i].memory_bytes, points[i].time_s] for i in shown],
        "planners": [
            {k: row[k] for k in ("planner", "memory_bytes", "time_s", "search_s", "gap", "notes")}
            for row in found.comparison
            if row["planner"] in RIVALS
        ],
    }


def markdown(data: dict[str, Any], stem: str) -> str:
    lines = [
        f"# Frontiers of the paper's four models on 16 devices, {data['date']}",
        "",
        f"![frontiers]({stem}.svg)",
        "",
        f"After TensorOpt (arXiv 2004.10856), Figure 6. Preset `{CLUSTER}`, {OPTIMIZER}, one pass over the",
        "batch per step. Step times are predictions from data sheets, not measurements, so they are not set",
        "beside the paper's. Dotted, as there: network and compute time of each point. Exploring (planners",
        "included): seconds at each row's load, and CPU seconds.",
        "",
        f"Taken from {described(data)}.",
        "",
        *table(
            ["model", "parameters", "points", "leanest", "fastest", *RIVALS.values(), "explored in (CPU)"],
            map(_cells, data["rows"]),
        ),
        "",
        "`+` of a planner: its time over the best known within the same memory.",
        "",
        *ABOUT,
        "",
    ]
    for row in data["rows"]:
        settings = "".join(f", {key} {value}" for key, value in row["settings"].items())
        lines.append(f"- {row['model']}: `zoo:{row['source']}`{settings}")
        lines += [f"- {row['model']}: {shortened(note)}" for note in dict.fromkeys(row.get("notes", ()))]
        lines += [
            f"- {row['model']}, {RIVALS[p['planner']]}: {note if p['time_s'] is None else shortened(note)}"
            for p in row["planners"]
            for note in p["notes"]
        ]
    lines += ["", "Each row was taken from:", "", *rows_described(data["rows"], "model")]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    rivals = {p["planner"]: p for p in row["planners"]}
    gap = "exact" if row["exact"] else f"gap at most {row['worst_gap']:.2%}"
    cells = [row["model"], f"{row['parameters'] / 1e9:.2f} G", f"{row['points']}, {gap}"]
    cells += [_place(*row["frontier"][0]), _place(*row["frontier"][-1])]
    cells += [_rival(rivals.get(name)) for name in RIVALS]
    cpu = f" ({row['cpu_s']:.0f} s)" if "cpu_s" in row else ""
    return [*cells, f"{row['explore_s']:.0f} s{cpu}"]


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


def picture(data: dict[str, Any], stem: Path) -> str:
    """A chart per model; the dotted lines are of the CSV beside ``stem``, which has every point."""
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
        dotted = parts(stem.with_name(f"{stem.name}-{row['model']}.csv"))
        axes = "memory per device, GiB", "step time, ms"
        charts.append(Chart(row["model"], *axes, stairs, marks, stairs=True, dotted=dotted))
    return figure(charts)


def parts(path: Path) -> dict[str, list[tuple[float, float]]]:
    """GiB and milliseconds of the parts of the steps in a frontier's CSV, by their names."""
    with path.open(encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))
    return {
        name: [(float(p["memory_bytes"]) / 2**30, 1e3 * float(p[column])) for p in points]
        for column, name in DOTTED.items()
    }


def main() -> None:
    options = arguments(__doc__, "laptop-size models, to see that it works", MODELS).parse_args()
    cases = QUICK if options.quick else MODELS
    about = {"cluster": CLUSTER, "optimizer": OPTIMIZER}
    results = Results("papers", "figure6", about, quick=options.quick)
    for name in options.names or cases:
        points = results.stem.with_name(f"{results.stem.name}-{name}.csv")
        results.add("model", measure(name, *cases[name], points))
        results.data["rows"].sort(key=lambda row: list(MODELS).index(row["model"]))
        results.write(markdown(results.data, results.stem.name), picture(results.data, results.stem))
        print(markdown(results.data, results.stem.name), flush=True)


if __name__ == "__main__":
    main()
