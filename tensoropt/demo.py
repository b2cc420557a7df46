"""The whole loop on one model: explore, choose by a budget, run both ends, compare with the predictions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensoropt import verify
from tensoropt.api import explore
from tensoropt.cluster import load_cluster
from tensoropt.console import columns, shows_progress
from tensoropt.engine.models import ModelSpec
from tensoropt.errors import MeasurementError, TensorOptError
from tensoropt.exploration.exploration import Exploration
from tensoropt.exploration.figure_rows import FigureRow
from tensoropt.exploration.frontier_table import frontier_svg, frontier_text
from tensoropt.plan.plan import Plan
from tensoropt.question.model_source import load_model
from tensoropt.ranks.local_hardware import has_local_cores
from tensoropt.report.beside import busy_words
from tensoropt.report.table import point_lines, run_line, summary_lines
from tensoropt.types import Progress, ProgressChoice, heard
from tensoropt.units import format_bytes, format_seconds

_RUN_TIMEOUT_S = 300.0
"""The timeout of a job under torchrun; an assumption: a few steps of a model that a demo can explore take
seconds."""
_Say = Callable[[str], object]


class DemoResult(NamedTuple):
    """The result of the demo.

    Attributes:
        data: ``ok``, ``runs`` and the places of the files, as plain data.
        text: predictions next to measurements, as a table.
        ok: whether every run agrees with the unsplit model.
    """

    data: dict[str, Any]
    text: str
    ok: bool


@shows_progress
def run_demo(
    source: str = "zoo:gpt2-demo",
    cluster: str = "cpu",
    folder: str | os.PathLike[str] = "out/demo",
    *,
    steps: int = 4,
    progress: ProgressChoice = None,
    say: _Say | None = None,
) -> DemoResult:
    """Explore a model, choose and run plans, and return the measurements next to the predictions.

    The frontier, the plans and their runs are saved in ``folder``.

    Args:
        source: the model's source.
        cluster: ``cpu`` or ``cpu:N``; the plans are run here.
        steps: the number of training steps under torchrun.
        progress: as in :func:`tensoropt.explore`.
        say: prints parts of the answer while the rest is still being computed; by default on standard output.

    Raises:
        TensorOptError: the cluster is not this machine's CPU ranks, or the model cannot be explored.
        MeasurementError: a run failed.
    """
    folder, report = Path(folder), heard(progress)
    tell: _Say = getattr(report, "say", print) if say is None else say
    where = load_cluster(cluster)
    if not has_local_cores(where):
        raise TensorOptError(
            f"the demo runs plans on CPU ranks of this machine; {where.name} is not that: "
            "use cpu:N, or local:N without GPUs"
        )
    loaded = load_model(source)
    exploration = explore(
        loaded.model, loaded.args, loaded.kwargs, cluster=where, source=source, progress=report
    )
    exploration.save(folder)
    frontier_svg(exploration, folder / "frontier.svg", title=f"{source} on {where.device_count} CPU ranks")
    tell("\n".join([frontier_text(exploration), "", *summary_lines(exploration)]))
    budget = (exploration.points[0].memory_bytes + exploration.points[-1].memory_bytes) / 2
    chosen = exploration.index(memory_bytes=budget)
    plans = {
        "leanest": exploration.plan(0),
        "fastest": exploration.plan(len(exploration.points) - 1),
        "chosen": exploration.plan(chosen),
    }
    for name, plan in plans.items():
        plan.save(folder / f"plan-{name}.json")
    tell(
        "\n".join(
            [
                f"\na budget of {format_bytes(budget)} per device, half way between both ends, gives",
                *point_lines(FigureRow.of(exploration, chosen)),
                f"\nrunning the leanest and the fastest plan for {steps} steps beside the unsplit model",
            ]
        )
    )
    # Saved for the user; only the ends are run, which differ most.
    del plans["chosen"]
    data = _run_beside_unsplit(plans, folder, steps, report)
    data |= {"out": str(folder), "points": len(exploration.points), "budget_bytes": budget, "chosen": chosen}
    text = "\n".join([_result_text(data["runs"]), "", *_file_lines(exploration, folder)])
    return DemoResult(data, text, bool(data["ok"]))


def _run_beside_unsplit(
    plans: Mapping[str, Plan], folder: Path, steps: int, progress: Progress
) -> dict[str, Any]:
    """Return ``ok`` and ``runs``: predictions and measurements of each plan and of the unsplit model."""
    first = next(iter(plans.values()))
    unsplit = verify.verify_unsplit(ModelSpec.of(first), first.optimizer, progress=progress)
    split = verify.verify_plans(list(plans.values()), progress=progress)
    runs = dict(zip(("unsplit", *plans), (*unsplit["plans"], *split["plans"]), strict=True))
    jobs = {"unsplit": verify.unsplit_plan(first, runs["unsplit"]), **plans}
    for done, (name, plan) in enumerate(jobs.items()):
        progress("torchrun", done, len(jobs), name)
        path = folder / f"plan-{name}.json"
        plan.save(path)
        runs[name]["torchrun"] = torchrun(plan, path, folder / f"run-{name}.json", steps)
    progress("torchrun", len(jobs), len(jobs), "")
    return {"ok": unsplit["ok"] and split["ok"], "module": split["module"], "runs": runs}


def torchrun(plan: Plan, path: Path, result: Path, steps: int) -> dict[str, Any]:
    """Train by a plan file for some steps, as a person would from the shell, and return the job's own report.

    Raises:
        MeasurementError: the job failed; the message ends with its last output.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.devices),
        "-m", "tensoropt.execute", str(path), "--steps", str(steps), "--json", str(result),
    ]  # fmt: skip
    # One thread per rank, as on the ranks on which predictions were measured.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        job = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"{path.name} did not finish {steps} steps within {_RUN_TIMEOUT_S:.0f} s"
        ) from None
    if job.returncode:
        tail = " ".join(job.stderr.strip().splitlines()[-3:])
        raise MeasurementError(f"running {path.name} under torchrun failed: {tail}")
    report = dict(json.loads(result.read_text(encoding="utf-8")))
    losses = [math.nan if loss is None else loss for loss in report["losses"]]  # null is what JSON has for it
    return report | {"losses": losses}


def _result_text(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return predictions next to measurements, a row per run, and what went wrong."""
    rows = [
        ["", "memory pred.", "tracked", "off by", "time pred.", "measured", "off by", "torchrun", "last loss",
         "loss diff.", "gradient diff.", "collectives", "verdict"]
    ]  # fmt: skip
    for name, run in runs.items():
        predicted, issued = (
            sum(c["count"] for c in run[f"collectives_{k}"]) for k in ("predicted", "issued")
        )
        rows.append(
            [
                name,
                format_bytes(run["memory_predicted_bytes"]),
                format_bytes(run["memory_tracked_bytes"]),
                _off_by(run["memory_predicted_bytes"], run["memory_tracked_bytes"]),
                format_seconds(run["time_predicted_s"]),
                format_seconds(run["time_measured_s"]),
                _off_by(run["time_predicted_s"], run["time_measured_s"]),
                format_seconds(run["torchrun"]["time_s"]),
                f"{run['torchrun']['losses'][-1]:.6f}",
                f"{run['loss_difference']:.1e}",
                f"{run['gradient_difference']:.1e}",
                f"{predicted} {'!=' if run['collectives_unlike'] else '='} {issued}",
                "ok" if run["ok"] else "FAILED",
            ]
        )
    lean, fast = runs["leanest"], runs["fastest"]
    share = {
        k: lean[f"memory_{k}_bytes"] / fast[f"memory_{k}_bytes"]
        for k in ("predicted", "tracked")
        if fast[f"memory_{k}_bytes"]
    }
    lines = [
        columns(rows, left=(0,)),
        "loss diff., gradient diff.: the largest differences from the unsplit model, relative",
        "torchrun, last loss: median step and loss after the steps when run by torchrun",
        "the leanest plan needs "
        + " and ".join(f"{100 * value:.0f} % as {k}" for k, value in share.items())
        + " of the fastest one's memory",
    ]
    busy = max((run.get("cores_busy") or 0.0 for run in runs.values()), default=0.0)
    if words := busy_words(busy):
        lines.append(f"{words}, so measured times say little; run the demo again when it is idle")
    for name, run in runs.items():
        lines += [f"{name}: {line}" for line in _complaints(run)]
    return "\n".join(lines)


def _complaints(run: Mapping[str, Any]) -> list[str]:
    """Return what went wrong in a run, one line each."""
    unlike = *run["collectives_unlike"], *run["order_unlike"], *(run["memory_unlike"] or ())
    return [*([run["error"]] if run["error"] else []), *unlike]


def _off_by(predicted: float, measured: float) -> str:
    """Return the signed relative error of a prediction, in words."""
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured else ""


def _file_lines(exploration: Exploration, folder: Path) -> list[str]:
    """Return the list of saved files, and a command to run one of them."""
    return [
        f"saved in {folder}: frontier.csv ({len(exploration.points)} points), frontier.svg, "
        "plan-chosen.json, plan-leanest.json, plan-fastest.json",
        f"run one yourself: {run_line(exploration.devices, str(folder / 'plan-chosen.json'))}",
    ]
