"""What `make demo` finds, kept for README: the frontier's size and both ends, predicted and run. Not a test.

    python -m tests.benchmarks.demo.bench_demo

Results: tests/benchmarks/results/demo/DATE-demo.{json,md}, and the picture notebooks/frontier.svg.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensoropt
from tensoropt.files import write_text
from tensoropt.verify import verify_plan
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import Taking, dated, described, part_described, write
from tests.benchmarks.program import arguments, page, table

PICTURE = Path(__file__).parents[3] / "notebooks" / "frontier.svg"
KEPT = (
    "memory_predicted_bytes", "memory_tracked_bytes", "time_predicted_s", "time_measured_s",
    "loss_difference", "gradient_difference", "ok",
)  # fmt: skip


def main() -> None:
    options = arguments(__doc__, "a small model, written into out/demo").parse_args()
    taking = Taking()
    stem = dated("demo", "demo", quick=options.quick)
    stem.parent.mkdir(parents=True, exist_ok=True)
    picture = stem.with_suffix(".svg") if options.quick else PICTURE
    source = "zoo:mlp" if options.quick else "zoo:gpt2-demo"
    exploration = tensoropt.explore(tensoropt.load_model(source), cluster="local:2")
    stairs = [(point.memory_bytes / 2**20, point.time_s) for point in exploration.frontier]
    title = f"{source} on 2 CPU ranks"
    chart = Chart(title, "memory per device, MiB", "time per step, s", {"frontier": stairs}, stairs=True)
    write_text(picture, figure([chart], columns=1))
    ends = {"leanest": exploration.plan(0), "fastest": exploration.plan(len(exploration.points) - 1)}
    runs = {name: verify_plan(plan)["plans"][0] for name, plan in ends.items()}
    data = {
        **taking.about,
        "taken": taking.part(),
        "model": exploration.model.source,
        "parameters_m": exploration.model.parameters / 1e6,
        "points": len(exploration.points),
        "seconds": exploration.report["seconds"],
        "runs": {name: {key: run[key] for key in KEPT} for name, run in runs.items()},
    }
    write(stem, data, markdown(data, os.path.relpath(picture, stem.parent)))
    print(stem.with_suffix(".json"))


def markdown(data: dict[str, Any], picture: str) -> str:
    rows = [
        [name, *(f"{run[f'memory_{k}_bytes'] / 2**20:.1f} MiB" for k in ("predicted", "tracked")),
         *(f"{1e3 * run[f'time_{k}_s']:.0f} ms" for k in ("predicted", "measured"))]
        for name, run in data["runs"].items()
    ]  # fmt: skip
    what = f"{data['model']}, {data['parameters_m']:.1f} M parameters, two CPU ranks"
    return page(
        f"# The demo's frontier, {data['date']}",
        f"![frontier]({picture})",
        f"{what}: {data['points']} points. Both ends were run.",
        (f"Taken from {described(data)}.", f"When it was done: {part_described(data['taken'])}."),
        table(["plan", "memory predicted", "tracked", "step predicted", "measured"], rows),
    )


if __name__ == "__main__":
    main()
