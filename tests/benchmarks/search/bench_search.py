"""What the search costs: against the published methods, and on large models. Not a test.

    python -m tests.benchmarks.search.bench_search [section ...]

Sections: published, large, union, zoo, ablation, scalar. Every section runs in this process on
the same cost tables, after a warm-up. Results are added to
tests/benchmarks/results/search/DATE-search.{json,md,html}.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

import numpy as np

import tensoropt.search.auto as auto
from tensoropt.search import track_frontier, track_union
from tensoropt.search.program import Builder
from tensoropt.search.sources import VertexSource
from tests.benchmarks.search.baselines import OutOfTimeError, lambda_bisection, plain_tracking
from tests.benchmarks.search.graphs import Axis, encoder_decoder, rnn, transformer, wide_resnet

FOLDER = Path(__file__).parents[1] / "results" / "search"
PLAIN_LIMIT_S = float(os.environ.get("TENSOROPT_BENCH_LIMIT_S", "60"))
PLAIN_MESH = (Axis(4, 2e10), Axis(4))
FINE_MESH = (Axis(4, 2e10), Axis(2), Axis(2))
EIGHT = (Axis(2, 2e10), Axis(4))


GIANT = {"batch": 1024, "sequence": 4096, "width": 16384, "heads": 128, "vocabulary": 128256}


def machine() -> dict:
    model = next(
        (
            x.split(":")[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "",
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def timed(graph, repeats: int = 3, **settings):
    """(seconds of the fastest of some runs, frontier)."""
    best, found = np.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        found = track_frontier(graph, **settings)
        best = min(best, time.perf_counter() - start)
        if best > 5:
            break
    return best, found


def size(graph) -> dict:
    return {
        "operators": len(graph),
        "most_configurations": max(t.entries for t in graph.nodes),
        "edges": len(graph.edges),
    }


def published() -> list[dict]:
    """Against FT-LDP and FT-Elimination, plainly, on the paper's three shapes at 16 devices."""
    rows = []
    cases = {
        "RNN": (lambda n: rnn(n, FINE_MESH), (2, 4, 8)),
        "WideResNet": (lambda n: wide_resnet(n, PLAIN_MESH), (3, 6, 12, 24)),
        "Transformer": (lambda n: transformer(n, PLAIN_MESH), (1, 2, 4, 8, 16)),
    }
    for model, (make, sizes) in cases.items():
        finished = {"ldp": True, "elimination": True}
        for n in sizes:
            graph = make(n)
            seconds, found = timed(graph)
            row = {"model": model, "layers": n, **size(graph), "points": len(found), "ours_s": seconds}
            for method in finished:
                if not finished[method]:
                    continue
                start = time.perf_counter()
                try:
                    memory, cost = plain_tracking(graph, method == "ldp", PLAIN_LIMIT_S)
                except OutOfTimeError:
                    finished[method] = False
                    row[f"{method}_s"] = f"> {PLAIN_LIMIT_S:.0f}"
                    continue
                row[f"{method}_s"] = time.perf_counter() - start
                row[f"{method}_faster"] = row[f"{method}_s"] / seconds
                row[f"{method}_same"] = bool(
                    np.array_equal(memory, found.memory) and np.array_equal(cost, found.time)
                )
            rows.append(row)
            print(row, flush=True)
    return rows


def large() -> list[dict]:
    """Whole frontiers of large transformers."""
    rows = []
    giant = GIANT
    thousand = (Axis(8, 4e11), Axis(16, 5e10, 2e-5), Axis(8, 2.5e10, 3e-5))
    cases = [
        ("GPT, 12 layers, mesh 2x4", transformer(12, EIGHT), {}),
        ("GPT, 24 layers, mesh 2x4", transformer(24, EIGHT), {}),
        ("GPT, 48 layers, d=4096, mesh 2x4", transformer(48, EIGHT, width=4096, heads=32), {}),
        ("GPT, 12 layers, mesh 2x2x2", transformer(12, (Axis(2, 2e10), Axis(2), Axis(2))), {}),
        (
            "GPT, 126 layers, 1024 devices, gap <= 0.5 %",
            transformer(126, thousand, **giant),
            {"epsilon": 0.005},
        ),
        (
            "GPT, 126 layers, 1024 devices, gap <= 0.1 %",
            transformer(126, thousand, **giant),
            {"epsilon": 0.001},
        ),
        ("GPT, 126 layers, 1024 devices, exact", transformer(126, thousand, **giant), {}),
    ]
    for name, graph, settings in cases:
        rows.append(_large(name, graph, settings))
    return rows


def union() -> list[dict]:
    """Every mesh of 8 linked GPUs x a x b nodes with a * b = 128, times four micro-batch counts."""
    jobs = [(a, 128 // a, micro) for a in (16, 8, 32, 64, 128, 4, 2, 1) for micro in (1, 2, 4, 8)]
    building = building_cpu = 0.0

    def graphs():
        nonlocal building, building_cpu
        for a, b, micro in jobs:
            start, cpu = time.perf_counter(), time.process_time()
            links = (Axis(8, 4e11), Axis(a, 5e10, 2e-5), Axis(b, 2.5e10, 3e-5))
            mesh = tuple(axis for axis in links if axis.size > 1)
            graph = transformer(126, mesh, **{**GIANT, "batch": 1024 // micro})
            building += time.perf_counter() - start
            building_cpu += time.process_time() - cpu
            yield graph

    start, cpu = time.perf_counter(), time.process_time()
    found = track_union(graphs(), epsilon=0.005)
    total, total_cpu = time.perf_counter() - start, time.process_time() - cpu
    row = {
        "name": f"union over 8 meshes x 4 micro-batch counts ({len(jobs)} graphs), 1024 devices, "
        "gap <= 0.5 %",
        "seconds": total - building,
        "cpu_seconds": total_cpu - building_cpu,
        "building_tables_s": building,
        "points": len(found),
        "exact": found.exact,
        "median_gap": float(np.median(found.gap)),
        "worst_gap": max(p.worst_gap for p in found.parts),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(row, flush=True)
    return [row]


def _large(name, graph, settings) -> dict:
    seconds, found = timed(graph, 3, **settings)
    row = {
        "name": name,
        **size(graph),
        "seconds": seconds,
        "points": len(found),
        "exact": found.exact,
        "median_gap": float(np.median(found.gap)),
        "worst_gap": found.worst_gap,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(row, flush=True)
    return row


def zoo() -> list[dict]:
    """Exact frontiers of the zoo's shapes at 16 devices, treewidth up to 3, on every mesh."""
    rows = []
    models = {"rnn": rnn, "wide_resnet": wide_resnet, "gpt": transformer, "t5": encoder_decoder}
    layers = {"rnn": 8, "wide_resnet": 30, "gpt": 24, "t5": 12}
    meshes = {"16": (Axis(16, 2e10),), "4x4": PLAIN_MESH, "4x2x2": FINE_MESH}
    for model, make in models.items():
        for mesh, axes in meshes.items():
            rows.append(
                _large(f"{model}, {layers[model]} layers, mesh {mesh}", make(layers[model], axes), {})
            )
    return rows


@contextlib.contextmanager
def without(lever: str):
    """Switch one lever of the method off."""
    kept = auto.TIGHT, auto.WORTH_NARROWING, auto.seeds, Builder._step

    def vertices_only(problem, hull):
        return [VertexSource(problem, hull)]

    def never_shared(self, step):
        self._known.clear()
        return kept[3](self, step)

    if lever == "direct exact pass":
        auto.TIGHT = -1.0
    elif lever == "narrowing":
        auto.WORTH_NARROWING = 10**12
    elif lever == "crossovers":
        auto.seeds = vertices_only
    elif lever == "shared steps (identical layers)":
        Builder._step = never_shared
    try:
        yield
    finally:
        auto.TIGHT, auto.WORTH_NARROWING, auto.seeds, Builder._step = kept


LEVERS = ("none", "direct exact pass", "crossovers", "narrowing", "shared steps (identical layers)")


def ablation() -> list[dict]:
    """What each lever buys: exact frontiers of GPTs, one lever off at a time."""
    rows = []
    for layers, mesh, name in ((4, PLAIN_MESH, "4x4"), (24, PLAIN_MESH, "4x4"), (12, FINE_MESH, "4x2x2")):
        graph = transformer(layers, mesh)
        for lever in LEVERS:
            with without(lever):
                seconds, found = timed(graph)
            rows.append(
                {"layers": layers, "mesh": name, "off": lever, "seconds": seconds, "points": len(found)}
            )
            print(rows[-1], flush=True)
        seconds, found = timed(graph, threads=1)
        rows.append({"layers": layers, "mesh": name, "off": "second thread", "seconds": seconds})
        if layers == 4:
            for method in ("ldp", "elimination"):
                seconds, other = timed(graph, 1, method=method)
                same = np.array_equal(other.memory, found.memory) and np.array_equal(other.time, found.time)
                off = f"pruning (our kernels, the paper's {method})"
                rows.append({"layers": layers, "mesh": name, "off": off, "seconds": seconds, "same": same})
                start = time.perf_counter()
                plain_tracking(graph, method == "ldp", PLAIN_LIMIT_S)
                seconds = time.perf_counter() - start
                off = f"pruning and kernels (numpy, the paper's {method})"
                rows.append({"layers": layers, "mesh": name, "off": off, "seconds": seconds})
            for row in rows[-4:]:
                print(row, flush=True)
    return rows


def scalar() -> list[dict]:
    """Against one weighted-sum solve per strategy, and one integer program for one budget (HiGHS)."""
    rows = []
    for layers in (2, 12):
        graph = transformer(layers, PLAIN_MESH)
        seconds, found = timed(graph)
        start = time.perf_counter()
        vertices = lambda_bisection(graph, 1e-3)
        bisection = time.perf_counter() - start
        row = {"layers": layers, "ours_s": seconds, "points": len(found)}
        row |= {"bisection_s": bisection, "bisection_points": vertices}
        rows.append(row)
        print(row, flush=True)
    return rows


def markdown(results: dict) -> str:
    lines = [f"# Search, {results['date']}", "", "Machine: " + json.dumps(results["machine"]), ""]
    for section in (k for k in results if isinstance(results[k], list)):
        rows = results[section]
        columns = list(dict.fromkeys(c for row in rows for c in row))
        lines += [f"## {section}", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for row in rows:
            cells = [row.get(c, "") for c in columns]
            lines.append(
                "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
            )
        lines.append("")
    return "\n".join(lines)


def plots(results: dict) -> str:
    """One page: time against layers, and against points."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("time against layers", "time against frontier points"))
    rows = results.get("published", [])
    for model in dict.fromkeys(r["model"] for r in rows):
        for key in ("ours_s", "ldp_s", "elimination_s"):
            part = [r for r in rows if r["model"] == model and isinstance(r.get(key), float)]
            for column, x in ((1, "layers"), (2, "points")):
                figure.add_trace(
                    go.Scatter(
                        x=[r[x] for r in part], y=[r[key] for r in part], name=f"{model} {key[:-2]}",
                        mode="lines+markers", showlegend=column == 1,
                    ),
                    1,
                    column,
                )  # fmt: skip
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", title="seconds")
    return figure.to_html(include_plotlyjs="cdn")


def main() -> None:
    sections = {f.__name__: f for f in (published, large, union, zoo, ablation, scalar)}
    wanted = sys.argv[1:] or list(sections)
    FOLDER.mkdir(parents=True, exist_ok=True)
    stem = FOLDER / f"{datetime.date.today()}-search"
    path = stem.with_suffix(".json")
    results = json.loads(path.read_text()) if path.exists() else {}
    results |= {"date": str(datetime.date.today()), "machine": machine()}
    track_frontier(rnn(2, PLAIN_MESH))  # compile or load the kernels
    for name in wanted:
        results[name] = sections[name]()
        path.write_text(json.dumps(results, indent=1))
        stem.with_suffix(".md").write_text(markdown(results))
        stem.with_suffix(".html").write_text(plots(results))


if __name__ == "__main__":
    main()
