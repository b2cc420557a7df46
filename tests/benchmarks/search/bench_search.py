"""What the search costs: against the published methods, and on large models. Not a test.

    python -m tests.benchmarks.search.bench_search [--quick] [section ...]

Sections: published, large, zoo, ablation, budgets, scaling, union. Every section runs in this process on
the same cost tables, after a warm-up, and is written as soon as it is done: results of all sections of a run
stand in tests/benchmarks/results/search/DATE-search.{json,md,svg}, those of ``--quick`` in out/search.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import time
import traceback
from pathlib import Path

import numpy as np

import tensoropt.search.exact as exact
import tensoropt.search.reduced_graph as reduced_graph
from tensoropt.search import track_frontier
from tensoropt.search.program import ProgramBuilder
from tensoropt.search.sources import VertexSource
from tests.benchmarks.machine import Taking, dated, write
from tests.benchmarks.search.baselines import OutOfTimeError, plain_tracking
from tests.benchmarks.search.budget_baselines import binned, integer_program, lambda_bisection
from tests.benchmarks.search.graphs import Axis, encoder_decoder, rnn, transformer, wide_resnet
from tests.benchmarks.search.published import FINE_MESH, PLAIN_LIMIT_S, PLAIN_MESH, published, size
from tests.benchmarks.search.report import markdown, plots
from tests.search.union_search import track_union

PROGRAM_LIMIT_S = 1.6 * PLAIN_LIMIT_S
EIGHT = (Axis(2, 2e10), Axis(4))


GIANT = {"batch": 1024, "sequence": 4096, "width": 16384, "heads": 128, "vocabulary": 128256}


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


def large(quick: bool) -> list[dict]:
    """Whole frontiers of large transformers."""
    rows = []
    giant = GIANT
    thousand = (Axis(8, 4e11), Axis(16, 5e10, 2e-5), Axis(8, 2.5e10, 3e-5))
    cases = [
        ("GPT, 12 layers, mesh 2x4", lambda: transformer(12, EIGHT), {}),
        ("GPT, 24 layers, mesh 2x4", lambda: transformer(24, EIGHT), {}),
        ("GPT, 48 layers, d=4096, mesh 2x4", lambda: transformer(48, EIGHT, width=4096, heads=32), {}),
        ("GPT, 12 layers, mesh 2x2x2", lambda: transformer(12, (Axis(2, 2e10), Axis(2), Axis(2))), {}),
        (
            "GPT, 126 layers, 1024 devices, gap <= 0.5 %",
            lambda: transformer(126, thousand, **giant),
            {"epsilon": 0.005},
        ),
        (
            "GPT, 126 layers, 1024 devices, gap <= 0.1 %",
            lambda: transformer(126, thousand, **giant),
            {"epsilon": 0.001},
        ),
        ("GPT, 126 layers, 1024 devices, exact", lambda: transformer(126, thousand, **giant), {}),
    ]
    for name, make, settings in cases[:1] if quick else cases:
        rows.append(_large(name, make(), settings))
    return rows


def union(quick: bool) -> list[dict]:
    """Every mesh of 8 linked GPUs x a x b nodes with a * b = 128, times four micro-batch counts."""
    jobs = [(a, 128 // a, micro) for a in (16, 8, 32, 64, 128, 4, 2, 1) for micro in (1, 2, 4, 8)]
    layers = 126
    if quick:
        jobs, layers = jobs[:2], 2
    building = building_cpu = 0.0

    def graphs():
        nonlocal building, building_cpu
        for a, b, micro in jobs:
            start, cpu = time.perf_counter(), time.process_time()
            links = (Axis(8, 4e11), Axis(a, 5e10, 2e-5), Axis(b, 2.5e10, 3e-5))
            mesh = tuple(axis for axis in links if axis.size > 1)
            graph = transformer(layers, mesh, **{**GIANT, "batch": 1024 // micro})
            building += time.perf_counter() - start
            building_cpu += time.process_time() - cpu
            print(f"  union: tables for mesh 8x{a}x{b}, {micro} micro-batches", flush=True)
            yield graph

    start, cpu = time.perf_counter(), time.process_time()
    found = track_union(graphs(), epsilon=0.005)
    total, total_cpu = time.perf_counter() - start, time.process_time() - cpu
    row = {
        "name": f"union over {len(jobs)} graphs (meshes x micro-batch counts), {layers} layers, "
        "1024 devices, gap <= 0.5 %",
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


def zoo(quick: bool) -> list[dict]:
    """Exact frontiers of the zoo's shapes at 16 devices, treewidth up to 3, on every mesh."""
    rows = []
    models = {"rnn": rnn, "wide_resnet": wide_resnet, "gpt": transformer, "t5": encoder_decoder}
    layers = {"rnn": 8, "wide_resnet": 30, "gpt": 24, "t5": 12}
    if quick:
        layers = {"rnn": 2, "wide_resnet": 3, "gpt": 2}
    meshes = {"16": (Axis(16, 2e10),), "4x4": PLAIN_MESH, "4x2x2": FINE_MESH}
    for model in layers:
        make = models[model]
        for mesh, axes in list(meshes.items())[: 2 if quick else None]:
            rows.append(
                _large(f"{model}, {layers[model]} layers, mesh {mesh}", make(layers[model], axes), {})
            )
    return rows


@contextlib.contextmanager
def without(lever: str):
    """Switch one lever of the method off."""
    kept = exact.TIGHT, exact.WORTH_NARROWING, exact.seeds, ProgramBuilder._step
    unique = reduced_graph._unique

    def vertices_only(reduced, hull):
        return [VertexSource(reduced, hull)]

    def never_shared(self, step):
        self._known.clear()
        return kept[3](self, step)

    def all_distinct(rows):
        return np.arange(len(rows)), np.arange(len(rows))

    if lever == FACTORING:
        reduced_graph._unique = all_distinct
    elif lever == "direct exact pass":
        exact.TIGHT = -1.0
    elif lever == "narrowing":
        exact.WORTH_NARROWING = 10**12
    elif lever == "crossovers":
        exact.seeds = vertices_only
    elif lever == "shared steps (identical layers)":
        ProgramBuilder._step = never_shared
    try:
        yield
    finally:
        exact.TIGHT, exact.WORTH_NARROWING, exact.seeds, ProgramBuilder._step = kept
        reduced_graph._unique = unique


FACTORING = "factoring (configurations that agree on placements)"
LEVERS = (
    "none",
    FACTORING,
    "direct exact pass",
    "crossovers",
    "narrowing",
    "shared steps (identical layers)",
)


def ablation(quick: bool) -> list[dict]:
    """What each lever buys: exact frontiers of GPTs, one lever off at a time."""
    rows = []
    cases = ((4, PLAIN_MESH, "4x4"), (24, PLAIN_MESH, "4x4"), (12, FINE_MESH, "4x2x2"))
    for layers, mesh, name in ((1, PLAIN_MESH, "4x4"),) if quick else cases:
        graph = transformer(layers, mesh)
        for lever in LEVERS:
            if lever == FACTORING and mesh == FINE_MESH:
                continue  # minutes, and several GiB
            with without(lever):
                seconds, found = timed(graph)
            rows.append(
                {"layers": layers, "mesh": name, "off": lever, "seconds": seconds, "points": len(found)}
            )
            print(rows[-1], flush=True)
        seconds, found = timed(graph, threads=1)
        rows.append({"layers": layers, "mesh": name, "off": "second thread", "seconds": seconds})
        if layers <= 4:
            for method in ("ldp", "elimination"):
                seconds, other = timed(graph, 1, method=method)
                same = np.array_equal(other.memory, found.memory) and np.array_equal(other.time, found.time)
                off = f"pruning (our kernels, the paper's {method})"
                rows.append({"layers": layers, "mesh": name, "off": off, "seconds": seconds, "same": same})
                start = time.perf_counter()
                try:
                    plain_tracking(graph, method, PLAIN_LIMIT_S)
                    seconds = time.perf_counter() - start
                except OutOfTimeError:
                    seconds = f"> {PLAIN_LIMIT_S:.0f}"
                off = f"pruning and kernels (numpy, the paper's {method})"
                rows.append({"layers": layers, "mesh": name, "off": off, "seconds": seconds})
            for row in rows[-4:]:
                print(row, flush=True)
    return rows


def budgets(quick: bool) -> list[dict]:
    """One integer program per budget (HiGHS), weighted sums, and memory in bins, on the same tables."""
    rows = []
    for layers, mesh, name in ((1, EIGHT, "2x4"),) if quick else ((2, EIGHT, "2x4"), (12, EIGHT, "2x4")):
        graph = transformer(layers, mesh)
        seconds, found = timed(graph)
        row = {"layers": layers, "mesh": name, "ours_s": seconds, "points": len(found)}
        start = time.perf_counter()
        row["bisection_points"] = lambda_bisection(graph, 1e-3)
        row["bisection_s"] = time.perf_counter() - start
        print("  frontier and weighted sums done", flush=True)
        middle = len(found) // 2
        spent, best = integer_program(graph, float(found.memory[middle]) * (1 + 1e-9), PROGRAM_LIMIT_S)
        row["one_budget_highs_s"] = spent if best is not None else f"> {PROGRAM_LIMIT_S:.0f}"
        if best is not None:
            row["highs_same"] = bool(abs(best / found.time[middle] - 1) < 1e-5)
        print("  integer program done", flush=True)
        bins = 256 if quick else 1024
        binned(transformer(1, (Axis(2),)), 1e12, 4, PLAIN_LIMIT_S)  # compile
        start = time.perf_counter()
        coarse = binned(graph, float(found.memory[-1]), bins, PLAIN_LIMIT_S)
        row["bins"] = bins
        row["binned_s"] = f"> {PLAIN_LIMIT_S:.0f}" if coarse is None else time.perf_counter() - start
        if coarse is not None and len(coarse[0]):
            exact = found.time[np.searchsorted(found.memory, coarse[0] * (1 + 1e-12), side="right") - 1]
            slower = coarse[1] / exact - 1
            row |= {"binned_median_slower": float(np.median(slower)), "binned_worst_slower": slower.max()}
            row["binned_least_memory"] = float(coarse[0][0] / found.memory[0])
        rows.append({k: float(v) if isinstance(v, np.floating) else v for k, v in row.items()})
        print(rows[-1], flush=True)
    return rows


def scaling(quick: bool) -> list[dict]:
    """Ours alone: layers at one mesh, then meshes (configurations) at one number of layers."""
    layers = (1, 2) if quick else (2, 4, 8, 16, 32, 64)
    meshes = {"16": (Axis(16, 2e10),), "4x4": PLAIN_MESH, "4x2x2": FINE_MESH}
    jobs = [("layers", n, "4x4") for n in layers]
    jobs += [("mesh", n, mesh) for n in layers[:2] for mesh in list(meshes)[: 2 if quick else None]]
    rows = []
    for swept, n, mesh in jobs:
        graph = transformer(n, meshes[mesh])
        seconds, found = timed(graph)
        row = {"swept": swept, "layers": n, "mesh": mesh, **size(graph), "points": len(found)}
        rows.append({**row, "seconds": seconds, "exact": found.exact})
        print(rows[-1], flush=True)
    return rows


SECTIONS = {f.__name__: f for f in (published, large, zoo, ablation, budgets, scaling, union)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="where the results go")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    stem = dated("search", "search", quick=options.quick, out=options.out)
    taking = Taking()
    results: dict = {**taking.about, "taken": {}}
    track_frontier(rnn(2, PLAIN_MESH))  # compile or load the kernels
    begin = time.perf_counter()
    for name in options.sections or SECTIONS:
        print(f"[{time.perf_counter() - begin:.0f} s] {name}", flush=True)
        try:
            results[name] = SECTIONS[name](options.quick)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            results[name] = [{"error": f"{type(error).__name__}: {error}"}]
        results["taken"][name] = taking.part()
        write(stem, results, markdown(results, stem.name), plots(results))
    print(f"[{time.perf_counter() - begin:.0f} s] written to {stem}.json, .md and .svg", flush=True)


if __name__ == "__main__":
    main()
