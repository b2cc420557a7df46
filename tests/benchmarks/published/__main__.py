"""Published training runs predicted from data sheets, their configuration pinned.

    python -m tests.benchmarks.published --runs FILE.csv --models FILE.yaml --out DIR [--json]
    python -m tests.benchmarks.published --memory FILE.csv --models FILE.yaml --out DIR [--json]

The first writes DIR/DATE-published.{json,md,svg}: a row per run (``id, predicted_step_s, published_step_s,
predicted_memory_bytes, refused``), medians of the errors by source, and predicted over published seconds; of
runs that say something of memory (a peak, or ``outcome`` ``oom``), which need no ``step_s``, also what their
processes are predicted to take (``memory_rows``: ``id, outcome, meter, predicted_bytes, published_bytes,
needed_bytes, device_bytes, fits, verdict, terms, refused``), errors by meter and how many layouts are right
(``memory``). ``--what memory`` writes DIR/DATE-fits.{json,md} of these alone.
The second writes DIR/DATE-memory.{json,md}: a row per published peak of memory, or part of it, and medians of
the errors by what was measured. What cannot be expressed is refused, with the reason in its row. ``--json``
prints the result as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import Taking, dated, write
from tests.benchmarks.published import fits, memory
from tests.benchmarks.published.predict import DEPTHS, TERMS, predicted
from tests.benchmarks.published.report import markdown, medians, picture
from tests.benchmarks.published.runs import load_models, load_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    rows_of = parser.add_mutually_exclusive_group(required=True)
    rows_of.add_argument("--runs", type=Path, help="CSV, a row per run")
    rows_of.add_argument("--memory", type=Path, help="CSV, a row per peak of memory or part of it")
    parser.add_argument("--models", type=Path, required=True, help="YAML, the numbers of each model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--whole", action="store_true", help="simulate every block of each model: ten times slower"
    )
    parser.add_argument("--single-node", action="store_true", help="only runs on a single node")
    parser.add_argument("--rows", metavar="PATTERN", default="", help="only rows whose id matches")
    parser.add_argument(
        "--what", choices=("both", "steps", "memory"), default="both", help="what of runs is predicted"
    )
    parser.add_argument("--core", action="store_true", help="only rows that say core=yes, a balanced subset")
    parser.add_argument(
        "--overlap",
        choices=("default", "none"),
        default="default",
        help="none: all communication is waited for",
    )
    parser.add_argument("--without", choices=TERMS, help="a modelling term to leave out")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="at once")
    options = parser.parse_args()
    taking = Taking()
    models = load_models(memory.MODELS) | load_models(options.models)
    (_memory if options.memory else _runs)(options, models, taking)


def _runs(options: argparse.Namespace, models: dict[str, Any], taking: Taking) -> None:
    every = load_runs(options.runs)
    runs = [run for run in every if run.single_node or not options.single_node]
    runs = [run for run in runs if (run.core or not options.core) and re.search(options.rows, run.id)]
    rows, memory_rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        ways = {"whole": options.whole, "overlap": options.overlap, "left_out": options.without}
        if options.what != "memory":
            for row in predicted(runs, models, Path(folder), options.processes, **ways):
                rows.append(row)
                if not options.json:
                    print(f"{len(rows)}/{len(runs)} {row['id']}: {_told(row)}", flush=True)
        if options.what != "steps":
            say = [run for run in runs if fits.is_of_memory(run)]
            for row in memory.measured(say, models, Path(folder), options.processes, fits.measure):
                memory_rows.append(row)
                if not options.json:
                    print(f"{len(memory_rows)}/{len(say)} {row['id']}: {fits.told(row)}", flush=True)
    depths = (
        "every block of each model was simulated"
        if options.whole
        else f"deeper models are extended from {DEPTHS[0]} and {DEPTHS[1]} blocks"
    )
    data = {
        **taking.about,
        "runs": options.runs.name,
        "left_out": f"{len(every) - len(runs)} of {len(every)} rows were not asked for",
        "depths": depths,
        "overlap": options.overlap,
        "without": options.without,
        "medians": medians(rows),
        "rows": rows,
        "memory": fits.summary(memory_rows),
        "memory_rows": memory_rows,
        "taken": taking.part(),
    }
    if options.what == "memory":
        write(dated("published", "fits", out=options.out), data, words := fits.markdown(data))
        print(json.dumps(data) if options.json else words)
        return
    stem = dated("published", "published", out=options.out)
    write(stem, data, markdown(data, stem.name), picture(rows))
    print(json.dumps(data) if options.json else markdown(data, stem.name))


def _memory(options: argparse.Namespace, models: dict[str, Any], taking: Taking) -> None:
    runs, rows = memory.load_memory(options.memory), []
    with tempfile.TemporaryDirectory() as folder:
        for row in memory.measured(runs, models, Path(folder), options.processes):
            rows.append(row)
            if not options.json:
                off = row["refused"] or f"{row['predicted_bytes'] / row['published_bytes'] - 1:+.1%}"
                print(f"{len(rows)}/{len(runs)} {row['id']}: {off}", flush=True)
    data = {
        **taking.about,
        "runs": options.memory.name,
        "medians": memory.medians(rows),
        "rows": rows,
        "taken": taking.part(),
    }
    write(dated("published", "memory", out=options.out), data, words := memory.markdown(data))
    print(json.dumps(data) if options.json else words)


def _told(row: dict[str, Any]) -> str:
    if row["refused"] is not None:
        return f"refused: {row['refused']}"
    ratio = row["predicted_step_s"] / row["published_step_s"]
    return (
        f"{row['predicted_step_s']:.3f} s predicted, {row['published_step_s']:.3f} s published, {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
