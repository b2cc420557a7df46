"""TensorOpt's Figure 6: frontiers of four models on 16 devices, other planners marked. Not a test.

    python -m tests.benchmarks.papers.figure6 [--quick] [model ...]

Models: VGG16, WideResNet, RNN, Transformer, at the paper's sizes, on the preset of its cluster (two servers
of eight V100) from data-sheet figures. As in the paper a step is one pass over the batch: no micro-batches,
no recomputation; sharded parameters (ZeRO) stay an option, which the paper's space lacks.
OptCNN, Tofu and data parallelism choose from the same tables and are scored by the same judge.
Results: tests/benchmarks/results/papers/DATE-figure6.{json,md,svg} and DATE-figure6-MODEL.csv; ``--quick``
takes laptop-size models and writes into out/papers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from tensoropt import zoo
from tensoropt.api import explore
from tensoropt.console import Progress
from tensoropt.plan.export import write_frontier_csv
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import RESULTS, Results, described

CLUSTER = "tensoropt-paper"
RIVALS = {"optcnn": "OptCNN", "tofu": "Tofu", "data_parallel": "data parallelism"}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "VGG16": ("vgg16", {}),
    "WideResNet": ("wide-resnet-152", {}),
    "RNN": ("rnn-lm", {"steps": 1}),
    "Transformer": ("transformer-2.6b", {}),
}
QUICK: dict[str, tuple[str, dict[str, int]]] = {
    "VGG16": ("vgg11-tiny", {}),
    "Transformer": ("transformer-tiny", {"batch": 16}),
}
REMARKS = {
    "RNN": "one time step, a chain of layers: unrolled cells share weights, and with every further step more "
    "operators are tied to each other (treewidth 20 at six steps), which the paper's whole layers are not"
}
DIFFERENCES = (
    "OptCNN lies at the fast end of a frontier, Tofu and data parallelism above it, and data parallelism",
    "cannot hold the large models: as in the paper. Unlike there, parameters may be stored in shards (ZeRO),",
    "so lean ends are leaner, and Tofu, which splits every tensor but stores no shards, is not the leanest.",
)
OPTIMIZER = "sgd"
NOTE = 120
"""Characters shown of a planner's note; the JSON has it whole."""
POINTS, SHOWN = 500, 200
"""Kept per table while searching (the gap says what that costs), and in the result."""


def measure(name: str, source: str, settings: dict[str, int], csv: Path) -> dict[str, Any]:
    """Explore one model; the frontier thinned, rivals' rows, seconds by stage."""
    built = zoo.build(source, device="meta", **settings)
    begun = time.perf_counter()
    found = explore(
        built.model, built.args, built.kwargs, cluster=CLUSTER, optimizer=OPTIMIZER, micro_batches=(1,),
        recompute="never", max_points=POINTS, source=f"zoo:{source}", planners=tuple(RIVALS),
        progress=Progress(),
    )  # fmt: skip
    spent = time.perf_counter() - begun
    csv.parent.mkdir(parents=True, exist_ok=True)
    write_frontier_csv(found, csv)
    points = found.points
    shown = sorted({round(i * (len(points) - 1) / (SHOWN - 1)) for i in range(SHOWN)})
    return {
        "model": name,
        "source": source,
        "settings": settings,
        "remark": REMARKS.get(name, ""),
        "parameters": found.model.parameters,
        "points": len(points),
        "exact": all(p.exact for p in points),
        "worst_gap": max(p.gap for p in points),
        "explore_s": spent,
        "seconds": found.report["seconds"],
        "frontier": [[points[i].memory_bytes, points[i].time_s] for i in shown],
        "planners": [
            {k: row[k] for k in ("planner", "memory_bytes", "time_s", "search_s", "gap", "notes")}
            for row in found.comparison
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
        "beside the paper's. Seconds of exploring were taken while other programs used the machine.",
        "",
        f"Machine: {described(data['machine'])}.",
        "",
        "| model | parameters | points | leanest | fastest | "
        + " | ".join(RIVALS.values())
        + " | explored in |",
        "|" + " --- |" * (6 + len(RIVALS)),
    ]
    for row in data["rows"]:
        first, last = row["frontier"][0], row["frontier"][-1]
        rivals = {p["planner"]: p for p in row["planners"]}
        gap = "exact" if row["exact"] else f"gap at most {row['worst_gap']:.2%}"
        cells = [row["model"], f"{row['parameters'] / 1e9:.2f} G", f"{row['points']}, {gap}"]
        cells += [_place(*first), _place(*last)]
        cells += [_rival(rivals.get(name)) for name in RIVALS]
        lines.append("| " + " | ".join([*cells, f"{row['explore_s']:.0f} s"]) + " |")
    lines += ["", "`+` of a planner: its time over the frontier's at the same memory.", "", *DIFFERENCES, ""]
    for row in data["rows"]:
        lines += [f"- {row['model']}: {row['remark']}."] if row["remark"] else []
        lines += [
            f"- {row['model']}, {RIVALS[p['planner']]}: {note}"
            for p in row["planners"]
            for note in p["notes"]
        ]
    return "\n".join(lines) + "\n"


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


def picture(data: dict[str, Any]) -> str:
    charts = []
    for row in data["rows"]:
        marks = {
            RIVALS[p["planner"]]: [(p["memory_bytes"] / 2**30, 1e3 * p["time_s"])]
            for p in row["planners"]
            if p["time_s"] is not None
        }
        stairs = {"frontier": [(m / 2**30, 1e3 * t) for m, t in row["frontier"]]}
        charts.append(
            Chart(row["model"], "memory per device, GiB", "step time, ms", stairs, marks, {}, stairs=True)
        )
    return figure(charts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="laptop-size models, to see that it works")
    options = parser.parse_args()
    cases = QUICK if options.quick else MODELS
    if unknown := [name for name in options.models if name not in cases]:
        parser.error(f"unknown model {unknown[0]!r}; choose from {', '.join(cases)}")
    folder = Path("out/papers") if options.quick else RESULTS / "papers"
    results = Results(folder, "figure6", {"cluster": CLUSTER, "optimizer": OPTIMIZER})
    for name in options.models or cases:
        csv = results.stem.with_name(f"{results.stem.name}-{name}.csv")
        results.add("model", measure(name, *cases[name], csv))
        results.write(markdown(results.data, results.stem.name), picture(results.data))
        print(markdown(results.data, results.stem.name), flush=True)


if __name__ == "__main__":
    main()
