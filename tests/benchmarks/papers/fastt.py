"""FastT's comparison: nine models, strong and weak scaling.

Yi et al., Fast Training of Deep Learning Models over Multiple GPUs, Middleware 2020. The paper measured on
V100s; here every step is played by one judge on data-sheet figures, beside what the paper says of its tables
and figures. Batches are this benchmark's: the paper's were not at hand, but for Bert-large's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tensoropt.cluster import load_cluster
from tensoropt.costs.source import CostSource
from tensoropt.errors import TensorOptError
from tensoropt.launchers.job import LaunchedJob
from tensoropt.planners.pinned import simulate_pinned
from tensoropt.profiling.store import ProfileStore
from tensoropt.question.settings import Settings
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
                captured(model, batch, options), costs, LaunchedJob(launcher="", data=where.device_count)
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


def tables(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown: the paper's tables and figures, each beside what it says."""
    of = {name: [r for r in rows if r["section"] == name] for name in ("scaling", "order")}
    return [
        "## FastT: strong and weak scaling, samples per second",
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
        "## FastT's gains, theirs beside ours",
        "",
        *beside(of["scaling"], of["order"]),
        "",
        *_strategy_seconds(of["scaling"]),
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
