"""What `make demo` finds, kept for README: the frontier's size and both ends, predicted and run. Not a test.

    python -m tests.benchmarks.demo.bench_demo

Results: tests/benchmarks/results/demo/DATE-demo.json, and the picture notebooks/frontier.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tensoropt.plan import load_exploration
from tests.benchmarks.machine import RESULTS, machine

PICTURE = Path(__file__).parents[3] / "notebooks" / "frontier.svg"
KEPT = (
    "memory_predicted_bytes", "memory_tracked_bytes", "time_predicted_s", "time_measured_s",
    "loss_difference", "gradient_difference", "ok",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, written into out/demo-quick")
    options = parser.parse_args()
    at_start = machine()
    with tempfile.TemporaryDirectory() as temporary:
        command = [
            sys.executable,
            "-m",
            "tensoropt",
            "demo",
            "--json",
            "--cluster",
            "local:2",
            "--out",
            temporary,
        ]
        command += ["--model", "zoo:mlp", "--steps", "2"] if options.quick else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        exploration = load_exploration(temporary)
        folder = Path("out/demo-quick") if options.quick else RESULTS / "demo"
        folder.mkdir(parents=True, exist_ok=True)
        picture = folder / "frontier.svg" if options.quick else PICTURE
        shutil.copy(Path(temporary) / "frontier.svg", picture)
    date = datetime.date.today().isoformat()
    data = {
        "date": date,
        "machine": at_start,
        "model": exploration.model.source,
        "parameters_m": exploration.model.parameters / 1e6,
        "points": found["points"],
        "seconds": exploration.report["seconds"],
        "runs": {name: {key: run[key] for key in KEPT} for name, run in found["runs"].items()},
    }
    path = folder / f"{date}-demo.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
