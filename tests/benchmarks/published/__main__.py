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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.machine import Taking, dated, write
from tests.benchmarks.program import Row
from tests.benchmarks.published import fits, memory
from tests.benchmarks.published.predict import DEPTHS, TERMS, Work, in_processes, predict
from tests.benchmarks.published.report import markdown, medians, picture
from tests.benchmarks.published.runs import Run, load_models, load_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    rows_of = parser.add_mutually_exclusive_group(required=True)
    rows_of.add_argument("--runs", type=Path, help="CSV, a row per run")
    rows_of.add_argument("--memory", type=Path, help="CSV, a row per peak of memory or part of it")
    parser.add_argument("--models", type=Path, required=True, help="YAML, the numbers of each model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--rows", metavar="PATTERN", default="", help="only rows whose id matches")
    parser.add_argument(
        "--what", choices=("both", "steps", "memory"), default="both", help="what of runs is predicted"
    )
    parser.add_argument("--core", action="store_true", help="only rows that say core=yes, a balanced subset")
    parser.add_argument("--without", choices=TERMS, help="a modelling term to leave out")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="at once")
    options = parser.parse_args()
    taking = Taking()
    models = load_models(memory.MODELS) | load_models(options.models)
    (_memory if options.memory else _runs)(options, models, taking)


def _rows(
    options: argparse.Namespace, runs: Sequence[Run], models: Mapping[str, Any], work: Work
) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in in_processes(runs, models, Path(folder), options.processes, work):
            rows.append(row)
            if not options.json:
                print(f"{len(rows)}/{len(runs)} {row['id']}: {_told(row)}", flush=True)
    return rows


def _runs(options: argparse.Namespace, models: Mapping[str, Any], taking: Taking) -> None:
    every = load_runs(options.runs)
    runs = [run for run in every if (run.core or not options.core) and re.search(options.rows, run.id)]
    rows: list[Row] = []
    memory_rows: list[Row] = []
    if options.what != "memory":
        rows = _rows(options, runs, models, partial(predict, left_out=options.without))
    if options.what != "steps":
        say = [run for run in runs if fits.is_of_memory(run)]
        memory_rows = _rows(options, say, models, fits.measure)
    data = {
        **taking.about,
        "runs": options.runs.name,
        "left_out": f"{len(every) - len(runs)} of {len(every)} rows were not asked for",
        "depths": f"deeper models are extended from {DEPTHS[0]} and {DEPTHS[1]} blocks",
        "without": options.without,
        "medians": medians(rows),
        "rows": rows,
        "memory": fits.summary(memory_rows),
        "memory_rows": memory_rows,
        "taken": taking.part(),
    }
    if options.what == "memory":
        write(dated("published", "fits", out=options.out), data, words := fits.markdown(data))
    else:
        stem = dated("published", "published", out=options.out)
        write(stem, data, words := markdown(data, stem.name), picture(rows))
    print(json.dumps(data) if options.json else words)


def _memory(options: argparse.Namespace, models: Mapping[str, Any], taking: Taking) -> None:
    rows = _rows(options, memory.load_memory(options.memory), models, memory.measure)
    about = {**taking.about, "runs": options.memory.name, "medians": memory.medians(rows)}
    data = {**about, "rows": rows, "taken": taking.part()}
    write(dated("published", "memory", out=options.out), data, words := memory.markdown(data))
    print(json.dumps(data) if options.json else words)


def _told(row: Row) -> str:
    """Predicted over published, as far as there are both, and whether a run fits."""
    if row["refused"] is not None:
        return f"refused: {row['refused']}"
    what = "bytes" if "predicted_bytes" in row else "step_s"
    predicted, published = row[f"predicted_{what}"], row[f"published_{what}"]
    off = f"{predicted / published - 1:+.1%}" if predicted and published else ""
    return f"{off} {row.get('verdict', '')}"


if __name__ == "__main__":
    main()
