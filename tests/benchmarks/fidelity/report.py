"""Errors, rank correlation, and how they are shown."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from tests.benchmarks.machine import described, rows_described

PAPER = {"RNN": (7.16, 7.16, 4.86), "WideResNet": (7.62, 3.05, 4.47), "Transformer": (5.02, 7.23, 0.98)}
"""TensorOpt, Table 2: errors in per cent of step time, network time and memory, on the authors' GPUs and at
their sizes; to be read beside ours, not against them."""
SIDE, GAP = 240, 56


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


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def with_worst(one: Mapping[str, Any], kind: str) -> str:
    return f"{percent(one[f'{kind}_error'])} ({percent(one[f'{kind}_worst'])})"


def ordered(one: Mapping[str, Any], kind: str) -> str:
    tau = one[kind]
    return "no pair" if tau is None else f"{tau:.2f} ({one[f'{kind}_pairs']} pairs)"


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
    lines = [
        f"# Predicted against executed, {data['date']}",
        "",
        f"{data['cluster']}, optimizer {data['optimizer']}. Taken from {described(data)}.",
        "",
        "Median error (worst) over plans spaced evenly by index along each frontier, which take turns.",
        "*Noise*: half the difference of what every other round says of the same plan. *theirs*:",
        "TensorOpt's Table 2, measured on its authors' GPUs with their models; ours are laptop-size",
        "models on CPU ranks. *tau*: Kendall's, between predicted and measured time: of the pairs of plans",
        "whose measured times differ by more than twice the noise, and of all pairs.",
        "*Network*: seconds of a step's collectives, each from the call of the rank that",
        "comes last to the return of the one done last, so without waiting for a rank that still",
        "computes; measured in the very steps that are timed. *Memory*: the median of a rank's steps, of the",
        "rank that needs most; what the most of all these steps needed is in the JSON.",
        "",
        "| model | plans | time | noise | theirs | network | noise | theirs | memory | theirs"
        " | tau, told apart | tau, all |",
        "|" + "---|" * 12,
    ]
    for one in data["results"]:
        theirs = [f"{x:.2f} %" for x in PAPER.get(one["model"], ())] or ["-"] * 3
        one = {**summary(one["rows"]), **one}  # rows of earlier that day may have a summary that lacks some
        cells = [
            one["model"],
            f"{len(one['rows'])} of {one['points']}",
            with_worst(one, "time"),
            f"{one['noise']:.1%}",
            theirs[0],
            with_worst(one, "network"),
            f"{one['network_noise']:.1%}",
            theirs[1],
            f"{one['memory_error']:.2%} ({one['memory_worst']:.2%})",
            theirs[2],
            ordered(one, "tau"),
            ordered(one, "tau_all"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Each model was taken from:", "", *rows_described(data["results"], "model")]
    for one in data["results"]:
        lines += ["", f"## {one['model']}: {one['source']} {one['settings'] or ''}", ""]
        lines += ["| point | mesh | micro-batches | time predicted / measured | network | memory |"]
        lines += ["|---|---|---|---|---|---|"]
        for r in one["rows"]:
            time, network = (
                f"{1e3 * r[f'{k}_predicted_s']:.1f} / "
                + ", ".join(f"{1e3 * x:.1f}" for x in r[f"{k}_measured_s"])
                + " ms"
                for k in ("time", "network")
            )
            memory = [r[f"memory_{k}_bytes"] / 2**20 for k in ("predicted", "measured")]
            cells = [str(r["point"]), r["mesh"], str(r["micro_batches"]), time, network]
            lines.append("| " + " | ".join([*cells, f"{memory[0]:.2f} / {memory[1]:.2f} MiB"]) + " |")
    return "\n".join(lines) + "\n"


def picture(data: Mapping[str, Any]) -> str:
    """Predicted against measured step time, a square for each model, as SVG."""
    results = data["results"]
    width, height = GAP + (SIDE + GAP) * len(results), SIDE + 2 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="11" fill="#1f2933">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, one in enumerate(results):
        parts += _square(one, GAP + number * (SIDE + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _square(one: Mapping[str, Any], left: float) -> list[str]:
    points = [(statistics.fmean(r["time_measured_s"]), r["time_predicted_s"]) for r in one["rows"]]
    values = [math.log(v) for pair in points for v in pair]
    low, high = min(values) - 0.1, max(values) + 0.1

    def place(value: float) -> float:
        return (math.log(value) - low) / (high - low) * SIDE

    bottom = GAP + SIDE
    parts = [
        f'<rect x="{left}" y="{GAP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#cbd2d9"/>',
        f'<line x1="{left}" y1="{bottom}" x2="{left + SIDE}" y2="{GAP}" stroke="#9aa5b1"/>',
        f'<text x="{left}" y="{GAP - 10}">{escape(one["model"])}: off by {one["time_error"]:.1%}</text>',
        f'<text x="{left}" y="{bottom + 16}">measured {1e3 * math.exp(low):.0f} to'
        f" {1e3 * math.exp(high):.0f} ms; up: predicted</text>",
    ]
    parts += [
        f'<circle cx="{left + place(x):.1f}" cy="{bottom - place(y):.1f}" r="3.5" fill="#2f6fb2"/>'
        for x, y in points
    ]
    return parts
