"""FastT's comparison: nine models, strong and weak scaling, what is cut, where operators lie.

Yi et al., Fast Training of Deep Learning Models over Multiple GPUs, Middleware 2020. The paper measured on
V100s; here every step is played by one judge on data-sheet figures, beside what the paper says of its tables
and figures. Batches are this benchmark's: the paper's were not at hand, but for Bert-large's.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import InfeasibleError, TensorOptError
from tensoropt.placement import simulate_placement
from tensoropt.placement.prices import PricedGraph
from tensoropt.planners.pinned import PinnedConfiguration, simulate_pinned
from tensoropt.planners.placed import os_dpos
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
from tests.benchmarks.charts import Chart, figure
from tests.benchmarks.papers.planned import Row, captured, played, priced

CLUSTER = "fastt-paper"
SCALED = ((f"{CLUSTER}[2]", 2, 1), (f"{CLUSTER}[4]", 4, 1), (CLUSTER, 8, 2))
"""Clusters with their GPUs and servers: the paper's has four GPUs per server."""
Options = tuple[tuple[str, int], ...]
BERT: Options = (("sequence", 64),)
MODELS: dict[str, tuple[int, Options]] = {
    "lenet": (256, ()),
    "alexnet": (256, ()),
    "vgg19": (64, ()),
    "gnmt": (128, ()),
    "bert-large": (16, BERT),
    "transformer-base": (64, ()),
    "rnnlm": (64, ()),
    "inception-v3": (64, ()),
    "resnet200": (32, ()),
}
"""The paper's nine: the global batch of the strong, the batch per device of the weak scaling."""
QUICK: dict[str, tuple[int, Options]] = {"lenet": (32, ())}
RATES = {"data_parallel": "data parallelism", "dpos": "DPOS", "os_dpos": "OS-DPOS"}
CUT = {
    "inception-v3": "convolutions",
    "vgg19": "convolutions",
    "resnet200": "convolutions",
    "transformer-base": "products",
    "bert-large": "products",
}
"""What the paper's splits that gain are of (Table 6); of the other models there are none."""
FILLED = (16, 32, 48, 64, 96, 128)
"""Batches of Bert-large on two GPUs; the paper trains 48 where data parallelism ends at 32."""


def scaling(quick: bool) -> Iterator[Row]:
    """Samples per second of data parallelism, DPOS and OS-DPOS (Tables 1 to 3)."""
    for model, (batch, options) in (QUICK if quick else MODELS).items():
        for kind in ("strong", "weak"):
            for cluster, devices, servers in SCALED[:1] if quick else SCALED:
                samples = batch if kind == "strong" else batch * devices
                row = {"section": "scaling", "key": f"{model}, {kind}, {cluster}", "model": model}
                row |= {"scaling": kind, "devices": devices, "servers": servers, "batch": samples}
                yield row | _scaled(model, cluster, samples, options)


def _scaled(model: str, cluster: str, samples: int, options: Options) -> Row:
    found = {"data_parallel": data_parallel(model, cluster, samples, options)}
    with ProfileStore() as store:
        graph = priced(model, samples, load_cluster(cluster), store, options)
        found |= {name: played(name, graph) for name in ("dpos", "os_dpos")}
    done = {name: row for name, row in found.items() if "refused" not in row}
    return {
        "samples_per_s": {name: samples / row["time_s"] for name, row in done.items()},
        "memory_bytes": {name: row["memory_bytes"] for name, row in done.items()},
        "expected_s": found["os_dpos"].get("expected_s"),
        "busiest": found["os_dpos"].get("busiest"),
        "os_dpos_notes": found["os_dpos"].get("notes", ()),
        "cpu_s": {name: row["cpu_s"] for name, row in done.items()},
        "refused": {name: row["refused"] for name, row in found.items() if name not in done},
    }


def data_parallel(model: str, cluster: str, batch: int, options: Options) -> Row:
    """The batch split over all devices, parameters whole on each: the step, or that it does not fit."""
    where, cpu = load_cluster(cluster), time.process_time()
    with ProfileStore() as store:
        costs = CostSource(where, store, Settings(process_memory=False), None)
        try:
            point = simulate_pinned(
                captured(model, batch, options), costs, PinnedConfiguration(data=where.device_count)
            ).point
        except TensorOptError as error:
            return {"refused": str(error)}
    if point.memory_bytes > where.memory_bytes:
        needs, room = (size / 2**30 for size in (point.memory_bytes, where.memory_bytes))
        return {"refused": f"needs {needs:.1f} of {room:.0f} GiB", "memory_bytes": point.memory_bytes}
    return {
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "compute_s": point.compute_s,
        "copy_s": point.communication_s,
        "cpu_s": time.process_time() - cpu,
    }


def splits(quick: bool) -> Iterator[Row]:
    """On four GPUs, from both starts of OS-DPOS: what is cut, where operators lie, what a step has (Tables 5
    and 6, Figures 4 and 5)."""
    for model, (batch, options) in (QUICK if quick else MODELS).items():
        cluster = SCALED[1][0]
        with ProfileStore() as store:
            graph = priced(model, batch, load_cluster(cluster), store, options)
            yield {
                "section": "splits",
                "key": f"{model}, splits",
                "model": model,
                "devices": SCALED[1][1],
                "batch": batch,
                "data_parallel": data_parallel(model, cluster, batch, options),
                "dpos": played("dpos", graph),
                "starts": [_from(start, name) for start, name in os_dpos._starts(graph, None)],
            }


def _from(start: PricedGraph, name: str) -> Row:
    """OS-DPOS's answer from one start; what it cuts beyond what the start has cut."""
    try:
        graph, answer = os_dpos._place_from(start, None)
    except InfeasibleError as error:
        return {"start": name, "refused": str(error)}
    simulated = simulate_placement(graph.problem, answer.placement)
    device, count = np.array(answer.placement.device), graph.problem.devices.count
    cut = {
        group: [split.label, split.pieces]
        for group, split in graph.graph.splits.items()
        if start.graph.splits.get(group) != split
    }
    seconds = graph.problem.forward_s + graph.problem.backward_s
    groups = [(o, graph.whole_of(o)) for o in range(graph.problem.size)]
    return {
        "start": name,
        "time_s": simulated.time_s,
        "compute_s": max(simulated.busy_s),
        "copy_s": max(map(simulated.communication_s, range(count))),
        "memory_bytes": simulated.memory_bytes,
        "cut": cut,
        "kinds": dict(Counter(kind(group) for group in cut)),
        "whole_kinds": dict(
            Counter(kind(g) for g in {g for _, g in groups if g is not None} if g not in cut)
        ),
        "group_s": {str(g): float(seconds[o, device[o]]) for o, g in reversed(groups) if g is not None},
        "operators": np.bincount(device, minlength=count).tolist(),
        "parameter_bytes": np.bincount(device, graph.problem.parameter_bytes, minlength=count).tolist(),
    }


def kind(group: str) -> str:
    """The kind of an operator, from its group's name."""
    return re.sub(r"_\d+$", "", group)


def filled(quick: bool) -> Iterator[Row]:
    """Which batches of Bert-large fit two GPUs."""
    for batch in FILLED[:1] if quick else FILLED:
        with ProfileStore() as store:
            graph = priced("bert-large", batch, load_cluster(SCALED[0][0]), store, BERT)
            found = {name: played(name, graph) for name in ("dpos", "os_dpos")}
        found["data_parallel"] = data_parallel("bert-large", SCALED[0][0], batch, BERT)
        yield {"section": "filled", "key": f"bert-large, {batch}", "batch": batch, **found}


def tables(rows: Sequence[Row], stem: str) -> list[str]:
    """Lines of Markdown: the paper's tables and figures, each beside what it says."""
    of = {
        name: [r for r in rows if r["section"] == name] for name in ("scaling", "splits", "filled", "order")
    }
    return [
        "## FastT: strong and weak scaling, samples per second",
        "",
        f"![samples per second]({stem}-scaling.svg)",
        "",
        f"`{CLUSTER}`: servers of four GPUs. *Expects*: OS-DPOS's own estimate of its step, in which",
        "messages never queue (FastT, section 5.1, equation EST). *Busiest link*: how long it is occupied in",
        "the judge's step, where each device is sent a copy.",
        "",
        _line(
            ["model", "scaling", "GPUs", "batch", *RATES.values(), "OS-DPOS: step", "expects", "busiest link"]
        ),
        _rule(10),
        *map(_scaling_line, of["scaling"]),
        "",
        *_why_slower(of["scaling"]),
        "## FastT's gains, theirs beside ours",
        "",
        *beside(of["scaling"], of["order"]),
        "",
        *_strategy_seconds(of["scaling"]),
        *_cuts(of["splits"]),
        *_devices(of["splits"]),
        *_filled(of["filled"]),
    ]


def _strategy_seconds(rows: Sequence[Row]) -> list[str]:
    """Table 4."""
    by = {(r["model"], r["devices"]): r["cpu_s"].get("os_dpos") for r in rows if r["scaling"] == "strong"}
    counts = [devices for _, devices, _ in SCALED]
    lines = [
        "## FastT's Table 4: seconds until a strategy",
        "",
        "Theirs: minutes, and over an hour for the Transformer on 8 GPUs, runs that measure included.",
        "Ours: CPU seconds of OS-DPOS from both starts, from data sheets, on a machine with other load.",
        "",
        _line(["model", *(f"{n} GPUs" for n in counts)]),
        _rule(1 + len(counts)),
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        cells = [by.get((model, n)) for n in counts]
        lines.append(_line([model, *("" if s is None else f"{s:.1f} s" for s in cells)]))
    return [*lines, ""]


def _cuts(rows: Sequence[Row]) -> list[str]:
    """Tables 5 and 6."""
    lines = [
        "## FastT's Tables 5 and 6: what is cut, on 4 GPUs",
        "",
        "Operators that OS-DPOS cuts beyond what its start has cut, and the step of DPOS, which cuts none.",
        "Theirs: which operators the paper's splits gain of.",
        "",
        _line(["model", "theirs", "DPOS", "start", "step", "cut", "the rest"]),
        _rule(7),
    ]
    for row in rows:
        for start in row["starts"]:
            about = [row["model"], CUT.get(row["model"], "none"), _step(row["dpos"])]
            name = start["start"].partition(" (")[0]
            if "refused" in start:
                lines.append(_line([*about, name, "no room", "", ""]))
                continue
            lines.append(
                _line(
                    [*about, name, _ms(start["time_s"]), _kinds(start["kinds"]), _kinds(start["whole_kinds"])]
                )
            )
    vgg = next((r for r in rows if r["model"] == "vgg19"), None)
    whole = (
        next((s for s in vgg["starts"] if s["start"].startswith("the model") and "cut" in s), None)
        if vgg
        else None
    )
    if whole is None:
        return [*lines, ""]
    lines += [
        "",
        "VGG-19 (Table 5; theirs: the long convolutions are cut, the fully connected layers, whose",
        "parameters are large, are not), from the model itself, longest first:",
        "",
        _line(["operator", "seconds, whole or a piece", "cut"]),
        _rule(3),
    ]
    shown = sorted(
        (g for g in whole["group_s"] if kind(g) in ("conv2d", "linear")),
        key=lambda g: -whole["group_s"][g] * (whole["cut"][g][1] if g in whole["cut"] else 1),
    )
    for group in shown:
        label, pieces = whole["cut"].get(group, ("", 1))
        words = f"along {label} in {pieces}" if pieces > 1 else "no"
        lines.append(_line([group, _ms(whole["group_s"][group]), words]))
    return [*lines, ""]


def _devices(rows: Sequence[Row]) -> list[str]:
    """Figures 4 and 5."""
    lines = [
        "## FastT's Figures 4 and 5: operators by device, and what a step has, on 4 GPUs",
        "",
        "Theirs: one GPU holds many more operators, those with large parameters; beside data parallelism the",
        "computing rises, copies and the step fall. Ours: the better start; *compute* of the busiest device,",
        "*copies* of messages for each device, or of collectives.",
        "",
        _line(
            ["model", "operators", "parameters, MiB", "data parallelism: compute", "copies", "step",
             "OS-DPOS: compute", "copies", "step"]
        ),
        _rule(9),
    ]  # fmt: skip
    for row in rows:
        best = min((s for s in row["starts"] if "refused" not in s), key=lambda s: s["time_s"], default=None)
        if best is None:
            continue
        sizes = " ".join(f"{size / 2**20:.0f}" for size in best["parameter_bytes"])
        cells = [row["model"], " ".join(map(str, best["operators"])), sizes]
        for part in (row["data_parallel"], best):
            keys = ("compute_s", "copy_s", "time_s")
            cells += ["refuses", "", ""] if "refused" in part else [_ms(part[key]) for key in keys]
        lines.append(_line(cells))
    return [*lines, ""]


def _filled(rows: Sequence[Row]) -> list[str]:
    lines = [
        "## FastT's Bert-large: batches that fit 2 GPUs of 16 GB, sequence 64",
        "",
        "Theirs: batch 48, where data parallelism ends at 32. Ours: memory of the fullest device.",
        "",
        _line(["batch", *RATES.values()]),
        _rule(4),
    ]
    for row in rows:
        lines.append(_line([str(row["batch"]), *(_memory(row[name]) for name in RATES)]))
    return [*lines, ""]


def beside(scaled: Sequence[Row], order: Sequence[Row]) -> list[str]:
    """Lines of Markdown: the paper's largest gains, marked as theirs, and ours of the same kind."""
    strong, weak = (
        {_name(row): gain for row in scaled if row["scaling"] == kind and (gain := _gain(row)) is not None}
        for kind in ("strong", "weak")
    )
    vgg = {name: gain for name, gain in strong.items() if name == "vgg19, 4 GPUs"}
    ordered = {
        f"{row['model']}, {row['planner']}": 1 - row["enforced_s"] / row["first_ready_s"]
        for row in order
        if row["devices"] == 2
    }
    rows = [
        ("strong scaling, VGG on 4 GPUs: OS-DPOS over data parallelism", "+59.4 % (table 1)", vgg),
        ("strong scaling, the most of all models", "+59.4 % (section 8: 63.6 %)", strong),
        ("weak scaling, the most of all models", "+19.2 %, VGG on 16 GPUs (table 2)", weak),
        ("order enforcement on 2 GPUs: what the step loses at most", "26.9 % (figure 2)", ordered),
    ]
    return [
        "| FastT's largest gains | theirs, measured on V100s | ours, under the judge |",
        "| --- | --- | --- |",
        *(f"| {what} | {theirs} | {_most(ours)} |" for what, theirs, ours in rows if ours),
        "",
        "Theirs are gains over TensorFlow 1.14, the data parallelism of its slim library and an executor",
        "that takes operators first in, first out. Ours are over a data parallelism that reduces gradients",
        "along rings beside backward, and over devices that take what became ready first; what an executor",
        "costs is in no data sheet. That leaves less to gain (a guess: nothing was run on a machine like",
        "theirs).",
    ]


def _scaling_line(row: Row) -> str:
    rates = [row["samples_per_s"].get(name) for name in RATES]
    cells = [row["model"], row["scaling"], _gpus(row), str(row["batch"])]
    cells += ["refuses" if rate is None else f"{rate:,.0f}" for rate in rates]
    if rate := row["samples_per_s"].get("os_dpos"):
        step_s, busiest = row["batch"] / rate, row["busiest"]
        cells += [_ms(step_s), _ms(row["expected_s"]), f"{busiest['lane']}, {_ms(busiest['busy_s'])}"]
    else:
        cells += [""] * 3
    return _line(cells)


def _why_slower(rows: Sequence[Row]) -> list[str]:
    """Why OS-DPOS makes less of more GPUs, where it does."""
    queued, uncut = [], []
    for row, before in _grown(rows):
        rates = [r["samples_per_s"].get("os_dpos") for r in (row, before)]
        if rates[0] is None or rates[1] is None or rates[0] >= rates[1]:
            continue
        found = uncut if "model itself" in row["os_dpos_notes"][0] else queued
        found.append(f"{row['model']} ({row['scaling']}, {_gpus(row)})")
    lines = []
    if queued:
        lines += [
            f"OS-DPOS slower than on half the GPUs, since messages queue: {', '.join(queued)}.",
            "It starts from the batch cut for all GPUs, with each parameter on one of them, and expects that",
            "the others fetch it, return its gradients and exchange what is cut otherwise side by side; the",
            "four of the other server share one network card for that. Data parallelism reduces along rings.",
            "",
        ]
    if uncut:
        lines += [
            f"OS-DPOS slower than on half the GPUs, since it cuts too little: {', '.join(uncut)}.",
            "The model itself is the better start there, or the only one that fits; algorithm 2 cuts",
            "operators of its critical path, the longest first, until one gains nothing.",
            "",
        ]
    return lines


def _grown(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows with those of half the GPUs."""
    for row in rows:
        for before in rows:
            same = (row["model"], row["scaling"]) == (before["model"], before["scaling"])
            if same and row["devices"] == 2 * before["devices"]:
                yield row, before


def picture(rows: Sequence[Row]) -> str:
    """A chart per model and kind of scaling: samples per second against GPUs."""
    charts = []
    for model, scale in dict.fromkeys((row["model"], row["scaling"]) for row in rows):
        of = [row for row in rows if (row["model"], row["scaling"]) == (model, scale)]
        lines = {
            title: [(r["devices"], r["samples_per_s"][name]) for r in of if r["samples_per_s"].get(name)]
            for name, title in RATES.items()
        }
        charts.append(Chart(f"{model}, {scale} scaling", "GPUs", "samples/s", lines))
    return figure(charts)


def _gpus(row: Row) -> str:
    return str(row["devices"]) if row["servers"] == 1 else f"{row['devices']} in {row['servers']} servers"


def _name(row: Row) -> str:
    return f"{row['model']}, {row['devices']} GPUs" + (f" in {row['servers']} servers" * (row["servers"] > 1))


def _gain(row: Row) -> float | None:
    rates = row["samples_per_s"]
    if "os_dpos" not in rates or "data_parallel" not in rates:
        return None
    return float(rates["os_dpos"] / rates["data_parallel"] - 1)


def _most(gains: dict[str, float]) -> str:
    best = max(gains, key=gains.__getitem__)
    return f"{100 * gains[best]:+.1f} % ({best})"


def _kinds(kinds: dict[str, int]) -> str:
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{count} {name}" for name, count in most[:4])
    return named + (f" and {sum(count for _, count in most[4:])} others" if len(most) > 4 else "")


def _step(row: Row) -> str:
    return "refuses" if "refused" in row else _ms(row["time_s"])


def _memory(row: Row) -> str:
    if "refused" in row:
        return f"{row['memory_bytes'] / 2**30:.1f} GiB: no room" if "memory_bytes" in row else "no room"
    return f"{row['memory_bytes'] / 2**30:.1f} GiB"


def _rule(columns: int) -> str:
    return "|" + " --- |" * columns


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
