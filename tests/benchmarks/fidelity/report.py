"""Errors, rank correlation, and how they are shown."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.machine import described, rows_described
from tests.benchmarks.program import page, table

PAPER = {"RNN": (7.16, 7.16, 4.86), "WideResNet": (7.62, 3.05, 4.47), "Transformer": (5.02, 7.23, 0.98)}
"""TensorOpt, Table 2: errors in per cent of step time, network time and memory, on the authors' GPUs and at
their sizes; to be read beside ours, not against them."""
TITLES = (
    "model", "plans", "time", "noise", "theirs", "network", "noise", "theirs", "memory", "theirs",
    "tau, told apart", "tau, all",
)  # fmt: skip


def error(predicted: float, measured: Sequence[float] | float) -> float:
    """Relative error against the mean of what was measured; 0 where both are 0."""
    truth = statistics.fmean(measured) if isinstance(measured, Sequence) else measured
    return abs(predicted - truth) / truth if truth else 0.0


def spread(measured: Sequence[float]) -> float:
    """Half the difference of the two halves, relative: what a perfect prediction could be off by."""
    middle = statistics.fmean(measured)
    return abs(measured[0] - measured[1]) / 2 / middle if middle else 0.0


def kendall(rows: Sequence[Mapping[str, Any]], noise: float | None = None) -> tuple[float | None, int]:
    """(Kendall's tau between predicted and measured time, pairs of plans counted); None without pairs.

    Tau is the share of pairs that prediction and measurement put in one order, less the share that they put
    in opposite orders; of a tie in either, neither.

    Args:
        noise: pairs whose measured times differ by at most twice this share of the slower one are left out,
            since measuring them once more may turn them round. None: all pairs count.
    """
    agree = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        first, second = (statistics.fmean(r["time_measured_s"]) for r in (a, b))
        if noise is not None and abs(first - second) <= 2 * noise * max(first, second):
            continue
        pairs += 1
        same = (first - second) * (a["time_predicted_s"] - b["time_predicted_s"])
        agree += 1 if same > 0 else -1 if same < 0 else 0
    return (agree / pairs if pairs else None), pairs


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst errors, noise floors, rank correlation of the pairs told apart and of all pairs."""
    found: dict[str, Any] = {}
    for kind, unit in (("time", "s"), ("network", "s"), ("memory", "bytes")):
        errors = [error(r[f"{kind}_predicted_{unit}"], r[f"{kind}_measured_{unit}"]) for r in rows]
        found[f"{kind}_error"], found[f"{kind}_worst"] = statistics.median(errors), max(errors)
    found["noise"] = statistics.median(spread(r["time_measured_s"]) for r in rows)
    found["network_noise"] = statistics.median(spread(r["network_measured_s"]) for r in rows)
    found["bias"] = statistics.median(
        r["time_predicted_s"] / statistics.fmean(r["time_measured_s"]) - 1 for r in rows
    )
    found["tau"], found["tau_pairs"] = kendall(rows, found["noise"])
    found["tau_all"], found["tau_all_pairs"] = kendall(rows)
    return found


def markdown(data: Mapping[str, Any]) -> str:
    """The tables."""
    plans: list[str | list[str]] = []
    for one in data["results"]:
        plans += [f"## {one['model']}: {one['source']} {one['settings'] or ''}"]
        plans += [table(PLAN_TITLES, map(_plan_cells, one["rows"]))]
    return page(
        f"# Predicted against executed, {data['date']}",
        f"{data['cluster']}, optimizer {data['optimizer']}. Taken from {described(data)}.",
        EXPLAINED,
        table(TITLES, map(_cells, data["results"])),
        "Each model was taken from:",
        rows_described(data["results"], "model"),
        *plans,
    )


EXPLAINED = (
    "Median error (worst) over plans spaced evenly by index along each frontier, which take turns.",
    "*Noise*: half the difference of what every other round says of the same plan. *theirs*:",
    "TensorOpt's Table 2, measured on its authors' GPUs with their models; ours are laptop-size",
    "models on CPU ranks. *tau*: Kendall's, between predicted and measured time: of the pairs of plans",
    "whose measured times differ by more than twice the noise, and of all pairs.",
    "*Network*: seconds of a step's collectives, each from the call of the rank that",
    "comes last to the return of the one done last, so without waiting for a rank that still",
    "computes; measured in the very steps that are timed. *Memory*: the median of a rank's steps, of the",
    "rank that needs most; what the most of all these steps needed is in the JSON.",
)
PLAN_TITLES = ("point", "mesh", "micro-batches", "time predicted / measured", "network", "memory")


def _cells(one: Mapping[str, Any]) -> list[str]:
    theirs = [f"{x:.2f} %" for x in PAPER.get(one["model"], ())] or ["-"] * 3
    time, network = (f"{one[f'{k}_error']:.1%} ({one[f'{k}_worst']:.1%})" for k in ("time", "network"))
    order = (
        "no pair" if one[k] is None else f"{one[k]:.2f} ({one[f'{k}_pairs']} pairs)"
        for k in ("tau", "tau_all")
    )
    return [
        one["model"], f"{len(one['rows'])} of {one['points']}", time, f"{one['noise']:.1%}", theirs[0],
        network, f"{one['network_noise']:.1%}", theirs[1],
        f"{one['memory_error']:.2%} ({one['memory_worst']:.2%})", theirs[2], *order,
    ]  # fmt: skip


def _plan_cells(row: Mapping[str, Any]) -> list[str]:
    time, network = (
        f"{1e3 * row[f'{k}_predicted_s']:.1f} / "
        + ", ".join(f"{1e3 * x:.1f}" for x in row[f"{k}_measured_s"])
        + " ms"
        for k in ("time", "network")
    )
    memory = " / ".join(f"{row[f'memory_{k}_bytes'] / 2**20:.2f}" for k in ("predicted", "measured"))
    return [row["point"], row["mesh"], row["micro_batches"], time, network, f"{memory} MiB"]


def picture(data: Mapping[str, Any]) -> str:
    """Predicted against measured step time, a chart for each model, as SVG."""
    charts = []
    for one in data["results"]:
        pairs = [(statistics.fmean(r["time_measured_s"]), r["time_predicted_s"]) for r in one["rows"]]
        places = [(1e3 * measured, 1e3 * predicted) for measured, predicted in pairs]
        ends = min(map(min, places)), max(map(max, places))
        title = f"{one['model']}: off by {one['time_error']:.1%}"
        equal = {"equal": [(end, end) for end in ends]}
        charts.append(Chart(title, "measured, ms", "predicted, ms", equal, {"plans": places}))
    return figure(charts)
